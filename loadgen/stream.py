"""What one response stream says: events out of bytes, and tokens out of events.

A chunk may hold several tokens (speculation, a batched flush), so its tokens are counted, in this order of trust:
the `token_ids` it carries; the running usage it carries (`continuous_usage_stats`); the total of the usage chunk,
spread evenly over the chunks that carry text; one per such chunk. A 200 proves nothing by itself: an error
frame, an answer that its server gave up, or an end without `[DONE]`, is a failure.
"""

import json
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from loadgen.record import EMPTY, ERROR_FRAME, MALFORMED, TRUNCATED, Chunk

FROM_TOKEN_IDS = "token_ids"
FROM_RUNNING_USAGE = "running usage"
FROM_TOTAL_USAGE = "total usage, spread evenly"
FROM_CHUNKS = "one per chunk"
DONE = b"[DONE]"
GIVEN_UP = {"abort", "error"}  # what vLLM and SGLang finish an answer with that is none


class StreamFailure(Exception):
    """The stream cannot count as an answer; `kind` is one of loadgen.record's."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class SseParser:
    """Server-sent events from bytes cut anywhere. Comments, and fields other than data, are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    @property
    def has_done_at_end(self) -> bool:
        """Whether the bytes so far end with a `[DONE]` behind which no blank line came: as good as one with it."""
        last = self._rest[5:] if self._rest.startswith(b"data:") else b"".join(self._data)
        return last.strip() == DONE


@dataclass(frozen=True)
class Usage:
    """What a server says it counted; None where it does not say."""

    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None


@dataclass(frozen=True)
class _Arrival:
    time_s: float
    has_text: bool
    num_token_ids: int | None
    num_tokens_so_far: int | None


class StreamReader:
    """Takes the events of one response with their arrival times; says afterwards what came."""

    def __init__(self) -> None:
        self.is_done = False
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self._arrivals: list[_Arrival] = []

    def take(self, data: bytes, time_s: float) -> None:
        """Raises StreamFailure for an error frame and for what is not a JSON object."""
        if data.strip() == DONE:
            self.is_done = True
            return
        frame = _parse_frame(data)
        try:
            usage = _read_usage(frame["usage"]) if frame.get("usage") else None
            self.usage = usage or self.usage
            if choices := frame.get("choices"):
                self._arrivals.append(_read_arrival(choices, usage, time_s))
                reasons = [str(reason) for choice in choices if (reason := choice.get("finish_reason"))]
                self.finish_reason = next(iter(reasons), self.finish_reason)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise StreamFailure(MALFORMED, f"not a completion chunk: {data[:80]!r}") from error
        if self.finish_reason in GIVEN_UP:
            raise StreamFailure(ERROR_FRAME, f"finish_reason {self.finish_reason}")

    def check_complete(self) -> None:
        """Raises StreamFailure unless the stream ended properly and said something."""
        if not self.is_done:
            raise StreamFailure(TRUNCATED, "the stream ended without [DONE]")
        if not self._arrivals:
            raise StreamFailure(EMPTY, "the stream held no choices")

    @property
    def first_and_last_s(self) -> tuple[float, float] | None:
        """Arrival of the first and last tokens; of the first and last choices if none held any."""
        times = [chunk.time_s for chunk in self.chunks] or [arrival.time_s for arrival in self._arrivals]
        return (times[0], times[-1]) if times else None

    @property
    def token_source(self) -> str:
        if any(arrival.num_token_ids is not None for arrival in self._arrivals):
            return FROM_TOKEN_IDS
        # Some servers put the total on the last chunk alone: that is no running count.
        if self._arrivals and all(arrival.num_tokens_so_far is not None for arrival in self._arrivals):
            return FROM_RUNNING_USAGE
        return FROM_TOTAL_USAGE if self.usage else FROM_CHUNKS

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The arrivals that held tokens, with how many."""
        match self.token_source:
            case "token_ids":
                counts = [arrival.num_token_ids or 0 for arrival in self._arrivals]
            case "running usage":
                totals = accumulate([0, *(arrival.num_tokens_so_far or 0 for arrival in self._arrivals)], max)
                counts = [total - before for before, total in pairwise(totals)]
            case _:
                counts = self._spread()
        pairs = zip(self._arrivals, counts, strict=True)
        return tuple(Chunk(arrival.time_s, count) for arrival, count in pairs if count > 0)

    def _spread(self) -> list[int]:
        """Tokens per arrival when only their total is known, or not even that."""
        with_text = [i for i, arrival in enumerate(self._arrivals) if arrival.has_text]
        counts = [0] * len(self._arrivals)
        total = (self.usage and self.usage.num_output_tokens) or len(with_text)
        for place, i in enumerate(with_text):
            counts[i] = total * (place + 1) // len(with_text) - total * place // len(with_text)
        return counts


def _parse_frame(data: bytes) -> dict[str, Any]:
    try:
        frame = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StreamFailure(MALFORMED, f"not JSON: {data[:80]!r}") from error
    if not isinstance(frame, dict):
        raise StreamFailure(MALFORMED, f"not an object: {data[:80]!r}")
    if _is_error(frame):
        raise StreamFailure(ERROR_FRAME, error_text(frame))
    return frame


def _is_error(frame: dict[str, Any]) -> bool:
    """In any of the shapes servers use: an object under `error`, or flat with a message or a type of its own."""
    if frame.get("error") is not None or "error" in (frame.get("object"), frame.get("type")):
        return True
    return "message" in frame and "choices" not in frame


def _read_usage(usage: dict[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        num_prompt_tokens=_count(usage.get("prompt_tokens")),
        num_cached_tokens=_count(details.get("cached_tokens")),
        num_output_tokens=_count(usage.get("completion_tokens")),
    )


def _count(value: Any) -> int | None:
    """Raises what `int` raises, and ValueError below 0."""
    number = None if value is None else int(value)
    if number is not None and number < 0:
        raise ValueError(f"{number} tokens")
    return number


def _read_arrival(choices: list[dict[str, Any]], usage: Usage | None, time_s: float) -> _Arrival:
    """What came together: of one choice, or where `n` is above 1 of several."""
    ids = [choice["token_ids"] for choice in choices if choice.get("token_ids") is not None]
    return _Arrival(
        time_s,
        has_text=any(_has_text(choice) for choice in choices),
        num_token_ids=sum(map(len, ids)) if ids else None,
        num_tokens_so_far=usage.num_output_tokens if usage else None,
    )


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether it says anything: an answer, or a reasoning, a refusal, a call of a tool. A role alone says nothing."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text")) or any(value for name, value in delta.items() if name != "role")


def error_text(body: Any) -> str:
    """The message of an error object in any of the shapes servers use, shortened, and fit to be printed."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:200].encode(errors="replace").decode()
