"""Speculation shows in no answer: greedy and seeded answers are those without it, to the bits of log-probabilities.

An answer is all that a client gets: token ids, text, log-probabilities, why it ended, and what is counted for usage.
"""

from collections.abc import Sequence
from functools import cache
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import pytest

from core import Engine, EngineConfig, NewRequest, RequestOutput, SamplingParams, SpeculativeConfig, load_engine
from core.memory.block_manager import blocks_needed

WHO = ("Tom", "Lily", "A little dog", "The old king", "My friend Sue", "Ben and Mia", "One day a bird", "Grandma")
DOES = (" went to", " saw a big red", " said: here it is, here it is, here", " was sad", ": \n1. ")
ENDS = ("", " and", ', "Oh', " be", "th")
PROMPTS = [f"{i}. {who}{does}{end}" for i, (who, does, end) in enumerate(product(WHO, DOES, ENDS))]
REAL_PROMPTS = [
    text.format(thing)
    for thing in ("apple", "house", "river", "stone", "cloud")
    for text in (
        "List: {0}, pear, plum, {0}, pear, plum, {0},",
        "def get_{0}(x):\n    return x.{0}\n\ndef set_{0}(x, value):\n    x.",
        "The {0} is red. What colour is the {0}? The",
        "Once there was a {0} that",
    )
]
MAX_TOKENS = 24


def speculation(method: str, num_drafts: int, *, adaptive: bool = False) -> SpeculativeConfig:
    """Whatever the batch."""
    return SpeculativeConfig(
        method=method, num_speculative_tokens=num_drafts, disable_by_batch_size=64, adaptive=adaptive
    )


def engine(speculative: SpeculativeConfig | None, **config: Any) -> Engine:
    return load_engine(EngineConfig(speculative=speculative, num_threads=1, **config))


Answer = tuple[Any, ...]


def answers(
    engine: Engine, prompts: Sequence[str], predictions: Sequence[str] = (), **params: Any
) -> dict[str, Answer]:
    sampling = SamplingParams(num_logprobs=2, **params)
    for i, (prompt, prediction) in enumerate(zip_longest(prompts, predictions, fillvalue="")):
        ids = tuple(engine.tokenizer.encode(prompt))
        predicted = tuple(engine.tokenizer.encode(prediction, add_special_tokens=False))
        engine.add(NewRequest(request_id=str(i), prompt_token_ids=ids, params=sampling, prediction_token_ids=predicted))
    outputs: dict[str, list[RequestOutput]] = {str(i): [] for i in range(len(prompts))}
    while engine.has_unfinished_requests:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return {name: _answer(parts) for name, parts in outputs.items()}


def _answer(parts: Sequence[RequestOutput]) -> Answer:
    last = parts[-1]
    assert last.error is None, last.error
    tokens = tuple(token for part in parts for token in part.tokens)
    usage = last.num_prompt_tokens, last.num_cached_tokens, last.num_generated_tokens
    return tokens, "".join(part.text for part in parts), last.finish_reason, last.stop_reason, usage


@cache
def greedy_answers() -> dict[str, Answer]:
    return answers(engine(None, num_kv_blocks=1000), PROMPTS, temperature=0, max_tokens=MAX_TOKENS, stop=("dog", "."))


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_greedy_answers_to_200_prompts_are_the_same(method: str, adaptive: bool) -> None:
    speculating = engine(speculation(method, 4, adaptive=adaptive), num_kv_blocks=1000)
    found = answers(speculating, PROMPTS, temperature=0, max_tokens=MAX_TOKENS, stop=("dog", "."))

    assert 200 == len(greedy_answers())
    assert greedy_answers() == found
    assert {"stop", "length"} == {answer[2].value for answer in found.values()}
    assert len({answer[1] for answer in found.values()}) > 40
    assert 0 < speculating.stats.num_accepted_tokens < speculating.stats.num_draft_tokens


@pytest.mark.real_model
def test_greedy_answers_of_a_real_model_to_20_prompts_are_the_same(smollm2_path: Path) -> None:
    """Look-up; and without speculation, with predictions: what it says, with a word put in."""
    config = {"model": str(smollm2_path), "cache_dir": smollm2_path.parent, "num_kv_blocks": 200}
    config |= {"enable_prefix_caching": False}
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    unspeculating, speculating = engine(None, **config), engine(speculation("ngram", 4), **config)
    plain = answers(unspeculating, REAL_PROMPTS, **params)

    assert 20 == len(plain)
    assert plain == answers(speculating, REAL_PROMPTS, **params)
    assert 0 < speculating.stats.num_accepted_tokens < speculating.stats.num_draft_tokens
    edited = [answer[1][:12] + " oddly" + answer[1][12:] for answer in plain.values()]
    assert plain == answers(unspeculating, REAL_PROMPTS, edited, **params)
    assert 60 < unspeculating.stats.num_accepted_tokens < unspeculating.stats.num_draft_tokens


SEEDED = PROMPTS[:20]
ROOM_FOR_ALL = sum(blocks_needed(len(prompt) + MAX_TOKENS, 16) for prompt in SEEDED)


@cache
def seeded_answers() -> dict[str, Answer]:
    return answers(engine(None, num_kv_blocks=ROOM_FOR_ALL), SEEDED, temperature=1, seed=11, max_tokens=MAX_TOKENS)


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
@pytest.mark.parametrize(
    ("num_drafts", "max_batch", "num_blocks"),
    [(1, 64, ROOM_FOR_ALL), (2, 1, ROOM_FOR_ALL), (4, 3, ROOM_FOR_ALL), (8, 64, 12), (16, 7, 9), (3, 64, 9)],
)
def test_seeded_answers_are_the_same_at_any_k_in_any_batch_preempted_or_not(
    method: str, num_drafts: int, max_batch: int, num_blocks: int
) -> None:
    speculating = engine(speculation(method, num_drafts), num_kv_blocks=num_blocks, max_num_seqs=max_batch)
    found = answers(speculating, SEEDED, temperature=1, seed=11, max_tokens=MAX_TOKENS)

    assert _but_cached(seeded_answers()) == _but_cached(found)
    assert (num_blocks < ROOM_FOR_ALL) == bool(speculating.stats.num_preemptions)
    assert 0 < speculating.stats.num_accepted_tokens < speculating.stats.num_draft_tokens


def _but_cached(found: dict[str, Answer]) -> dict[str, Answer]:
    """What was in the cache is up to the pool, not to the drafts."""
    return {name: (*answer[:4], answer[4][0], answer[4][2]) for name, answer in found.items()}
