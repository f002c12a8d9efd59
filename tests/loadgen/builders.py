"""Records written by hand."""

from collections.abc import Sequence
from typing import Any

from loadgen.record import Chunk, RequestRecord


def record(
    *,
    t_sched: float = 0.0,
    t_send: float | None = None,
    chunks: Sequence[tuple[float, int]] = (),
    **fields: Any,
) -> RequestRecord:
    """Chunks are (time, tokens); a request leaves when it is meant to unless said otherwise."""
    t_send = t_sched if t_send is None else t_send
    kept = tuple(Chunk(time_s, count) for time_s, count in chunks)
    return RequestRecord(
        index=fields.pop("index", 0),
        t_sched=t_sched,
        t_queue=fields.pop("t_queue", t_sched),
        t_send=t_send,
        t_end=kept[-1].time_s if kept else t_send,
        t_first=kept[0].time_s if kept else None,
        t_last=kept[-1].time_s if kept else None,
        chunks=kept,
        **fields,
    )
