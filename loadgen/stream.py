"""What one response stream says: events out of bytes, and tokens out of events.

A chunk may hold several tokens (speculation, a batched flush), so its tokens are counted, in this order of trust:
the `token_ids` it carries; the running usage it carries (`continuous_usage_stats`); the total of the usage chunk,
spread evenly over the chunks that carry text; one per such chunk. A 200 proves nothing by itself: an error
frame, or an end without `[DONE]`, is a failure.
"""

import json
from dataclasses import dataclass
from typing import Any

from loadgen.record import EMPTY, ERROR_FRAME, MALFORMED, TRUNCATED, Chunk

FROM_TOKEN_IDS = "token_ids"
FROM_RUNNING_USAGE = "running usage"
FROM_TOTAL_USAGE = "total usage, spread evenly"
FROM_CHUNKS = "one per chunk"


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
        self.usage: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self._arrivals: list[_Arrival] = []

    def take(self, data: bytes, time_s: float) -> None:
        """Raises StreamFailure for an error frame and for what is not a JSON object."""
        if data == b"[DONE]":
            self.is_done = True
            return
        frame = _parse_frame(data)
        try:
            self.usage = frame.get("usage") or self.usage
            if frame.get("choices"):
                self._arrivals.append(_read_arrival(frame, time_s))
                self.finish_reason = frame["choices"][0].get("finish_reason") or self.finish_reason
        except (AttributeError, KeyError, TypeError) as error:
            raise StreamFailure(MALFORMED, f"not a completion chunk: {data[:80]!r}") from error

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
                totals = [arrival.num_tokens_so_far or 0 for arrival in self._arrivals]
                counts = [total - before for before, total in zip([0, *totals], totals, strict=False)]
            case _:
                counts = self._spread()
        pairs = zip(self._arrivals, counts, strict=True)
        return tuple(Chunk(arrival.time_s, count) for arrival, count in pairs if count > 0)

    def _spread(self) -> list[int]:
        """Tokens per arrival when only their total is known, or not even that."""
        with_text = [i for i, arrival in enumerate(self._arrivals) if arrival.has_text]
        counts = [0] * len(self._arrivals)
        total = int((self.usage or {}).get("completion_tokens") or len(with_text))
        for place, i in enumerate(with_text):
            counts[i] = total * (place + 1) // len(with_text) - total * place // len(with_text)
        return counts


def _parse_frame(data: bytes) -> dict[str, Any]:
    try:
        frame = json.loads(data)
    except ValueError as error:
        raise StreamFailure(MALFORMED, f"not JSON: {data[:80]!r}") from error
    if not isinstance(frame, dict):
        raise StreamFailure(MALFORMED, f"not an object: {data[:80]!r}")
    if frame.get("error"):
        raise StreamFailure(ERROR_FRAME, error_text(frame))
    return frame


def _read_arrival(frame: dict[str, Any], time_s: float) -> _Arrival:
    choice = frame["choices"][0]
    text = choice.get("text") or (choice.get("delta") or {}).get("content")
    token_ids = choice.get("token_ids")
    total = (frame.get("usage") or {}).get("completion_tokens")
    return _Arrival(time_s, bool(text), None if token_ids is None else len(token_ids), total)


def error_text(body: Any) -> str:
    """The message of an error object in any of the shapes servers use, shortened."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:200]
