"""How long a request took, as vLLM tells it in `metrics`: for clients that want more than their own clock says.

The words are vLLM's, and so is what they mean: the first token counts from the first step, so that waiting for it is
the sum of two numbers.
"""

from core import RequestTimes


def timings(times: RequestTimes | None, *, arrival_s: float, num_tokens: int) -> dict[str, float]:
    """Fields of ResponseMetrics for one sequence that has ended, those left out that there is nothing to say of."""
    if times is None:
        return {}
    found = {"queue_time_ms": _ms(arrival_s, times.scheduled_s)}
    first_s, last_s = times.first_token_s, times.last_token_s
    if first_s is None or last_s is None:
        return found
    found["time_to_first_token_ms"] = _ms(times.scheduled_s, first_s)
    found["generation_time_ms"] = _ms(first_s, last_s)
    if num_tokens > 1:
        found["mean_itl_ms"] = found["generation_time_ms"] / (num_tokens - 1)
    if last_s > times.scheduled_s:
        found["tokens_per_second"] = num_tokens / (last_s - times.scheduled_s)
    return found


def _ms(start_s: float, end_s: float) -> float:
    return (end_s - start_s) * 1000
