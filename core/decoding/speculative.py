"""Acceptance rules for drafts: each keeps the target's law exactly, whatever the draft.

`verify_drafts` is the token rule over a batch of requests, `speculative_accept` the same for one; `verify_blocks`
judges whole drafts and accepts more. Requests that are greedy or carry a seed do not come here: their draft counts if
it equals the token that the target would have drawn with the same noise (see `core.model_runner`).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.floating]
Ints = NDArray[np.integer]


# A rule over a batch: drafts, target laws, draft laws, uniform draws -> numbers accepted, bonus tokens.
Verify = Callable[[Ints, NDArray[np.float64], NDArray[np.float64], Floats], tuple[Ints, Ints]]


class RandomSource(Protocol):
    """Anything with .random(), uniform on [0, 1)."""

    def random(self) -> float: ...


def speculative_accept(
    draft_tokens: Sequence[int] | Ints, target_probs: ArrayLike, draft_probs: ArrayLike, rng: RandomSource
) -> tuple[int, int]:
    """Accept a prefix of the draft so that output is distributed as the target alone.

    Draft token i is kept with probability min(1, target / draft); at the first refusal the bonus token is drawn from
    the normalised positive part of (target - draft), and if all are kept, from the target's next distribution.

    Args:
        draft_tokens: (K,) int64.
        target_probs: (K+1, V) float; row i is the target's distribution after i draft tokens.
        draft_probs: (K, V) float; rows the draft tokens were drawn from.
        rng: anything with .random(); K + 1 draws are always taken, K for acceptance and one for the bonus.

    Returns:
        (num_accepted, bonus_token), 0 <= num_accepted <= K.

    Raises:
        ValueError: the shapes disagree, or a draft token lies outside the vocabulary.

    Source: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1 (their p is our target).
    """
    draft_K = np.asarray(draft_tokens, dtype=np.int64).reshape(-1)
    target_KV = np.asarray(target_probs, dtype=np.float64)
    if target_KV.ndim != 2 or len(target_KV) != len(draft_K) + 1:
        raise ValueError(f"target_probs has shape {target_KV.shape}, needed is ({len(draft_K) + 1}, V)")
    draft_KV = np.asarray(draft_probs, dtype=np.float64)
    if len(draft_K) == 0:
        draft_KV = draft_KV.reshape(0, target_KV.shape[1])
    if draft_KV.shape != (len(draft_K), target_KV.shape[1]):
        raise ValueError(f"draft_probs has shape {draft_KV.shape}, needed is {(len(draft_K), target_KV.shape[1])}")
    if len(draft_K) and not (draft_K.min() >= 0 and draft_K.max() < target_KV.shape[1]):
        raise ValueError(f"draft_tokens {draft_K.tolist()} pass the vocabulary of {target_KV.shape[1]}")
    uniforms = np.array([rng.random() for _ in range(len(draft_K) + 1)])
    num_accepted_R, bonus_R = verify_drafts(draft_K[None], target_KV[None], draft_KV[None], uniforms[None])
    return int(num_accepted_R[0]), int(bonus_R[0])


def verify_drafts(
    draft_RK: Ints, target_RKV: NDArray[np.float64], draft_probs_RKV: NDArray[np.float64], uniforms_RK: Floats
) -> tuple[Ints, Ints]:
    """The token rule for R requests with K drafts each.

    Args:
        draft_RK: (R, K) draft tokens.
        target_RKV: (R, K+1, V) target laws.
        draft_probs_RKV: (R, K, V) laws the drafts were drawn from.
        uniforms_RK: (R, K+1) uniform draws; the last column draws the bonus token.

    Returns:
        num_accepted (R,) and bonus tokens (R,), int64.
    """
    rows, at_token = _at_drafts(draft_RK)
    # u < target / draft without the division, so that a draft law of 0 cannot disturb.
    is_kept_RK = uniforms_RK[:, :-1] * draft_probs_RKV[at_token] < target_RKV[at_token]
    num_accepted_R = np.cumprod(is_kept_RK, axis=1, dtype=np.int64).sum(axis=1)
    weight_R = np.ones(len(rows))
    return num_accepted_R, _draw_bonus(num_accepted_R, weight_R, target_RKV, draft_probs_RKV, uniforms_RK[:, -1])


def verify_blocks(
    draft_RK: Ints, target_RKV: NDArray[np.float64], draft_probs_RKV: NDArray[np.float64], uniforms_RK: Floats
) -> tuple[Ints, Ints]:
    """Block verification: judges the draft as a whole, accepts at least as much as the token rule, keeps the law.

    With p_i = min(p_{i-1} target/draft, 1) along the draft and Z_i the mass of (p_i target - draft)+ behind i tokens,
    i tokens are accepted for the largest i with u_i < h_i = Z_i / (Z_i + 1 - p_i), h_K = p_K; the bonus token then
    comes from (p_i target - draft)+ behind them. A later step must not use these draws again: what is accepted at i
    depends on what was drawn beyond it.

    Args and returns: as `verify_drafts`.

    Source: Sun et al. 2025 (ICLR), Block Verification, arXiv:2403.10444, algorithm 2.
    """
    num_drafts = draft_RK.shape[1]
    rows, at_token = _at_drafts(draft_RK)
    ratio_RK = target_RKV[at_token] / draft_probs_RKV[at_token]  # a draft token was drawn, so its law is not 0
    weight_RK = np.ones((len(rows), num_drafts + 1))
    for i in range(num_drafts):
        weight_RK[:, i + 1] = np.minimum(weight_RK[:, i] * ratio_RK[:, i], 1.0)
    excess_RKV = np.maximum(weight_RK[:, 1:-1, None] * target_RKV[:, 1:-1] - draft_probs_RKV[:, 1:], 0.0)
    mass_RK = excess_RKV.sum(axis=2)
    whole_RK = mass_RK + 1 - weight_RK[:, 1:-1]
    # 0 / 0 where target and draft agree: then the next token is kept for certain, so this place need not be.
    threshold_RK = np.divide(mass_RK, whole_RK, out=np.zeros_like(mass_RK), where=whole_RK > 0)
    threshold_RK = np.concatenate([threshold_RK, weight_RK[:, -1:]], axis=1) if num_drafts else threshold_RK
    is_kept_RK = uniforms_RK[:, :num_drafts] < threshold_RK
    num_accepted_R = np.where(is_kept_RK, np.arange(1, num_drafts + 1), 0).max(axis=1, initial=0)
    weight_R = np.where(num_accepted_R == num_drafts, 1.0, weight_RK[rows, num_accepted_R])
    return num_accepted_R, _draw_bonus(num_accepted_R, weight_R, target_RKV, draft_probs_RKV, uniforms_RK[:, -1])


def acceptance_bounds(
    draft_RK: Ints, target_RKV: NDArray[np.float64], draft_probs_RKV: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(R,) sum over i of min(1, product of target/draft up to i) along each draft.

    Averaged over drafts it is the number of accepted tokens that no rule on one draft can pass: a prefix is drawn with
    one chance and wanted with another, and the smaller of the two is all that may be kept. Args: as `verify_drafts`.
    """
    _, at_token = _at_drafts(draft_RK)
    ratio_RK = target_RKV[at_token] / draft_probs_RKV[at_token]
    return np.asarray(np.minimum(np.cumprod(ratio_RK, axis=1), 1.0).sum(axis=1))


VERIFICATION_RULES: dict[str, Verify] = {"block": verify_blocks, "token": verify_drafts}


def _at_drafts(draft_RK: Ints) -> tuple[Ints, tuple[Ints, Ints, Ints]]:
    """(R,) row numbers, and the index that picks each draft token's entry from (R, K.., V)."""
    rows = np.arange(len(draft_RK))
    return rows, (rows[:, None], np.arange(draft_RK.shape[1])[None], draft_RK)


def _draw_bonus(
    num_accepted_R: Ints,
    weight_R: NDArray[np.float64],
    target_RKV: NDArray[np.float64],
    draft_probs_RKV: NDArray[np.float64],
    uniforms_R: Floats,
) -> Ints:
    """A token from the positive part of (weight * target - draft) behind the accepted drafts."""
    rows = np.arange(len(num_accepted_R))
    # Behind the last draft stands a draft law of zeros: there the residual is the target's law itself.
    padded_RKV = np.concatenate([draft_probs_RKV, np.zeros_like(target_RKV[:, :1])], axis=1)
    target_RV = target_RKV[rows, num_accepted_R]
    residual_RV = np.maximum(weight_R[:, None] * target_RV - padded_RKV[rows, num_accepted_R], 0.0)
    is_empty_R = residual_RV.sum(axis=1) <= 0.0  # the laws are equal but for rounding
    residual_RV[is_empty_R] = target_RV[is_empty_R]
    return draw(residual_RV, uniforms_R)


def draw(weights_RV: NDArray[np.float64], uniforms_R: Floats) -> Ints:
    """(R,) int64 tokens drawn in proportion to weights by inverting the cumulative sum; weight 0 is never drawn."""
    cumulative_RV = np.cumsum(weights_RV, axis=1)
    threshold_R = uniforms_R * cumulative_RV[:, -1]
    drawn_R = (cumulative_RV <= threshold_R[:, None]).sum(axis=1)
    last_possible_R = weights_RV.shape[1] - 1 - (weights_RV[:, ::-1] > 0).argmax(axis=1)
    return np.asarray(np.minimum(drawn_R, last_possible_R))
