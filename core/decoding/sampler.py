"""From logits to a law, and from a law to a token.

The order of processing: penalties, bias, masks (allowed tokens, bad words, the grammar, no end before min_tokens),
temperature, then top_k, top_p and min_p, each on what the one before has left. Log-probabilities are of the raw law,
before all of it. Everything here is a function of one row of logits, the request's parameters and its tokens so far; it
looks at no other row.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from core.decoding.noise import Purpose, generator, gumbel_argmax
from core.errors import NothingAllowed
from core.request import Request, TokenLogprobs
from core.sampling_params import SamplingParams

LOGPROB_FLOOR = -9999.0  # JSON has no infinity
_FEW = 1024  # tokens tried first when a nucleus is cut out
_REACH = 12.0  # of logits below the largest, where the most likely are looked for first

Floats = NDArray[np.floating]


def process_logits(logits_V: Floats, request: Request, extra: Sequence[int] = ()) -> Floats:
    """Log of the law (up to a constant) from which the next token is drawn; -inf where it cannot be.

    Args:
        logits_V: (V,) float32 raw logits after the request's tokens and `extra`.
        request: gives parameters, prompt and output so far.
        extra: tokens behind those, of a draft under test.

    Returns:
        (V,) float; the input itself if there is nothing to do. With temperature 0 it is not scaled or filtered.

    Raises:
        NothingAllowed: no token may come next, as when all are stop tokens and min_tokens is not reached.
    """
    params = request.params
    logits_V = _penalise(logits_V, request, extra)
    if params.logit_bias:
        logits_V = logits_V.copy()
        logits_V[list(params.logit_bias)] += np.fromiter(params.logit_bias.values(), np.float32)
    logits_V = _mask(logits_V, request, extra)
    if not np.isfinite(logits_V.max()):
        raise NothingAllowed("bias, penalties, masks and min_tokens leave no token that may come next")
    if params.is_greedy:
        return logits_V
    with np.errstate(over="ignore"):
        # Largest first, so that a tiny temperature overflows to -inf and never to inf - inf.
        scaled_V = np.asarray((logits_V.astype(np.float64) - logits_V.max()) / params.temperature, np.float64)
    return _keep_most_likely(scaled_V, params)


def _mask(logits_V: Floats, request: Request, extra: Sequence[int]) -> Floats:
    """-inf at what must not come: by the grammar, by name, and at ends that would be too early."""
    num_output_tokens = request.num_output_tokens + len(extra)
    if request.constraint is None:
        return _put_off_ends(_forbid(logits_V, request, extra), request, num_output_tokens)
    output = [*request.output_token_ids, *extra]
    held_V = _hold(logits_V, request.constraint.allowed(output))
    if not request.constraint.is_complete(output):
        others_V = _put_off_ends(_forbid(held_V, request, extra), request, num_output_tokens)
        # A stop id may be all that the grammar has to say.
        return others_V if others_V.max() > -np.inf else _forbid(held_V, request, extra)
    # The request has ended with its output, so this is never drawn; or it may say nothing at all.
    return held_V if held_V.max() > -np.inf or not output else logits_V


def _hold(logits_V: Floats, allowed: bytes) -> Floats:
    """-inf where the grammar says no, and for ids beyond the tokenizer's, with which a model's vocabulary is padded."""
    bits = np.frombuffer(allowed, np.uint8)
    is_allowed_V = np.unpackbits(bits, count=len(logits_V), bitorder="little").view(np.bool_)
    return np.where(is_allowed_V, logits_V, -np.inf)


def _put_off_ends(logits_V: Floats, request: Request, num_output_tokens: int) -> Floats:
    """-inf at ends while there are to be more tokens, and at those that would end a grammar but not the request."""
    params = request.params
    if num_output_tokens < params.min_tokens:
        put_off = [*request.eos_token_ids, *params.stop_token_ids]
    elif params.ignore_eos and request.constraint is not None:
        put_off = [*request.eos_token_ids]
    else:
        return logits_V
    others_V = logits_V.copy()
    others_V[put_off] = -np.inf
    return others_V


def _forbid(logits_V: Floats, request: Request, extra: Sequence[int]) -> Floats:
    """-inf at what is not among the allowed tokens, and at what would complete a bad word."""
    allowed, bad_words = request.params.allowed_token_ids, request.params.bad_words
    if allowed is None and not bad_words:
        return logits_V
    forbidden = _ends_of_words(bad_words, [*request.output_token_ids, *extra])
    if allowed is not None:
        forbidden = [*np.delete(np.arange(len(logits_V)), allowed), *forbidden]
    others_V = logits_V.copy()
    others_V[forbidden] = -np.inf
    return others_V


def _ends_of_words(words: Sequence[Sequence[int]], output: Sequence[int]) -> list[int]:
    """Tokens that would complete one of the words behind this output."""
    return [end for *begin, end in words if list(output[len(output) - len(begin) :]) == begin]


def _penalise(logits_V: Floats, request: Request, extra: Sequence[int]) -> Floats:
    params = request.params
    if params.repetition_penalty == 1 and params.presence_penalty == 0 and params.frequency_penalty == 0:
        return logits_V
    logits_V = logits_V.astype(np.float64)  # a tiny penalty would overflow float32
    size = len(logits_V)
    tokens = [t for t in (*request.token_ids, *extra) if t < size]
    output = [t for t in (*request.output_token_ids, *extra) if t < size]
    seen = np.unique(tokens)  # repetition counts the prompt too, the other two only the output
    row = logits_V[seen]
    logits_V[seen] = np.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
    if output:
        ids, counts = np.unique(output, return_counts=True)
        logits_V[ids] -= params.frequency_penalty * counts + params.presence_penalty
    return logits_V


def _keep_most_likely(logits_V: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    """Apply top_k, then top_p, then min_p, to scaled logits with maximum 0. Ties at a border: lower token ids stay."""
    top_k = params.top_k if 0 < params.top_k < len(logits_V) else 0
    if not top_k and params.top_p == 1 and params.min_p == 0:
        return logits_V
    if not top_k and params.top_p == 1:
        return np.where(np.exp(logits_V) >= params.min_p, logits_V, -np.inf)
    kept = _top_k_and_p(logits_V, top_k, params.top_p)
    kept = kept[np.exp(logits_V[kept]) >= params.min_p]  # relative to the most likely, so the order does not matter
    filtered_V = np.full_like(logits_V, -np.inf)
    filtered_V[kept] = logits_V[kept]
    return filtered_V


def _top_k_and_p(logits_V: NDArray[np.float64], top_k: int, top_p: float) -> NDArray[np.int64]:
    """Ids that top_k (0: off) and then top_p leave, most likely first."""
    if top_p == 1:
        return _most_likely(logits_V, top_k)
    # Sorting a large vocabulary takes ten times as long as all the rest, and top_p rarely needs more than a few.
    for num in (top_k,) if top_k else (_FEW, len(logits_V)):
        kept = _most_likely(logits_V, num)
        weights = np.exp(logits_V[kept])
        sums = np.cumsum(weights)
        wanted = top_p * (sums[-1] if top_k else np.exp(logits_V).sum())
        if sums[-1] >= wanted:
            break
    # The smallest set with at least top_p: a token stays if those before it have less.
    return np.asarray(kept[sums - weights < wanted])


def _most_likely(logits_V: Floats, num: int) -> NDArray[np.int64]:
    """Ids of the `num` largest, largest first, of equals the lower id first; all if there are not so many."""
    if num == 0:
        return np.empty(0, np.int64)
    if num >= len(logits_V):
        candidates = np.arange(len(logits_V))
    else:  # Laws are peaked: those not far below the top are few, and finding them is cheaper than a partition.
        candidates = np.flatnonzero(logits_V >= logits_V.max() - _REACH)
    if not num <= len(candidates) <= 2 * _FEW and num < len(logits_V):
        candidates = np.flatnonzero(logits_V >= np.partition(logits_V, -num)[-num])  # with ties, more than num
    return np.asarray(candidates[np.argsort(-logits_V[candidates], kind="stable")][:num])


def softmax(logits_V: Floats) -> NDArray[np.float64]:
    """Softmax over the last axis in float64."""
    weights = np.exp(logits_V.astype(np.float64) - logits_V.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def law(logits_V: Floats, request: Request, extra: Sequence[int] = ()) -> NDArray[np.float64]:
    """(V,) float64 probabilities of the next token; a point mass with temperature 0."""
    processed_V = process_logits(logits_V, request, extra)
    if not request.params.is_greedy:
        return softmax(processed_V)
    probs_V = np.zeros(len(processed_V))
    probs_V[int(processed_V.argmax())] = 1.0
    return probs_V


def sample_keyed(logits_V: Floats, request: Request, extra: Sequence[int] = ()) -> int:
    """The token at the next position, by the noise of that position: argmax of log law + Gumbel noise.

    Greedy requests take the most likely token. Draft and target that agree on the law agree on the token.
    """
    processed_V = process_logits(logits_V, request, extra)
    if request.params.is_greedy:
        return int(processed_V.argmax())
    position = request.num_tokens + len(extra)
    uniform_V = generator(request.seed, request.choice, position, Purpose.SAMPLE).random(len(processed_V))
    return gumbel_argmax(processed_V, uniform_V)


def sample_draft(probs_V: NDArray[np.float64], request: Request, index: int) -> int:
    """A draft token drawn from `probs_V` with noise of its own, keyed by where the verification starts."""
    uniform_V = generator(request.seed, request.choice, request.num_tokens, Purpose.DRAFT, index).random(len(probs_V))
    with np.errstate(divide="ignore"):
        return gumbel_argmax(np.log(probs_V), uniform_V)


def token_logprobs(logits_V: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of the chosen token and of the `num_top` most likely, under the raw law."""
    logits_V = logits_V.astype(np.float64)
    top_logit = logits_V.max()
    log_total = top_logit + np.log(np.exp(logits_V - top_logit).sum())
    top_ids: list[int] = _most_likely(logits_V, num_top).tolist()
    finite = np.maximum(logits_V[[token_id, *top_ids]] - log_total, LOGPROB_FLOOR).tolist()
    rank = 1 + int((logits_V > logits_V[token_id]).sum())
    return TokenLogprobs(finite[0], tuple(zip(top_ids, finite[1:], strict=True)), rank)
