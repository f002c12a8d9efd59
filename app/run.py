"""A job under way: from the engine's outputs back to choices, usage and metrics.

A `Run` ends its sequences when it is left, whatever the way out.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

from app.access import MAX_SHOWN_CHARACTERS, key_name, note, trace
from app.drafts import DraftTally
from app.engine_loop import EngineLoop, Stream
from app.errors import SERVER_ERROR, ApiError
from app.generation import Job
from app.prompts import Prompt
from app.schemas.generation import FinishReason, PromptTokensDetails, ResponseMetrics, Usage
from app.timings import timings
from app.tracing import TracedSequence
from app.under_way import UnderWay
from core import FinishReason as EngineFinishReason
from core import InvalidRequest, RequestOutput, RequestTimes

logger = logging.getLogger(__name__)

_SHOWN_REASONS: dict[EngineFinishReason, FinishReason] = {
    EngineFinishReason.STOP: "stop",
    EngineFinishReason.LENGTH: "length",
}


class Run:
    """A job under way. Use it in a `with`: leaving it aborts whatever still runs.

    `under_way`: where it is found by others while it is entered, and what may refuse it. `timeout_s`: most seconds from
    arrival to the end of its last sequence; beyond them its reader hears of it. `tells_times`: whether responses tell
    how long it took; `draft_metrics`: what they tell of drafts: none, summary or detailed.
    """

    def __init__(
        self,
        loop: EngineLoop,
        job: Job,
        under_way: UnderWay,
        *,
        timeout_s: float | None = None,
        tells_times: bool = False,
        draft_metrics: str = "none",
    ) -> None:
        self.job = job
        self.ids = {job.id, job.trace_id}
        self.owner = key_name()
        self._under_way = under_way
        self._loop = loop
        self._stream: Stream | None = None
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._index = {request_id: index for index, request_id in enumerate(job.request_ids)}
        self._last: dict[int, RequestOutput] = {}
        self._times: dict[int, RequestTimes | None] = {}
        self._tells_times = tells_times
        self._draft_metrics = draft_metrics
        self._drafts = DraftTally()

    @property
    def num_in_flight(self) -> int:
        """Its sequences that wait or run."""
        return 0 if self._stream is None else len(self._stream.open_ids)

    def __enter__(self) -> Self:
        self._under_way.refuse_beyond_share(self.owner, len(self._index))
        self._stream = self._loop.submit(self.job.requests)
        self._under_way.add(self)
        if self._timeout_s is not None:
            left_s = self._timeout_s - (time.monotonic() - self.job.requests[0].arrival_s)
            self._timer = asyncio.get_running_loop().call_later(left_s, self._time_out)
        return self

    def __exit__(self, *exc_info: object) -> None:
        assert self._stream is not None
        if self._timer is not None:
            self._timer.cancel()
        self._under_way.discard(self)
        self._stream.close()
        self._note()

    def abort(self) -> None:
        """Let whoever reads it hear that somebody has ended it."""
        self._end(ApiError(410, "The request was ended by /abort_requests", code="request_aborted"))

    def _time_out(self) -> None:
        if self.num_in_flight:  # else all is there, and only has to be read
            limit = f"The request did not end within {self._timeout_s:g} s, the limit of this server"
            self._end(ApiError(504, limit, kind=SERVER_ERROR, code="timeout"))

    def _end(self, error: Exception) -> None:
        assert self._stream is not None
        self._stream.close()
        self._stream.fail(error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[tuple[int, RequestOutput]]:
        """(sample, output) pairs of the steps since the last time; [] is a sign of life. Raises for a failed one."""
        assert self._stream is not None
        pairs = [(self._index[output.request_id], output) for output in await anext(self._stream)]
        for index, output in pairs:
            self._last[index] = output
            self._times[index] = output.times or self._times.get(index)
            if output.drafts is not None:
                self._drafts.add(output.drafts, is_kept=self._draft_metrics != "none" and self._has_one_sequence)
            if output.is_refused:
                raise InvalidRequest(output.error or "")
            if output.is_finished and output.finish_reason not in _SHOWN_REASONS:
                logger.error("request failed", extra={"request_id": self.job.id, "error": output.error})
                raise ApiError(500, "The engine failed on this request", kind=SERVER_ERROR)
        return pairs

    def mark_shown(self) -> None:
        """The client has been sent something just now: signs of life are given to those who see nothing for long."""
        assert self._stream is not None
        self._stream.mark_shown()

    async def collect(self) -> list[RequestOutput]:
        """All outputs to the end, merged to one per choice, in order: of each prompt's samples, the n best."""
        outputs: list[list[RequestOutput]] = [[] for _ in self._index]
        async for pairs in self:
            for index, output in pairs:
                outputs[index].append(output)
        merged = [merge(parts) for parts in outputs]
        size = self.job.num_samples
        if size == self.job.n:
            return merged
        return [best for i in range(0, len(merged), size) for best in most_likely(merged[i : i + size], self.job.n)]

    def usage(self) -> Usage:
        """Tokens so far. Each prompt counts once, and so do its cached tokens."""
        job = self.job
        first_samples = (self._last[i] for i in range(0, len(self._index), job.num_samples) if i in self._last)
        usage = make_usage(
            job.prompts,
            num_generated=sum(output.num_generated_tokens for output in self._last.values()),
            num_cached=sum(output.num_cached_tokens for output in first_samples),
        )
        if job.has_prediction:
            usage.completion_tokens_details = self._drafts.prediction_details()
        return usage

    def totals(self) -> dict[str, Any]:
        """What a response tells of the request as a whole: usage and, where the server is told to, metrics."""
        return {"usage": self.usage(), **self._metrics()}

    @property
    def _has_one_sequence(self) -> bool:
        """What is told in metrics is of one; vLLM says null where there are several."""
        return len(self._index) == 1

    def _metrics(self) -> dict[str, Any]:
        if not self._tells_times and self._draft_metrics == "none":
            return {}
        if not self._has_one_sequence:
            return {"metrics": None}
        return {"metrics": ResponseMetrics(**self._times_told(), **self._drafts_told())}

    def _times_told(self) -> dict[str, Any]:
        if not self._tells_times:
            return {}
        num_tokens = self.usage().completion_tokens
        return timings(self._times.get(0), arrival_s=self.job.requests[0].arrival_s, num_tokens=num_tokens)

    def _drafts_told(self) -> dict[str, Any]:
        speculative = self._loop.engine.config.speculative
        if speculative is None or self._draft_metrics == "none":
            return {}
        is_detailed = self._draft_metrics == "detailed"
        summary = self._drafts.summary(speculative.num_speculative_tokens, is_detailed=is_detailed)
        return {"speculative_decoding": summary}

    def _note(self) -> None:
        outputs = self._last.values()
        reasons = {output.finish_reason.value for output in outputs if output.finish_reason is not None}
        if sum(output.is_finished for output in outputs) < len(self._index):
            reasons.add(EngineFinishReason.ABORT.value)
        usage = self.usage()
        fields = {
            "request_id": self.job.id,
            "trace_id": self.job.trace_id[:MAX_SHOWN_CHARACTERS],
            "reason": ",".join(sorted(reasons)),
            "num_choices": self.job.num_choices,
            "num_prompt_tokens": usage.prompt_tokens,
            "num_output_tokens": usage.completion_tokens,
        }
        note(**fields)
        trace(self._sequences())

    def _sequences(self) -> Iterator[TracedSequence]:
        """What is to be told of each in a trace."""
        now_s, arrival_s = time.monotonic(), self.job.requests[0].arrival_s
        for request_id, index in self._index.items():
            last, times = self._last.get(index), self._times.get(index)
            is_over = last is not None and last.is_finished
            ended_s = times.last_token_s if is_over and times is not None else None
            yield TracedSequence(request_id, arrival_s, now_s if ended_s is None else ended_s, times)


def make_usage(prompts: Sequence[Prompt], *, num_generated: int = 0, num_cached: int = 0) -> Usage:
    num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_generated,
        total_tokens=num_prompt_tokens + num_generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
    )


def merge(parts: Sequence[RequestOutput]) -> RequestOutput:
    """Successive deltas of one sequence as one."""
    return replace(
        parts[-1],
        text="".join(part.text for part in parts),
        tokens=tuple(token for part in parts for token in part.tokens),
        drafts=None,
        prompt_logprobs=parts[0].prompt_logprobs,
    )


def most_likely(samples: Sequence[RequestOutput], num: int) -> list[RequestOutput]:
    """The `num` samples with the highest mean log-probability a token, best first."""

    def mean_logprob(sample: RequestOutput) -> float:
        logprobs = [token.logprobs.logprob for token in sample.tokens if token.logprobs is not None]
        return sum(logprobs) / len(logprobs) if logprobs else 0.0  # none are drawn where only the prompt is scored

    return sorted(samples, key=mean_logprob, reverse=True)[:num]


def shown_reason(output: RequestOutput) -> FinishReason | None:
    """The finish reason as clients know it, None while it goes on."""
    return None if output.finish_reason is None else _SHOWN_REASONS[output.finish_reason]
