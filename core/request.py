"""One sequence being generated: what was asked, what has come so far, what leaves with each step.

A request has tokens, and some of them have KV (`num_computed_tokens`); everything the scheduler does is catching up.
Tokens and progress change only in the scheduler's `update()`; `schedule()` admits, preempts and says what was hit. Text
is not the engine's affair but for stop strings: for those the request carries a decoder, so that nothing here knows a
tokenizer.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from core.block_hash import BlockHashes
from core.errors import InvalidRequest
from core.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request is in its life; compare by identity."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended. The values are vLLM's `finished_reason` labels."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Decoder(Protocol):
    """Turns token ids into text piece by piece; joined pieces equal the text of all tokens."""

    def decode(self, token_id: int) -> str:
        """Text that this token completes; '' while a character is still open."""

    def flush(self) -> str:
        """What is left at the end: one U+FFFD if a character stayed open, else ''."""

    @property
    def is_open(self) -> bool:
        """True while bytes of an unfinished character are held."""


class Constraint(Protocol):
    """A grammar's say on one request: a function of the output's token ids (`core.decoding.constraints`)."""

    def allowed(self, token_ids: Sequence[int]) -> bytes:
        """Which tokens may come behind this output: token i is bit i % 8 of byte i // 8."""

    def is_complete(self, token_ids: Sequence[int]) -> bool:
        """Whether nothing but an end may come behind this output."""

    def num_allowed(self, token_ids: Sequence[int], draft: Sequence[int]) -> int:
        """How many of the draft's tokens the grammar allows behind this output."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the raw law (before penalties, temperature and masks).

    `logprob` is the chosen token's, and `rank` its place among all, 1 for the most likely; `top` lists (token id,
    logprob), most likely first. All finite (floor -9999). `own_bytes`: what ids stand for that the vocabulary does not
    have, those of a script.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1
    own_bytes: Mapping[int, bytes] = field(default_factory=dict)


# Made once a token, and so not frozen, though nobody writes to them: a frozen one takes five times as long to make.
@dataclass(slots=True)
class OutputToken:
    """One token as it leaves the engine: its id, the text it completed, its log-probabilities if asked for."""

    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """What became of a request's drafts in one step.

    `num_accepted` is what the rule accepted. A stop may have cut some of that off: `num_emitted` tokens came of the
    step, the bonus token among them. `is_predicted`: the drafts came from the request's prediction.
    """

    num_drafted: int
    num_accepted: int
    num_emitted: int
    is_predicted: bool = False

    @property
    def num_gained(self) -> int:
        """Tokens beyond the one that a step gives without drafts; what counters call accepted."""
        return self.num_emitted - 1

    @property
    def num_drafts_emitted(self) -> int:
        """Drafts that are in the output."""
        return min(self.num_accepted, self.num_emitted)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Moments of a request on the engine's clock: first computed for, first and latest token (None: none so far)."""

    scheduled_s: float
    first_token_s: float | None
    last_token_s: float | None


@dataclass(slots=True)  # as OutputToken
class RequestOutput:
    """What one step adds to one request: a delta. `finish_reason` is set on the last one only.

    `text` is what may be shown now; it lags behind `num_generated_tokens` while a stop string or a character may
    still complete. `tokens` are exactly those whose text this delta brings to an end. `is_refused`: the error is the
    caller's. `drafts`: what became of this step's drafts, None if there were none. `prompt_logprobs` come with the
    first delta if they were asked for: those of the second prompt token and of all behind it. `embedding` comes with
    the last, `times` with the first and the last.
    """

    request_id: str
    text: str
    tokens: tuple[OutputToken, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    is_refused: bool = False
    drafts: DraftOutcome | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    embedding: tuple[float, ...] | None = None
    times: RequestTimes | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class ScriptedToken:
    """A script's piece with its log-probability, and those of the tokens that might have been said, likeliest first."""

    data: str | bytes
    logprob: float = 0.0
    top: tuple[tuple[str | bytes, float], ...] = ()


# What a script may hold: pieces (text or bytes), each emitted as one token; a nested tuple is emitted in one step.
ScriptPiece = str | bytes | ScriptedToken
ScriptEntry = ScriptPiece | tuple[ScriptPiece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """What crosses from the service to the engine for each sequence: plain, picklable, already checked.

    Args:
        choice: its number among the samples of its own prompt.
        arrival_s: when the service received it (time.monotonic).
        sibling_ids: ids of further samples of the same prompt, which is computed once; their choices count on.
        cache_salt: named parts (an API key, a salt of the caller's) that must all be equal for blocks to be shared.
        script: what to say instead of the model (`core.scripted`), or None.
        prediction_token_ids: what the caller expects to be said, to take drafts from.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    choice: int = 0
    arrival_s: float = 0.0
    sibling_ids: tuple[str, ...] = ()
    cache_salt: Mapping[str, str] = field(default_factory=dict)
    script: tuple[ScriptEntry, ...] | None = None
    prediction_token_ids: tuple[int, ...] = ()


class Script(Protocol):
    """What a scripted request says instead of the model: see `core.scripted`."""

    def group_at(self, num_output_tokens: int) -> Sequence[int]:
        """Token ids to emit in the step that starts after so many output tokens; at least one."""

    def logprobs_at(self, num_output_tokens: int, num_top: int) -> TokenLogprobs:
        """Log-probabilities of the token that comes after so many others."""


class Request:
    """One sequence. The scheduler owns its progress; everyone else reads.

    Args:
        request_id: unique in the engine.
        prompt_token_ids: at least one id.
        params: how to sample and stop. `max_tokens` must be set by now.
        choice: which of the samples of one prompt this is; part of the noise key.
        seed: the seed of its noise; `params.seed`, or one the engine drew.
        eos_token_ids: ids that end it unless `ignore_eos`.
        decoder: text of its tokens, for stop strings; None where nobody asks for text.
        script: tokens to say instead of the model's.
        constraint: what the output must be; None for anything.
        cache_salt: goes into the hashes of its blocks; only requests with the same share them.
        siblings: further samples of the same prompt, born when it is computed.
        arrival_s: when the service received it, on the engine's clock.
        prediction: token ids that the caller expects it to say.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        choice: int = 0,
        seed: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        decoder: Decoder | None = None,
        script: Script | None = None,
        constraint: Constraint | None = None,
        cache_salt: bytes = b"",
        siblings: Sequence["Request"] = (),
        arrival_s: float = 0.0,
        prediction: Sequence[int] = (),
    ) -> None:
        if not prompt_token_ids:
            raise InvalidRequest("prompt has 0 tokens, at least 1 is needed", "prompt")
        if params.max_tokens is None:
            raise InvalidRequest("max_tokens is not set", "max_tokens")
        self.request_id = request_id
        self.params = params
        self.choice = choice
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        self.decoder = decoder
        self.script = script
        self.constraint = constraint
        self.cache_salt = cache_salt
        self.siblings = list(siblings)
        self.num_samples = 1 + len(siblings)  # of its prompt
        for sibling in siblings:
            sibling.num_samples = self.num_samples
        self.arrival_s = arrival_s
        self.prediction = tuple(prediction)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_tokens: int = params.max_tokens
        self.token_ids: list[int] = list(prompt_token_ids)
        self.status = RequestStatus.WAITING
        self.age = (0, choice)  # order of arrival and choice, given by the scheduler
        self.num_speculative_tokens = 0  # most drafts a step, given by the engine
        self.num_predicted_tokens = 0  # most drafts a step from its prediction, given by the engine
        self.num_computed_tokens = 0
        self.num_lost_tokens = 0  # the most that had KV when it was preempted
        self.num_draft_computed_tokens = 0
        self.num_published_blocks = 0  # leading blocks that others can find
        self.num_draft_filled_blocks = 0  # of those, known to have the draft model's KV too
        self.is_unshareable = False  # it builds on KV from before a reset of the prefix cache
        self.num_cached_tokens = 0
        self.num_host_cached_tokens = 0  # of those, tokens found in the second tier
        self.prompt_logprobs: list[TokenLogprobs] = []  # of its second token and on, as far as they were asked for
        self.hidden_sum: tuple[float, ...] = ()  # of its first `num_summed_rows` tokens, if it embeds
        self.num_summed_rows = 0
        self._hashes: BlockHashes | None = None
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.is_refused = False  # the error is the caller's

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that still lack KV; 1 for a request that is merely decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def needs_every_row(self) -> bool:
        """Its prompt is computed whole whatever a cache holds: the row of each of its tokens is wanted."""
        return self.params.embed or self.params.num_prompt_logprobs is not None

    @property
    def num_unneeded_rows(self) -> int:
        """Leading tokens of which nothing but their KV is needed, so that it may come from a cache.

        The last token's row says the next token; the prompt's say its log-probabilities and its embedding, if those
        are wanted.
        """
        if self.params.embed and self.num_summed_rows < self.num_prompt_tokens:
            return self.num_summed_rows
        num_recorded = len(self.prompt_logprobs)
        if self.params.num_prompt_logprobs is not None and num_recorded < self.num_prompt_tokens - 1:
            return num_recorded
        return self.num_tokens - 1

    @property
    def embedding(self) -> tuple[float, ...] | None:
        """The mean of its prompt's hidden states; None before they are all there, and where nobody asked."""
        if not self.params.embed or self.num_summed_rows < self.num_prompt_tokens:
            return None
        return tuple(value / self.num_prompt_tokens for value in self.hidden_sum)

    @property
    def num_drafts_wanted(self) -> int:
        """Most draft tokens its next step could use: never past max_tokens, whose last token needs no draft."""
        wanted = max(self.num_speculative_tokens, self.num_predicted_tokens)
        if self.script is not None:
            wanted = len(self.script.group_at(self.num_output_tokens)) - 1
        if wanted == 0:
            return 0
        return max(0, min(wanted, self.max_tokens - self.num_output_tokens - 1))

    def block_hashes(self, block_size: int, num_blocks: int) -> list[bytes]:
        """Content hashes of its first `num_blocks` blocks, which its tokens must fill."""
        if self._hashes is None:
            self._hashes = BlockHashes(block_size, self.cache_salt)
        return self._hashes.up_to(self.token_ids, num_blocks)

    def restart(self) -> None:
        """Its blocks are gone: it has tokens, and KV of none."""
        self.num_lost_tokens = max(self.num_lost_tokens, self.num_computed_tokens)
        self.num_computed_tokens = self.num_draft_computed_tokens = 0
        self.num_published_blocks = self.num_draft_filled_blocks = 0
        self.is_unshareable = False

    def take_progress(self, other: "Request") -> None:
        """It shares the blocks of `other` from now on, and has come as far."""
        self.num_computed_tokens = other.num_computed_tokens
        self.num_lost_tokens = other.num_lost_tokens
        self.num_draft_computed_tokens = other.num_draft_computed_tokens
        self.num_published_blocks = other.num_published_blocks
        self.num_draft_filled_blocks = other.num_draft_filled_blocks
        self.is_unshareable = other.is_unshareable
        self.num_cached_tokens = other.num_cached_tokens
        self.num_host_cached_tokens = other.num_host_cached_tokens
        self.prompt_logprobs = list(other.prompt_logprobs)

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End it; the first reason given stands."""
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = reason, stop_reason
            self.status = RequestStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, {self.num_prompt_tokens} prompt"
            f" + {self.num_output_tokens} output tokens, {self.num_computed_tokens} computed)"
        )
