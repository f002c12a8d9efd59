"""What is known of one request afterwards: times on one monotonic clock, tokens, and how it ended.

Everything the report says is computed from these records, by pure functions; so a test can write records by
hand, and a saved run can be computed again with other definitions.
"""

from dataclasses import dataclass

NOT_SENT = "not sent"
CANCELLED = "cancelled"
TIMEOUT = "timeout"
CONNECTION = "connection"
ERROR_FRAME = "error frame"
TRUNCATED = "truncated"
MALFORMED = "malformed"
EMPTY = "empty"


@dataclass(frozen=True)
class Chunk:
    """Tokens that arrived together. Chunks without tokens are not kept."""

    time_s: float
    num_tokens: int


@dataclass(frozen=True)
class Failure:
    """Why a request does not count: a kind to group by, and the first words of the detail."""

    kind: str
    detail: str


@dataclass(frozen=True)
class RequestRecord:
    """One request. Times are seconds of the run's clock.

    `t_sched` is when it was meant to leave, `t_queue` when it was ready to leave, `t_send` when it left (for one
    that never left: when it was given up), `t_end` when nothing more was awaited. `t_first` and `t_last` are the
    first and last arrival of tokens, None if none came. `token_source` says how tokens per chunk were learned.
    """

    index: int
    t_sched: float
    t_queue: float
    t_send: float
    t_end: float
    t_first: float | None = None
    t_last: float | None = None
    chunks: tuple[Chunk, ...] = ()
    token_source: str = "none"
    num_planned_prompt_tokens: int | None = None
    num_planned_output_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_billed_output_tokens: int | None = None
    finish_reason: str | None = None
    status: int | None = None
    failure: Failure | None = None

    @property
    def is_ok(self) -> bool:
        return self.failure is None

    @property
    def was_sent(self) -> bool:
        return self.failure is None or self.failure.kind != NOT_SENT

    @property
    def num_output_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)
