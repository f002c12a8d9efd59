"""When a request ends, and what text may be shown before that.

Tokens come one at a time, also when a step brings several, so an end inside an accepted run cuts the rest off. The
order of tests for one token: end of sequence and stop ids, stop strings, end of the grammar, length. Text that could
still become a stop string, or a whole character, is held back; it leaves with whole tokens, so that log-probabilities
stay aligned with it.
"""

from dataclasses import dataclass

from core.request import DraftOutcome, FinishReason, OutputToken, Request, RequestOutput, TokenLogprobs


@dataclass(slots=True)
class _HeldToken:
    token: OutputToken
    text_end: int  # where its text ends, counted in the held text
    is_closed: bool  # no character is left open behind it


def find_stop(text: str, stops: tuple[str, ...], num_seen: int) -> tuple[int, str] | None:
    """The match that is complete first, (index, stop string), but behind the first `num_seen` characters.

    Of two that end at the same place the longer wins, or its beginning would be shown. So it matters neither in which
    order they are named nor how tokens cut the text. vLLM's rule since its #49391, but for that tie.
    """
    matches = [
        (index + len(stop), index, stop)
        for stop in stops
        if (index := text.find(stop, max(0, num_seen - len(stop) + 1))) >= 0
    ]
    if not matches:
        return None
    _, index, stop = min(matches)
    return index, stop


def partial_stop_length(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest tail of `text` that is the beginning of a stop string, and not a whole one."""
    longest = max((len(stop) for stop in stops), default=0)
    for length in range(min(len(text), longest - 1), 0, -1):
        if any(len(stop) > length and stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


class StopTracker:
    """Follows one request's tokens: ends it when it is time, and gathers what may leave.

    Args:
        request: its params say when to stop; `append` adds to its tokens and may finish it.
        max_model_len: prompt and output together never pass this; None for no limit.
    """

    def __init__(self, request: Request, max_model_len: int | None = None) -> None:
        self._request = request
        params = request.params
        self._end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else request.eos_token_ids)
        most = request.num_prompt_tokens + request.max_tokens
        self._most_tokens = most if max_model_len is None else min(most, max_model_len)
        self._num_unstoppable = request.num_prompt_tokens + params.min_tokens
        self._first_of_stops = frozenset(stop[0] for stop in params.stop)
        self._held_text = ""
        self._held: list[_HeldToken] = []
        self._ready: list[OutputToken] = []
        self._ready_text = ""
        self._has_told_prompt = False

    def append(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Take one token; afterwards `request.is_finished` may be true, and then nothing more may be appended."""
        request = self._request
        request.token_ids.append(token_id)
        num_tokens = len(request.token_ids)
        may_stop = num_tokens > self._num_unstoppable
        if may_stop and token_id in self._end_ids:
            is_shown = request.params.include_stop_str_in_output and token_id in request.params.stop_token_ids
            self._hold(token_id, self._decode(token_id)[0] if is_shown else "", logprobs, is_closed=True)
            is_eos = token_id in request.eos_token_ids and token_id not in request.params.stop_token_ids
            self._finish(FinishReason.STOP, None if is_eos else token_id)
            return
        text, is_closed = self._decode(token_id)
        is_plain = is_closed and not self._held and self._first_of_stops.isdisjoint(text)
        if is_plain and num_tokens < self._most_tokens and request.constraint is None:
            # What nearly every token is: whole text, no stop begins in it, and there is more to come.
            self._ready.append(OutputToken(token_id, text, logprobs))
            self._ready_text += text
            return
        num_seen = len(self._held_text)
        self._hold(token_id, text, logprobs, is_closed=is_closed)
        match = find_stop(self._held_text, request.params.stop, num_seen) if may_stop else None
        if match is not None:
            self._finish_at(*match)
        elif request.constraint is not None and request.constraint.is_complete(request.output_token_ids):
            self._finish(FinishReason.STOP)
        elif num_tokens >= self._most_tokens:
            self._finish(FinishReason.LENGTH)
        else:
            self._let_go()

    def _decode(self, token_id: int) -> tuple[str, bool]:
        """The token's text, and whether it leaves no character open."""
        decoder = self._request.decoder
        if decoder is None:
            return "", True
        return decoder.decode(token_id), not decoder.is_open

    def _hold(self, token_id: int, text: str, logprobs: TokenLogprobs | None, *, is_closed: bool) -> None:
        self._held_text += text
        self._held.append(_HeldToken(OutputToken(token_id, text, logprobs), len(self._held_text), is_closed))

    def _let_go(self) -> None:
        """Release every leading token that neither a stop string nor an open character can still reach."""
        safe = len(self._held_text) - partial_stop_length(self._held_text, self._request.params.stop)
        count = 0
        for i, held in enumerate(self._held):
            if held.text_end > safe:
                break
            if held.is_closed:
                count = i + 1
        self._release(count)

    def _release(self, count: int) -> None:
        if count == 0:
            return
        end = self._held[count - 1].text_end
        self._ready.extend(held.token for held in self._held[:count])
        self._ready_text += self._held_text[:end]
        self._held_text = self._held_text[end:]
        self._held = self._held[count:]
        for held in self._held:
            held.text_end -= end

    def _finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        decoder = self._request.decoder
        rest = "" if decoder is None else decoder.flush()
        if rest:
            last = self._held[-1]
            self._held_text += rest
            last.token = OutputToken(last.token.token_id, last.token.text + rest, last.token.logprobs)
            last.text_end = len(self._held_text)
        self._release(len(self._held))
        self._request.finish(reason, stop_reason)

    def _finish_at(self, index: int, stop: str) -> None:
        if self._request.params.include_stop_str_in_output:
            index += len(stop)
        self._held_text = self._held_text[:index]
        start = 0
        for held in self._held:
            end = min(held.text_end, index)
            held.token = OutputToken(held.token.token_id, self._held_text[start:end], held.token.logprobs)
            held.text_end = start = end
        self._release(len(self._held))
        self._request.finish(FinishReason.STOP, stop)

    def take_output(self, drafts: DraftOutcome | None = None) -> RequestOutput:
        """What may leave now, as a delta, with what became of the step's drafts; it is handed over."""
        request = self._request
        output = RequestOutput(
            request.request_id,
            self._ready_text,
            tuple(self._ready),
            request.num_prompt_tokens,
            request.num_cached_tokens,
            request.num_output_tokens,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
            is_refused=request.is_refused,
            drafts=drafts,
            prompt_logprobs=None if request.params.num_prompt_logprobs is None else self._take_prompt_logprobs(),
            embedding=request.embedding if request.params.embed else None,
        )
        self._ready, self._ready_text = [], ""
        return output

    def _take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The prompt's log-probabilities for the first output, None for the others."""
        if self._has_told_prompt:
            return None
        self._has_told_prompt = True
        return tuple(self._request.prompt_logprobs)
