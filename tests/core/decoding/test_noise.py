"""Noise: a function of its key, uniform, and never shared between two decisions."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.decoding.noise import Purpose, generator, gumbel, gumbel_argmax
from core.sampling_params import INT64_MAX, INT64_MIN
from tests import oracle

SEEDS = [0, 1, 2, -1, -2, INT64_MAX, INT64_MAX - 1, INT64_MIN, INT64_MIN + 1, 2**53, 2**53 + 1]
Key = tuple[int, int, int, Purpose, int]


def draws(key: Key, num: int = 300) -> list[float]:
    return [float(x) for x in generator(*key).random(num)]


@given(
    keys=st.lists(
        st.tuples(
            st.integers(INT64_MIN, INT64_MAX),
            st.integers(0, 127),
            st.integers(0, 2**20),
            st.sampled_from(Purpose),
            st.integers(0, 16),
        ),
        min_size=2,
        max_size=6,
        unique=True,
    )
)
def test_same_key_gives_the_same_noise_in_any_order_and_another_key_other_noise(keys: list[Key]) -> None:
    forwards = {key: draws(key) for key in keys}
    backwards = {key: draws(key) for key in reversed(keys)}
    assert forwards == backwards
    for one, other in combinations(keys, 2):
        assert not set(forwards[one]) & set(forwards[other])


def test_neighbours_do_not_overlap() -> None:
    """The streams of one more position, choice, index, purpose or seed share no number, shifted or not."""
    keys = product((0, 1, -1), (0, 1), (0, 1, 2, 3), Purpose, (0, 1))
    streams = [draws(key, 2000) for key in keys]
    assert sum(map(len, streams)) == len({x for stream in streams for x in stream})


def test_streams_overlap_with_the_position_in_the_first_word() -> None:
    """The control: what the comment in `generator` warns of is seen by the test above."""

    def naive(position: int) -> set[float]:
        return set(np.random.Generator(np.random.Philox(key=[0, 0], counter=[position, 0, 0, 0])).random(2000))

    assert naive(0) & naive(1)


def test_all_seeds_of_64_bits_are_told_apart() -> None:
    firsts = [draws((seed, 0, 5, Purpose.SAMPLE, 0), 1)[0] for seed in SEEDS]
    assert len(SEEDS) == len(set(firsts))


def test_negative_seed_is_its_residue() -> None:
    key, counter = np.array([2**64 - 7, 3], np.uint64), np.array([0, 11, 2, 4], np.uint64)
    expected = np.random.Generator(np.random.Philox(key=key, counter=counter)).random(4)
    assert np.array_equal(expected, generator(-7, 3, 11, Purpose.ACCEPT, 4).random(4))


@pytest.mark.parametrize("axis", ["seed", "position", "choice", "index", "within"])
def test_uniform_along_every_part_of_the_key(axis: str) -> None:
    """Chi-square of the first number over 4096 values of one part, and of 4096 numbers of one stream."""
    base: Key = (99, 1, 7, Purpose.DRAFT, 2)
    place = {"seed": 0, "choice": 1, "position": 2, "index": 4}
    if axis == "within":
        numbers = generator(*base).random(4096)
    else:
        keys = ([*base[: place[axis]], i, *base[place[axis] + 1 :]] for i in range(4096))
        numbers = np.array([generator(*key).random() for key in keys])
    counts = np.bincount((numbers * 64).astype(int), minlength=64)
    assert oracle.chi_square(counts, np.full(64, 1 / 64)) < 1
    lag = np.bincount((numbers[:-1] * 8).astype(int) * 8 + (numbers[1:] * 8).astype(int), minlength=64)
    assert oracle.chi_square(lag, np.full(64, 1 / 64)) < 1


def test_gumbel_argmax_draws_from_the_law() -> None:
    law_V = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
    drawn = [gumbel_argmax(np.log(law_V), generator(5, 0, i, Purpose.SAMPLE).random(5)) for i in range(8000)]
    counts = np.bincount(drawn, minlength=5)
    assert oracle.chi_square(counts, law_V) < 1
    assert oracle.chi_square(counts, np.array([0.37, 0.28, 0.2, 0.1, 0.05])) > 1


def test_gumbel_noise_is_by_token_id_and_finite() -> None:
    """A larger vocabulary only adds to the noise, so that a mask or a filter leaves the others' noise alone."""
    noise_V = gumbel(generator(1, 0, 3, Purpose.SAMPLE).random(50_000))
    assert np.isfinite(noise_V).all()
    assert np.array_equal(noise_V[:100], gumbel(generator(1, 0, 3, Purpose.SAMPLE).random(100)))
    np.testing.assert_allclose(oracle.keyed_gumbel(1, 0, 3, 100), noise_V[:100])


def test_gumbel_noise_survives_a_uniform_of_zero() -> None:
    assert np.isfinite(gumbel(np.zeros(3))).all()


@given(
    st.lists(st.one_of(st.floats(-60, 20), st.just(-np.inf)), min_size=1, max_size=40),
    st.integers(1, 30),
    st.integers(0, 10**6),
)
def test_gumbel_argmax_is_the_argmax_of_law_plus_noise(few: list[float], times: int, seed: int) -> None:
    """Flat and peaked laws, with holes; unlikely tokens win by their noise, too."""
    law_V = np.tile(few, times)
    law_V[seed % len(law_V)] = 0.0
    uniform_V = np.random.default_rng(seed).random(len(law_V)) ** (1 / (1 + seed % 5 * 1000))
    assert int((law_V + gumbel(uniform_V)).argmax()) == gumbel_argmax(law_V, uniform_V)


def test_a_token_far_below_the_top_can_win_by_its_noise() -> None:
    assert 1 == gumbel_argmax(np.array([0.0, -20.0, -20.0]), np.array([0.5, 1 - 1e-12, 0.5]))
