"""A runner that says what a request's script tells it; for tests of clients and of everything behind the model.

A script is a list of pieces, text or bytes, each emitted as exactly one token in order; pieces nested in a tuple come
in one step, as accepted drafts do. Behind the last piece comes the end token. A piece that the vocabulary has as one
token is that token; any other gets an id beyond the vocabulary that only its request knows. Blocks, scheduling, stops
and streams are the real engine's: only the model is not run for these requests, and their log-probabilities are 0.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain

from core.errors import InvalidRequest
from core.request import Request, ScriptedToken, ScriptEntry, ScriptPiece, TokenLogprobs
from core.step import Execute, ModelRunnerOutput, SampledTokens, ScheduledRequest, SchedulerOutput, certain_prompts
from core.tokenizer import Tokenizer


class RequestScript:
    """One request's script as token ids, and the bytes of those that only it knows.

    Raises:
        InvalidRequest: an empty script, group or piece, a piece without UTF-8, or a model without an end token.
    """

    def __init__(self, entries: Sequence[ScriptEntry], tokenizer: Tokenizer) -> None:
        groups = [[_as_token(piece) for piece in _as_group(entry)] for entry in entries]
        tokens = list(chain.from_iterable(groups))
        if not groups or not all(groups) or not all(token.data for token in tokens):
            raise InvalidRequest("script, or a group or piece in it, is empty", "script")
        if not tokenizer.eos_token_ids:
            raise InvalidRequest("script needs an end token behind its last piece, the model has none", "script")
        self._tokenizer = tokenizer
        self._own_bytes: dict[int, bytes] = {}
        self._token_ids = [self._token_id(token.data) for token in tokens]
        self._logprobs = [self._named(token) for token in tokens]
        self._group_ends = list(accumulate(len(group) for group in groups))
        self._end_token_id = min(tokenizer.eos_token_ids)

    def _named(self, token: ScriptedToken) -> TokenLogprobs:
        return TokenLogprobs(token.logprob, tuple((self._token_id(data), logprob) for data, logprob in token.top))

    def _token_id(self, piece: str | bytes) -> int:
        data = _utf8(piece) if isinstance(piece, str) else piece
        if isinstance(piece, str):
            ids = self._tokenizer.encode(piece, add_special_tokens=False)
            if len(ids) == 1 and self._tokenizer.token_bytes(ids[0]) in (data, b""):
                return ids[0]
        token_id = self._tokenizer.vocab_size + len(self._own_bytes)
        self._own_bytes[token_id] = data
        return token_id

    def group_at(self, num_output_tokens: int) -> Sequence[int]:
        """Token ids to emit in the step that starts after so many output tokens; at least one."""
        end = next((end for end in self._group_ends if end > num_output_tokens), None)
        return (self._end_token_id,) if end is None else self._token_ids[num_output_tokens:end]

    def logprobs_at(self, num_output_tokens: int, num_top: int) -> TokenLogprobs:
        """Those of the token that comes after so many others, with at most `num_top` alternatives."""
        if num_output_tokens >= len(self._logprobs):
            return TokenLogprobs(0.0)
        found = self._logprobs[num_output_tokens]
        top = found.top[:num_top]
        ids = (self._token_ids[num_output_tokens], *(token_id for token_id, _ in top))
        own_bytes = {i: self._own_bytes[i] for i in ids if i in self._own_bytes}
        return TokenLogprobs(found.logprob, top, own_bytes=own_bytes)

    @property
    def strips_leading_space(self) -> bool:
        return self._tokenizer.strips_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token, its own ones included."""
        return self._own_bytes.get(token_id) or self._tokenizer.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """A token for display; its own ones are their text."""
        own = self._own_bytes.get(token_id)
        return self._tokenizer.token_text(token_id) if own is None else own.decode("utf-8", "replace")


def _as_group(entry: ScriptEntry) -> tuple[ScriptPiece, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def _as_token(piece: ScriptPiece) -> ScriptedToken:
    return piece if isinstance(piece, ScriptedToken) else ScriptedToken(piece)


def _utf8(piece: str) -> bytes:
    try:
        return piece.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("script holds half of a surrogate pair, which is no character", "script") from error


class ScriptedRunner:
    """Serves scripted requests itself and hands the rest of the plan to `inner`."""

    def __init__(self, inner: Execute) -> None:
        self._inner = inner

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        others = tuple(s for s in plan.scheduled if s.request.script is None)
        sampled = {
            r.request_id: _say(s, r) for s in plan.scheduled for r in s.yielding_requests if r.script is not None
        }
        result = self._inner(replace(plan, scheduled=others))
        prompts = certain_prompts(s for s in plan.scheduled if s.request.script is not None)
        return replace(
            result,
            sampled={**sampled, **result.sampled},
            prompt_logprobs={**prompts, **result.prompt_logprobs},
        )


def _say(scheduled: ScheduledRequest, request: Request) -> SampledTokens:
    assert request.script is not None
    # Without a slot for each piece but the last, the rest of the group comes in the next step.
    token_ids = list(request.script.group_at(request.num_output_tokens)[: scheduled.num_draft_slots + 1])
    num_top, start = request.params.num_logprobs, request.num_output_tokens
    logprobs = (
        [request.script.logprobs_at(start + i, num_top) for i in range(len(token_ids))] if num_top is not None else ()
    )
    return SampledTokens(token_ids, logprobs, num_draft_tokens=len(token_ids) - 1)
