"""Acceptance: the exact law of what a step emits is the target's, and as many drafts are kept as theory says."""

from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.decoding.speculative import (
    VERIFICATION_RULES,
    Verify,
    acceptance_bounds,
    draw,
    speculative_accept,
    verify_blocks,
    verify_drafts,
)
from tests import oracle
from tests.core.decoding.plain_rules import plain_block_rule, plain_rule
from tests.oracle import Doubles, Ints, Laws, Rule


def markov(rows: object) -> Laws:
    table = np.array(rows, np.float64)
    return lambda context: table[context[-1] if context else 0]


def constant(law: object) -> Laws:
    law_V = np.array(law, np.float64)
    return lambda context: law_V


def with_memory(seed: int, vocab_size: int, *, zeros: bool = False) -> Laws:
    """A random law after every context, each its own; with zeros, some tokens cannot come."""

    @cache
    def law_after(context: tuple[int, ...]) -> Doubles:
        rng = np.random.default_rng([seed, len(context), *context])
        weights = rng.exponential(size=vocab_size)
        if zeros:
            weights[rng.permutation(vocab_size)[: rng.integers(0, vocab_size)]] = 0
        return np.asarray(weights / weights.sum())

    return law_after


# Fixtures with published or closed-form numbers: THEORY B3 and B4a.
F1 = constant([0.5, 0.3, 0.15, 0.05]), constant([0.3, 0.3, 0.2, 0.2])
F2 = constant([0.40, 0.25, 0.15, 0.12, 0.08]), constant([0.10, 0.15, 0.20, 0.25, 0.30])
ZIPF = 1 / np.arange(1, 7)
F4 = constant(ZIPF / ZIPF.sum()), constant(np.full(6, 1 / 6))
TOY = constant([1 / 3, 2 / 3]), constant([2 / 3, 1 / 3])
MARKOV = (
    markov([[0.5, 0.3, 0.15, 0.05], [0.1, 0.6, 0.2, 0.1], [0.25] * 4, [0.05, 0.05, 0.1, 0.8]]),
    markov([[0.3, 0.3, 0.2, 0.2], [0.2, 0.4, 0.3, 0.1], [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.2, 0.5]]),
)
FIXTURES = {"F1": F1, "F2": F2, "F4": F4, "toy": TOY, "markov": MARKOV}


def error_of(rule: Rule, target: Laws, draft: Laws, num_drafts: int, num_steps: int = 1) -> float:
    """Total variation between the first num_drafts + 1 tokens' law and the target's."""
    length = num_drafts + 1
    emitted = oracle.law_after_steps(rule, target, draft, num_drafts, length, num_steps)
    return oracle.total_variation(oracle.law_of_sequences(target, length), emitted)


accepted = oracle.expected_accepted
both_rules = pytest.mark.parametrize("rule", VERIFICATION_RULES.values(), ids=VERIFICATION_RULES)


def test_rules_are_what_they_are_called() -> None:
    assert {"block": verify_blocks, "token": verify_drafts} == VERIFICATION_RULES


@both_rules
@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
def test_a_step_emits_the_targets_law(rule: Verify, name: str, num_drafts: int) -> None:
    assert error_of(rule, *FIXTURES[name], num_drafts) < 1e-12


@both_rules
@pytest.mark.parametrize("name", FIXTURES)
@pytest.mark.parametrize("num_drafts", [1, 2])
def test_two_steps_emit_the_targets_law(rule: Verify, name: str, num_drafts: int) -> None:
    """What a step rejected and gave up is made good by the next, whatever the first emitted."""
    assert error_of(rule, *FIXTURES[name], num_drafts, num_steps=2) < 1e-12


@both_rules
@pytest.mark.parametrize("seed", range(12))
def test_random_laws_with_memory_are_kept_over_two_steps(rule: Verify, seed: int) -> None:
    target = with_memory(seed, 3, zeros=seed % 3 == 1)
    draft = with_memory(100 + seed, 3, zeros=seed % 3 == 2)
    for num_drafts in (1, 2):
        assert error_of(rule, target, draft, num_drafts, num_steps=2) < 1e-12


@both_rules
def test_random_laws_with_memory_are_kept_with_three_drafts(rule: Verify) -> None:
    """A place between the first and the last, which only here has a weight below 1 on either side."""
    for seed in range(4):
        target, draft = with_memory(seed, 3, zeros=seed % 2 == 1), with_memory(100 + seed, 3)
        assert error_of(rule, target, draft, 3, num_steps=2) < 1e-12


def test_four_drafts_on_the_theory_pair_keep_the_law_and_its_tokens() -> None:
    assert error_of(verify_drafts, *F1, 4) < 1e-12
    assert 3.3616 == pytest.approx(1 + accepted(verify_drafts, *F1, 4), abs=1e-9)


@pytest.mark.parametrize("broken", ["ratio turned round", "residual from the target", "bonus from the draft"])
@pytest.mark.parametrize("name", ["F1", "F2", "toy", "markov"])
def test_well_known_mistakes_do_not_keep_the_law(broken: str, name: str) -> None:
    assert error_of(partial(plain_rule, broken=broken), *FIXTURES[name], 2) > 1e-3
    assert error_of(partial(plain_block_rule, broken=broken), *FIXTURES[name], 2) > 1e-3


@pytest.mark.parametrize("broken", ["mass without 1 - p", "mass alone"])
@pytest.mark.parametrize("num_drafts", [2, 3])
def test_wrong_thresholds_of_blocks_do_not_keep_the_law(broken: str, num_drafts: int) -> None:
    assert error_of(partial(plain_block_rule, broken=broken), *MARKOV, num_drafts) > 1e-3


@pytest.mark.parametrize(("num_drafts", "published"), [(2, 0.004375), (3, 0.0071875)])
def test_weight_forgotten_in_the_residual_of_blocks_does_not_keep_the_law(num_drafts: int, published: float) -> None:
    """As far off as published on the Markov pair; a pair of two tokens does not show it, so that it proves nothing."""
    forgetful = partial(plain_block_rule, broken="weight forgotten")
    assert published == pytest.approx(error_of(forgetful, *MARKOV, num_drafts), abs=1e-6)
    assert error_of(forgetful, *TOY, num_drafts) < 1e-12


def test_noise_used_by_two_steps_does_not_keep_the_law() -> None:
    """Why draws are keyed by where a verification starts: with the first step's draws the second is biased."""
    target, draft = markov([[0.5, 0.5], [0.9, 0.1]]), markov([[0.8, 0.2], [0.3, 0.7]])
    edges = [*np.linspace(0, 1, 11), 0.2 / 0.5, 0.5 / 0.8, 0.3 / 0.9, 0.1 / 0.7, 0.5 / 0.8]

    def two_steps(second_is_fresh: bool) -> dict[tuple[int, ...], float]:
        law: dict[tuple[int, ...], float] = {}
        middles, lengths = oracle.cells(edges)
        for u, length in zip(middles, lengths, strict=True):
            again = zip(middles, lengths, strict=True) if second_is_fresh else [(u, 1.0)]
            for v, other_length in again:
                for tokens, chance in _two_drafted_steps(target, draft, u, v):
                    law[tokens] = law.get(tokens, 0.0) + chance * length * other_length
        return law

    expected = oracle.law_of_sequences(target, 2)
    assert oracle.total_variation(expected, two_steps(second_is_fresh=True)) < 1e-12
    assert oracle.total_variation(expected, two_steps(second_is_fresh=False)) > 1e-2


def _two_drafted_steps(target: Laws, draft: Laws, u: float, v: float) -> list[tuple[tuple[int, ...], float]]:
    """First two tokens when one draft is judged with u, and the next, if the first was refused, with v.

    The bonus is integrated over draws of its own.
    """
    outcomes = []
    middles, lengths = oracle.cells(np.concatenate([target((i,)).cumsum() for i in range(2)]))
    for first, chance in enumerate(draft(())):
        for b, b_length in zip(middles, lengths, strict=True):
            one = _single(target, draft, (), first, u, b)
            if len(one) == 2:
                outcomes.append((one, chance * b_length))
                continue
            for second, other in enumerate(draft(one)):
                for c, c_length in zip(middles, lengths, strict=True):
                    two = (*one, *_single(target, draft, one, second, v, c))[:2]
                    outcomes.append((two, chance * b_length * other * c_length))
    return outcomes


def _single(target: Laws, draft: Laws, context: tuple[int, ...], token: int, u: float, b: float) -> tuple[int, ...]:
    laws = np.stack([target(context), target((*context, token))])[None]
    num, bonus = verify_drafts(np.array([[token]]), laws, draft(context)[None, None], np.array([[u, b]]))
    return (token, int(bonus[0])) if num[0] else (int(bonus[0]),)


@pytest.mark.parametrize(("rule", "is_kept"), [(verify_drafts, True), (verify_blocks, False)])
def test_noise_keyed_by_position_alone_suits_tokens_but_not_blocks(rule: Verify, is_kept: bool) -> None:
    """A step of two drafts that keeps none has looked at the second's draw all the same, if it judges whole blocks.

    The next step starts at that position; with the draw of that position it would be biased.
    """
    target, draft = markov([[0.5, 0.5], [0.9, 0.1]]), markov([[0.8, 0.2], [0.3, 0.7]])
    law: dict[tuple[int, ...], float] = {}
    for draw_of_second, length in zip(*oracle.cells(_thresholds_of_two(target, draft)), strict=True):
        first_step = oracle.step_law(_with_draw(rule, 1, draw_of_second), target, draft, 2)
        for first, chance in first_step.items():
            rest = {(): 1.0}
            if len(first) == 1:
                rest = oracle.step_law(_with_draw(rule, 0, draw_of_second), target, draft, 1, first)
            for second, other in rest.items():
                tokens = (*first, *second)[:2]
                law[tokens] = law.get(tokens, 0.0) + length * chance * other
    error = oracle.total_variation(oracle.law_of_sequences(target, 2), law)
    assert error < 1e-12 if is_kept else error > 1e-2


@both_rules
@pytest.mark.parametrize("seed", range(4))
def test_the_number_of_drafts_may_follow_from_what_was_said_before(rule: Verify, seed: int) -> None:
    """As a controller chooses it: for each step anew, before its drafts are drawn."""
    target, draft = with_memory(seed, 3), with_memory(50 + seed, 3)
    emitted = oracle.law_after_steps(rule, target, draft, lambda said: (sum(said) + len(said) + seed) % 3, 4, 3)
    assert oracle.total_variation(oracle.law_of_sequences(target, 4), emitted) < 1e-12


@both_rules
def test_the_number_of_drafts_must_not_follow_from_the_drafts_themselves(rule: Verify) -> None:
    """Not to verify a draft that the target finds less likely than the drafter did looks like a saving."""

    def leaving_out(draft_RK: Ints, target_RKV: Doubles, draft_RKV: Doubles, uniforms_RK: Doubles) -> tuple[Ints, Ints]:
        num_accepted_R, bonus_R = rule(draft_RK, target_RKV, draft_RKV, uniforms_RK)
        rows = np.arange(len(draft_RK))
        is_left_out_R = target_RKV[rows, 0, draft_RK[:, 0]] < draft_RKV[rows, 0, draft_RK[:, 0]]
        _, alone_R = rule(draft_RK[:, :0], target_RKV[:, :1], draft_RKV[:, :0], uniforms_RK[:, -1:])
        return np.where(is_left_out_R, 0, num_accepted_R), np.where(is_left_out_R, alone_R, bonus_R)

    assert error_of(rule, *F2, 1) < 1e-12
    assert error_of(leaving_out, *F2, 1) > 1e-2


@both_rules
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("name", FIXTURES)
def test_the_bound_along_drafts_is_on_average_what_no_rule_can_pass(rule: Verify, name: str, num_drafts: int) -> None:
    target, draft = FIXTURES[name]
    mean = 0.0
    for chance, drafted, target_KV, draft_KV in oracle.all_drafts(target, draft, num_drafts):
        bound_R = acceptance_bounds(np.array([drafted]), target_KV[None], draft_KV[None])
        mean += chance * float(bound_R[0])
    assert oracle.most_accepted(target, draft, num_drafts) == pytest.approx(mean, abs=1e-12)
    assert accepted(rule, target, draft, num_drafts) <= mean + 1e-12


def _with_draw(rule: Verify, index: int, uniform: float) -> Rule:
    """The rule when one of its draws is known."""

    def known(draft_RK: Ints, target_RKV: Doubles, draft_RKV: Doubles, uniforms_RK: Doubles) -> tuple[Ints, Ints]:
        uniforms_RK = uniforms_RK.copy()
        uniforms_RK[:, index] = uniform
        return rule(draft_RK, target_RKV, draft_RKV, uniforms_RK)

    return known


def _thresholds_of_two(target: Laws, draft: Laws) -> list[float]:
    """All that a draw is compared with in the first two positions, over two tokens."""
    ratios = [target(c)[token] / draft(c)[token] for c in [(), (0,), (1,)] for token in range(2)]
    runs = [(a, b) for a in range(2) for b in range(2)]
    laws = [np.stack([of(()), of(run[:1]), of(run)]) for run in runs for of in (target, draft)]
    blocks = [
        oracle.block_thresholds(run, target_KV, draft_KV[:-1])[1]
        for run, target_KV, draft_KV in zip(runs, laws[::2], laws[1::2], strict=True)
    ]
    return [*ratios, *np.concatenate(blocks)]


@pytest.mark.parametrize("alpha", [0.5, 0.6, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4, 5, 7])
def test_tokens_a_step_are_the_geometric_sum(alpha: float, num_drafts: int) -> None:
    target, draft = constant([0.95, 0.05]), constant([alpha - 0.05, 1.05 - alpha])
    expected = oracle.expected_tokens(alpha, num_drafts)
    assert expected == pytest.approx(1 + accepted(verify_drafts, target, draft, num_drafts), abs=1e-9)


@pytest.mark.parametrize(
    ("alpha", "num_drafts", "published"),
    [(0.5, 4, 1.9375), (0.6, 3, 2.176), (0.7, 2, 2.19), (0.8, 4, 3.3616), (0.8, 8, 4.3289), (0.9, 7, 5.6953)],
)
def test_geometric_sum_is_the_published_table(alpha: float, num_drafts: int, published: float) -> None:
    assert published == pytest.approx(oracle.expected_tokens(alpha, num_drafts), abs=5e-5)


# Token rule, block verification, and the most that any rule on one draft can accept: THEORY B4a.
TABLE = [
    ("toy", 2, 1.111111, 1.222222, 1.333333),
    ("toy", 3, 1.407407, 1.666667, 1.851852),
    ("toy", 4, 1.604938, 2.049383, 2.370370),
    ("toy", 5, 1.736626, 2.370370, 2.790123),
    ("toy", 8, 1.921963, 3.106843, 3.903064),
    ("markov", 2, 1.4350, 1.4625, 1.4875),
    ("markov", 3, 1.9345, 2.0320, 2.1310),
    ("markov", 4, 2.32515, 2.532975, 2.728794),
    ("markov", 5, 2.629656, 2.972899, 3.276128),
    ("F1", 1, 0.8, 0.8, 0.8),
    ("F2", 1, 0.6, 0.6, 0.6),
    ("F4", 1, 0.721088, 0.721088, 0.721088),
]


@pytest.mark.parametrize(("name", "num_drafts", "token", "block", "ideal"), TABLE)
def test_accepted_drafts_are_those_of_the_published_table(
    name: str, num_drafts: int, token: float, block: float, ideal: float
) -> None:
    pair = FIXTURES[name]
    assert token == pytest.approx(accepted(verify_drafts, *pair, num_drafts), abs=6e-7)
    assert block == pytest.approx(accepted(verify_blocks, *pair, num_drafts), abs=6e-7)
    assert ideal == pytest.approx(oracle.most_accepted(*pair, num_drafts), abs=6e-7)


@pytest.mark.parametrize(("name", "num_drafts"), [row[:2] for row in TABLE] + [("F1", 4), ("F2", 3), ("F4", 3)])
def test_accepted_drafts_are_those_of_the_theory_to_nine_digits(name: str, num_drafts: int) -> None:
    """Fractions by formulae that know no thresholds, against every draft and every draw."""
    token, block = oracle.exact_accepted(*FIXTURES[name], num_drafts)
    assert float(token) == pytest.approx(accepted(verify_drafts, *FIXTURES[name], num_drafts), abs=1e-9)
    assert float(block) == pytest.approx(accepted(verify_blocks, *FIXTURES[name], num_drafts), abs=1e-9)


def test_blocks_accept_at_least_as_much_as_tokens_and_at_most_what_can_be() -> None:
    rng = np.random.default_rng(0)
    gains = []
    for i in range(200):
        target, draft = (markov(rng.dirichlet(np.ones(3), 3)) for _ in range(2))
        num_drafts = 2 + i % 2
        token, block = (accepted(rule, target, draft, num_drafts) for rule in (verify_drafts, verify_blocks))
        assert token - 1e-12 <= block <= oracle.most_accepted(target, draft, num_drafts) + 1e-12
        gains.append(block / token - 1)
    assert 0.02 < np.mean(gains) < 0.2


@both_rules
def test_one_draft_is_accepted_with_one_minus_the_total_variation(rule: Verify) -> None:
    for seed in range(20):
        target, draft = with_memory(seed, 5), with_memory(seed + 50, 5)
        expected = np.minimum(target(()), draft(())).sum()
        assert expected == pytest.approx(accepted(rule, target, draft, 1), abs=1e-12)


@given(seed=st.integers(0, 10**6), num_drafts=st.integers(0, 5))
def test_blocks_are_the_token_rule_where_laws_are_point_masses(seed: int, num_drafts: int) -> None:
    rng = np.random.default_rng(seed)
    drafts = rng.integers(0, 3, (8, num_drafts))
    target = np.eye(3)[rng.integers(0, 3, (8, num_drafts + 1))]
    arrays = drafts, target, np.eye(3)[drafts], rng.random((8, num_drafts + 1))
    for expected, got in zip(verify_drafts(*arrays), verify_blocks(*arrays), strict=True):
        assert expected.tolist() == got.tolist()


class Numbers:
    """A source of given numbers that counts how many were taken."""

    def __init__(self, numbers: Doubles) -> None:
        self.left = list(numbers)

    def random(self) -> float:
        return float(self.left.pop(0))


def random_case(
    seed: int, vocab_size: int, num_requests: int, num_drafts: int
) -> tuple[Ints, Doubles, Doubles, Doubles]:
    rng = np.random.default_rng(seed)
    target = rng.exponential(size=(num_requests, num_drafts + 1, vocab_size)) ** 3
    drafts = rng.exponential(size=(num_requests, num_drafts, vocab_size)) ** 3
    target *= rng.random(target.shape) < 0.8
    target[..., 0] += 1e-3
    target /= target.sum(axis=-1, keepdims=True)
    drafts /= drafts.sum(axis=-1, keepdims=True)
    tokens = rng.integers(0, vocab_size, (num_requests, num_drafts))
    return tokens, target, drafts, rng.random((num_requests, num_drafts + 1))


cases = st.tuples(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 6), st.integers(0, 5))


@given(case=cases)
def test_batch_of_requests_is_the_rule_for_each(case: tuple[int, int, int, int]) -> None:
    arrays = random_case(*case)
    num_accepted, bonus = verify_drafts(*arrays)
    for i, (tokens, target, drafts, uniforms) in enumerate(zip(*arrays, strict=True)):
        source = Numbers(uniforms)
        assert (num_accepted[i], bonus[i]) == speculative_accept(tokens, target, drafts, source)
        assert [] == source.left  # K + 1 draws, whatever happens


@given(case=cases)
def test_batch_of_blocks_is_the_rule_for_each(case: tuple[int, int, int, int]) -> None:
    arrays = random_case(*case)
    num_accepted, bonus = verify_blocks(*arrays)
    for i in range(len(num_accepted)):
        alone = verify_blocks(*(array[i : i + 1] for array in arrays))
        assert (num_accepted[i], bonus[i]) == (alone[0][0], alone[1][0])


@pytest.mark.parametrize(("rule", "plain"), [(verify_drafts, plain_rule), (verify_blocks, plain_block_rule)])
@given(case=cases)
def test_equals_the_plain_algorithm(rule: Verify, plain: Rule, case: tuple[int, int, int, int]) -> None:
    arrays = random_case(*case)
    for expected, got in zip(plain(*arrays), rule(*arrays), strict=True):
        assert expected.tolist() == got.tolist()


@both_rules
def test_token_of_chance_zero_is_never_emitted(rule: Verify) -> None:
    target = np.array([[[0.0, 0.5, 0.5, 0.0]] * 2])
    drafts = np.array([[[0.5, 0.0, 0.0, 0.5]]])
    for uniform in (0.0, 0.5, 1 - 2**-53):
        for token in (0, 3):
            num, bonus = rule(np.array([[token]]), target, drafts, np.array([[0.0, uniform]]))
            assert (0, True) == (num[0], bonus[0] in (1, 2))


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.25, 0.5, 1 - 2**-53])
def test_draw_inverts_the_running_sum_and_skips_zeros(uniform: float) -> None:
    weights_V = np.array([0.0, 3.0, 0.0, 1.0, 0.0])
    assert [3 if uniform >= 0.75 else 1] == draw(weights_V[None], np.array([uniform])).tolist()


def test_draw_stays_within_weights_so_small_that_the_threshold_rounds_up() -> None:
    assert [1] == draw(np.array([[0.0, 5e-324, 0.0]]), np.array([0.9])).tolist()


@both_rules
def test_equal_laws_accept_everything(rule: Verify) -> None:
    law = constant(np.random.default_rng(0).dirichlet(np.ones(5)))
    assert 2 == pytest.approx(accepted(rule, law, law, 2))


@both_rules
def test_refusal_that_only_rounding_caused_draws_from_the_target(rule: Verify) -> None:
    """The target's law is nowhere above the draft's, so there is no residual."""
    target, drafts = np.array([[[0.25, 0.75]] * 2]), np.array([[[0.25, 0.75 + 2**-50]]])
    num, bonus = rule(np.array([[1]]), target, drafts, np.array([[1 - 2**-53, 0.1]]))
    assert (0, 0) == (num[0], bonus[0])


@pytest.mark.parametrize(
    ("tokens", "target_shape", "draft_shape", "message"),
    [
        ([0, 1], (2, 4), (2, 4), "target_probs has shape"),
        ([0, 1], (3, 4), (1, 4), "draft_probs has shape"),
        ([0, 1], (3, 4), (2, 5), "draft_probs has shape"),
        ([0], (8,), (1, 4), "target_probs has shape"),
        ([4], (2, 4), (1, 4), "pass the vocabulary of 4"),
        ([-1], (2, 4), (1, 4), "pass the vocabulary of 4"),
    ],
)
def test_shapes_that_disagree_are_refused(
    tokens: list[int], target_shape: tuple[int, ...], draft_shape: tuple[int, ...], message: str
) -> None:
    source = Numbers(np.zeros(9))
    with pytest.raises(ValueError, match=message):
        speculative_accept(tokens, np.full(target_shape, 0.25), np.full(draft_shape, 0.25), source)
    assert 9 == len(source.left)


def test_no_drafts_is_a_draw_from_the_target() -> None:
    assert (0, 2) == speculative_accept([], [[0.25, 0.25, 0.5]], [], Numbers(np.array([0.7])))
