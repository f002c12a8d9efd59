"""One answer to one request: the embedded model says the same in any company, pool and batch, speculating or not.

Compared are token ids, text and log-probabilities, bit for bit.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from core import Engine, EngineConfig, NewRequest, RequestOutput, SamplingParams, SpeculativeConfig, load_engine
from core.memory.block_manager import blocks_needed

BLOCK_SIZE = 16
NUM_REQUESTS = 64
SENTENCES = (
    "Once upon a time there was a",
    "The sea was calm that morning, and",
    "He opened the letter slowly. It said:",
    "In the beginning",
    "A list of things to take along: bread,",
    "“Naïve café,” she wrote — ",
    "x",
)
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.2, "ignore_eos": True},
    {"temperature": 0, "min_tokens": 5, "stop": ("e", "\n")},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.3, "top_k": 40, "min_p": 0.02, "logit_bias": {32: 1.0}},
)
SPECULATIONS = {
    "draft model": SpeculativeConfig(num_speculative_tokens=3, adaptive=False, disable_by_batch_size=NUM_REQUESTS),
    "draft model, few": SpeculativeConfig(num_speculative_tokens=4, adaptive=False, disable_by_batch_size=32),
    "look-up": SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=5,
        prompt_lookup_min=1,
        adaptive=False,
        disable_by_batch_size=NUM_REQUESTS,
    ),
}
SPECULATION = SPECULATIONS["draft model"]
# How many drafts pay is measured, so it may differ from run to run; the answers may not.
ADAPTIVE = SpeculativeConfig()

Answer = tuple[tuple[int, ...], str, tuple[object, ...]]


def new_request(i: int) -> NewRequest:
    params = PARAMS[i % len(PARAMS)]
    rng = np.random.default_rng(i)
    text = " ".join(str(s) for s in rng.choice(SENTENCES, rng.integers(1, 5)))
    seed = None if params["temperature"] == 0 else int(rng.integers(-(2**63), 2**63 - 1))
    sampling = SamplingParams(max_tokens=int(rng.integers(6, 25)), seed=seed, num_logprobs=i % 3 or None, **params)
    return NewRequest(request_id=str(i), prompt_token_ids=tuple(text.encode()), params=sampling, choice=i % 2)


REQUESTS = [new_request(i) for i in range(NUM_REQUESTS)]
BLOCKS_FOR_ALL = sum(blocks_needed(len(r.prompt_token_ids) + (r.params.max_tokens or 0), BLOCK_SIZE) for r in REQUESTS)


def an_engine(num_blocks: int, speculative: SpeculativeConfig | None, **limits: int) -> Engine:
    return load_engine(
        EngineConfig(block_size=BLOCK_SIZE, num_kv_blocks=num_blocks, speculative=speculative, num_threads=1, **limits)
    )


def run(engine: Engine, requests: Sequence[NewRequest]) -> dict[str, Answer]:
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_unfinished_requests:
        for output in engine.step():
            assert output.error is None, output.error
            outputs[output.request_id].append(output)
    assert engine.num_kv_blocks == engine.stats.kv_blocks_free
    return {request_id: _answer(parts) for request_id, parts in outputs.items()}


def _answer(parts: Sequence[RequestOutput]) -> Answer:
    assert parts[-1].is_finished
    tokens = [token for part in parts for token in part.tokens]
    ids, logprobs = (tuple(getattr(token, name) for token in tokens) for name in ("token_id", "logprobs"))
    return ids, "".join(part.text for part in parts), logprobs


@cache
def plain_answers() -> dict[str, Answer]:
    """All at once in a pool with room for all, without speculation."""
    return run(an_engine(BLOCKS_FOR_ALL, None), REQUESTS)


def test_answers_are_worth_comparing() -> None:
    texts = [text for _, text, _ in plain_answers().values()]
    assert len(set(texts)) > NUM_REQUESTS / 2
    assert sum(len(ids) for ids, _, _ in plain_answers().values()) > 10 * NUM_REQUESTS


@pytest.mark.parametrize("speculative", [None, SPECULATION], ids=["plain", "speculating"])
def test_a_pool_of_a_tenth_gives_the_same_answers(speculative: SpeculativeConfig | None) -> None:
    engine = an_engine(BLOCKS_FOR_ALL // 10, speculative)
    assert plain_answers() == run(engine, REQUESTS)
    assert engine.stats.num_preemptions > 0
    assert (speculative is not None) == bool(engine.stats.num_accepted_tokens)


def test_drafts_as_they_pay_give_the_same_answers() -> None:
    assert plain_answers() == run(an_engine(BLOCKS_FOR_ALL, ADAPTIVE), REQUESTS)


@pytest.mark.parametrize("name", SPECULATIONS)
def test_speculation_gives_the_same_answers(name: str) -> None:
    engine = an_engine(BLOCKS_FOR_ALL, SPECULATIONS[name])
    assert plain_answers() == run(engine, REQUESTS)
    assert engine.stats.num_accepted_tokens > NUM_REQUESTS / 2


def test_verification_said_in_the_config_judges_requests_without_a_seed() -> None:
    """The seeds drawn for them are the same, so that only the rule can make a difference."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    unseeded = [NewRequest(request_id=str(i), prompt_token_ids=(72, 105, 32, 97 + i), params=params) for i in range(6)]
    engines = {
        name: an_engine(BLOCKS_FOR_ALL, speculative)
        for name, speculative in {
            "default": SpeculativeConfig(adaptive=False),
            "block": SpeculativeConfig(adaptive=False, verification="block"),
            "token": SpeculativeConfig(adaptive=False, verification="token"),
        }.items()
    }
    answers = {name: run(engine, unseeded) for name, engine in engines.items()}
    assert answers["block"] == answers["default"]
    assert answers["block"] != answers["token"]


def test_small_batches_and_chunks_in_another_order_give_the_same_answers() -> None:
    engine = an_engine(BLOCKS_FOR_ALL // 4, SPECULATION, max_num_batched_tokens=48, max_num_seqs=7)
    assert plain_answers() == run(engine, REQUESTS[::-1])


def test_a_request_alone_gets_the_same_answer() -> None:
    engine = an_engine(BLOCKS_FOR_ALL, SPECULATION)
    for request in REQUESTS[:12]:
        assert plain_answers()[request.request_id] == run(engine, [request])[request.request_id]
