"""Randomness without state: noise is a function of who asks, where, and what for.

The key is [seed, choice], the counter [0, position, purpose, index]. So batching, chunking, preemption and other
people's traffic cannot change an answer. Philox: Salmon et al. 2011 (SC'11), counter-based random numbers.
"""

import enum
import math

import numpy as np
from numpy.typing import NDArray

NEAR = 6.0  # below the most likely in log law: tokens that are tried first


class Purpose(enum.IntEnum):
    """What a draw decides. Two purposes never share noise."""

    SAMPLE = 0  # the token at a position, also when a draft is proposed by the keyed rule
    DRAFT = 1  # a draft token that speculative_accept will judge
    ACCEPT = 2  # the judgement


def generator(seed: int, choice: int, position: int, purpose: Purpose, index: int = 0) -> np.random.Generator:
    """A fresh generator for one decision. `seed` is any int64, taken modulo 2**64."""
    # As uint64 at once: a list that mixes large and small numbers becomes float64, where 2**64 - 1 turns into 0.
    key = np.array([seed % 2**64, choice], np.uint64)
    # Position in the second counter word: in the first, the streams of neighbouring positions overlap.
    counter = np.array([0, position, purpose, index], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def gumbel(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard Gumbel noise from uniform; larger of larger."""
    # random() can be 0, whose logarithm is infinite; half its spacing is as good.
    return np.asarray(-np.log(-np.log(np.maximum(uniform, 2.0**-54))))


def gumbel_argmax(log_law_V: NDArray[np.floating], uniform_V: NDArray[np.float64]) -> int:
    """argmax(log_law_V + gumbel(uniform_V)), without the logarithms of those that cannot win.

    Tokens within NEAR of the most likely are tried first; one further down wins only with noise above a number that
    the best of those gives, and so only with a uniform number above another.
    """
    top = float(log_law_V.max())
    near = np.flatnonzero(log_law_V >= top - NEAR)
    best = float((log_law_V[near] + gumbel(uniform_V[near])).max())
    least = math.exp(-math.exp(-(best - top + NEAR))) * (1 - 1e-12)  # rounding must not lose one
    candidates = np.union1d(near, np.flatnonzero(uniform_V > least))
    return int(candidates[(log_law_V[candidates] + gumbel(uniform_V[candidates])).argmax()])
