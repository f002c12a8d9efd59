"""Exact laws of a speculative step, found by trying every draw instead of sampling.

An acceptance rule is a function of K + 1 uniform numbers, constant between thresholds. If all thresholds are
multiples of 1/n, the n midpoints (i + 1/2)/n meet every piece exactly as often as its length says, so a
finite sum is the exact law, whichever way round an implementation lays out its cumulative distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

Probs = NDArray[np.float64]
Accept = Callable[..., tuple[int, int]]


class ScriptedRng:
    """Gives the numbers it was told, in order, and counts how many were asked for."""

    def __init__(self, draws: Iterable[float]) -> None:
        self._draws = iter(draws)
        self.num_draws = 0

    def random(self) -> float:
        self.num_draws += 1
        return next(self._draws)


def midpoints(num_pieces: int) -> list[float]:
    """The centres of `num_pieces` equal pieces of [0, 1)."""
    return [(piece + 0.5) / num_pieces for piece in range(num_pieces)]


def rolled(law: Sequence[float]) -> Probs:
    """(V, V): row x is the law of the token after x. Rows differ, so that a mixed-up row shows."""
    return np.array([np.roll(law, context) for context in range(len(law))])


def sequence_law(chain_VV: Probs, context: int, length: int) -> Probs:
    """The chance of every sequence of `length` tokens after `context`: an array of shape (V,) * length."""
    if length == 0:
        return np.ones(())
    return np.stack(
        [chance * sequence_law(chain_VV, token, length - 1) for token, chance in enumerate(chain_VV[context])]
    )


def every_outcome(
    accept: Accept, target_VV: Probs, draft_VV: Probs, num_drafts: int, pieces: tuple[int, int]
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield (chance, emitted tokens) over all drafts after token 0 and all draws.

    `pieces` is how finely acceptance draws and the bonus draw are cut: common denominators of the
    fixture's acceptance ratios, and of its target and residual laws.
    """
    grid = [midpoints(pieces[0])] * num_drafts + [midpoints(pieces[1])]
    num_cells = pieces[0] ** num_drafts * pieces[1]
    for drafts in product(range(len(target_VV)), repeat=num_drafts):
        contexts = [0, *drafts]
        target_probs, draft_probs = target_VV[contexts], draft_VV[contexts[:-1]]
        chance = float(np.prod(draft_probs[range(num_drafts), drafts]))
        for draws in product(*grid):
            num_accepted, bonus = accept(
                np.array(drafts, dtype=np.int64), target_probs, draft_probs, ScriptedRng(draws)
            )
            yield chance / num_cells, (*drafts[:num_accepted], int(bonus))


def joint_law(accept: Accept, target_VV: Probs, draft_VV: Probs, num_drafts: int, pieces: tuple[int, int]) -> Probs:
    """The law of the next num_drafts + 1 tokens, where the target writes what a step leaves open."""
    law = np.zeros((len(target_VV),) * (num_drafts + 1))
    for chance, tokens in every_outcome(accept, target_VV, draft_VV, num_drafts, pieces):
        law[tokens] += chance * sequence_law(target_VV, tokens[-1], num_drafts + 1 - len(tokens))
    return law


def total_variation(one: Probs, other: Probs) -> float:
    """Half the sum of absolute differences: 0 for equal laws, 1 for disjoint ones."""
    return float(np.abs(one - other).sum() / 2)


def token_from(accept: Accept, law: Probs, draw: float) -> int:
    """The token that `draw` picks from `law`: a step without drafts."""
    return accept(np.zeros(0, dtype=np.int64), law[None], np.zeros((0, len(law))), ScriptedRng([draw]))[1]
