"""A pair of models with constant laws: what the runner accepts over thousands of steps is what the formulae say.

The laws are THEORY's pair: every draft is kept with chance 0.8 by the token rule, independently, so that a step of k
drafts gives (1 - 0.8^(k+1)) / 0.2 tokens. Tolerances are three standard errors, of the formula and not of the sample.
"""

from functools import cache

import numpy as np
import pytest

from core.decoding.speculative import VERIFICATION_RULES
from core.model.config import ModelConfig
from core.model.weights import expected_shapes
from core.sampling_params import SamplingParams
from tests import oracle
from tests.core.small_models import Model, a_request, a_runner, serve

TARGET_LAW, DRAFT_LAW = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.3, 0.3, 0.2, 0.2])
ALPHA = 0.8
CONFIG = ModelConfig(
    vocab_size=4,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=256,
)
NUM_REQUESTS, LENGTH, BLOCK_SIZE = 64, 240, 16
NUM_BLOCKS = NUM_REQUESTS * 16


def with_law(law_V: oracle.Doubles) -> Model:
    """A model that says the same whatever it has heard: all tokens look alike to it, and its layers add nothing."""
    tensors = {name: np.ones(shape, np.float32) for name, shape in expected_shapes(CONFIG).items()}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"][:] = 0
    tensors["lm_head.weight"][:] = np.log(law_V)[:, None] / CONFIG.hidden_size
    return Model(CONFIG, tensors)


@cache
def accepted_by_step(rule: str, num_drafts: int) -> tuple[int, ...]:
    """Drafts accepted in each step that had all k of them."""
    seeds: list[int | None] = [i if rule == "keyed" else None for i in range(NUM_REQUESTS)]
    requests = [
        a_request(
            str(i), (1,), SamplingParams(max_tokens=LENGTH, seed=seed, ignore_eos=True), drafts=num_drafts, seed=i
        )
        for i, seed in enumerate(seeds)
    ]
    verify = VERIFICATION_RULES.get(rule)
    runner = a_runner(with_law(TARGET_LAW), with_law(DRAFT_LAW), NUM_BLOCKS, BLOCK_SIZE, verify=verify)
    served = serve(runner, requests, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_batch=NUM_REQUESTS)
    return tuple(accepted for drafted, accepted in served.drafted_and_accepted if drafted == num_drafts)


def assert_geometric(accepted: tuple[int, ...], alpha: float, num_drafts: int) -> None:
    """Each draft behind a kept one is kept with chance alpha: the share that is, and the tokens of a step."""
    counts = np.array(accepted)
    num_trials = counts.sum() + (counts < num_drafts).sum()
    assert alpha == pytest.approx(counts.sum() / num_trials, abs=3 * np.sqrt(alpha * (1 - alpha) / num_trials))
    law = [alpha**j * (1 - alpha if j < num_drafts else 1) for j in range(num_drafts + 1)]
    mean = oracle.expected_tokens(alpha, num_drafts)
    spread = np.sqrt(sum(chance * (1 + j - mean) ** 2 for j, chance in enumerate(law)))
    assert mean == pytest.approx(1 + counts.mean(), abs=3 * spread / np.sqrt(len(counts)))
    assert len(counts) > 3000


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4, 5])
def test_token_rule_accepts_and_emits_by_the_closed_form(num_drafts: int) -> None:
    assert np.minimum(TARGET_LAW, DRAFT_LAW).sum() == pytest.approx(ALPHA)
    assert_geometric(accepted_by_step("token", num_drafts), ALPHA, num_drafts)


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_keyed_rule_agrees_as_two_races_with_common_noise_do(num_drafts: int) -> None:
    """Less than the token rule, and not less than it can be at this distance."""
    alpha, distance = oracle.keyed_agreement(TARGET_LAW, DRAFT_LAW), 1 - ALPHA
    assert (1 - distance) / (1 + distance) <= alpha <= 1 - distance
    assert_geometric(accepted_by_step("keyed", num_drafts), alpha, num_drafts)


@pytest.mark.parametrize("num_drafts", [3, 5])
def test_block_verification_accepts_what_its_theory_says(num_drafts: int) -> None:
    counts = np.array(accepted_by_step("block", num_drafts))
    _, block = oracle.exact_accepted(lambda _: TARGET_LAW, lambda _: DRAFT_LAW, num_drafts)
    error = counts.std() / np.sqrt(len(counts))
    assert float(block) == pytest.approx(counts.mean(), abs=3 * error)
    assert oracle.expected_tokens(ALPHA, num_drafts) - 1 < counts.mean() - 2 * error
