"""The whole engine where it is tightest, against each request alone.

Pools of a few blocks, steps of a few tokens, drafts of every kind; requests of every kind come, leave and fail at
random, and the cache is reset and the pool held at any time. All must end; greedy and seeded answers must be, to the
bits of log-probabilities, those that the request gets alone in an engine with room, without cache, drafts or
neighbours; every block must come back, and the counters must tell of what was said.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.config import EngineConfig, SpeculativeConfig
from core.decoding.prediction import PredictionProposer
from core.decoding.proposers import DraftModelProposer, NgramProposer, Proposer
from core.decoding.speculative import VERIFICATION_RULES
from core.engine import Engine
from core.errors import InvalidRequest
from core.model.config import ModelConfig
from core.model.kv_cache import KVCache
from core.model_runner import ModelRunner
from core.request import NewRequest, RequestOutput
from core.sampling_params import SamplingParams, StructuredOutput
from core.step import ModelRunnerOutput, SchedulerOutput
from core.tokenizer import ByteTokenizer
from tests.builders import END, Clock, run, text_of
from tests.core.small_models import Model, good_draft_for, random_tensors

SIZES = ModelConfig(
    vocab_size=257,
    hidden_size=16,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=96,
)
TARGET = Model(SIZES, random_tensors(SIZES, 5, loudness=3.0))
DRAFT = good_draft_for(TARGET)
TARGET_MODEL, DRAFT_MODEL = TARGET.transformer(), DRAFT.transformer()
LETTERS = b"abcx"
COMMON = bytes(LETTERS[i * i % 11 % 4] for i in range(40))
MAX_UNFINISHED = 10

configs = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([4, 2, 8, 1, 16]),
        "num_kv_blocks": st.sampled_from([6, 10, 4, 2, 24, 1]),
        "num_tier_slots": st.sampled_from([0, 9, 2, 1]),
        "max_num_seqs": st.sampled_from([3, 8, 4, 1]),
        "max_num_batched_tokens": st.sampled_from([512, 7, 16, 2, 1]),
        "max_model_len": st.sampled_from([None, 30, 17, 2]),
        "enable_prefix_caching": st.booleans(),
        "speculative": st.none()
        | st.builds(
            SpeculativeConfig,
            method=st.sampled_from(["draft_model", "ngram"]),
            num_speculative_tokens=st.sampled_from([1, 3, 16]),
            prompt_lookup_min=st.just(1),
            verification=st.sampled_from(["block", "token"]),
            adaptive=st.booleans(),
            disable_by_batch_size=st.sampled_from([1, 64]),
        ),
    }
)
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": -1},
    {"seed": 2**63 - 1, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": -1.0},
    {},
]
WISHES: list[dict[str, Any]] = [
    {},
    {},
    {"logit_bias": {97: 6.0, 98: 6.0}},  # words that look-up finds, and the models agree on
    {"logit_bias": {END: 4.0}},
    {"stop": ("ab", "b"), "logit_bias": {97: 3.0, 98: 3.0}},
    {"stop_token_ids": (97, 195), "min_tokens": 2},
    {"num_logprobs": 2},
    {"num_prompt_logprobs": 1},
    {"allowed_token_ids": (97, 98, 99, END), "ignore_eos": True},
    {"bad_words": ((97,), (98, 99))},
    {"structured_output": StructuredOutput("regex", "([abc]{2,6}x){1,9}")},
    {"speculative_tokens": 2},
]


class Ticking(Clock):
    """A little later each time it is asked, so that adaptive drafting has times to go by."""

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


class Fragile:
    """A runner that fails once when it is told to."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.fails_next = False

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        result = self._runner(plan)
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("the runner fails")
        return result


def make_engine(config: EngineConfig) -> tuple[Engine, Fragile]:
    assert config.num_kv_blocks is not None
    cache = partial(
        KVCache,
        num_blocks=config.num_kv_blocks,
        block_size=config.block_size,
        num_tier_slots=config.num_tier_slots,
    )
    inner: Proposer | None = None
    if config.speculative is not None and config.speculative.method == "ngram":
        inner = NgramProposer(1, config.speculative.prompt_lookup_max)
    elif config.speculative is not None:
        inner = DraftModelProposer(DRAFT_MODEL, cache(DRAFT.config))
    verify = VERIFICATION_RULES[config.speculative.verification if config.speculative else "block"]
    runner = Fragile(ModelRunner(TARGET_MODEL, cache(SIZES), PredictionProposer(inner), verify=verify))
    return Engine(config, SIZES, ByteTokenizer(), runner, clock=Ticking()), runner


def answer(outputs: list[RequestOutput]) -> dict[str, Any]:
    """All that a client gets, but for usage."""
    last = outputs[-1]
    assert last.error is None or last.is_refused, last.error
    return {
        "tokens": [token for output in outputs for token in output.tokens],
        "text": text_of(outputs),
        "reason": (last.finish_reason, last.stop_reason),
        "prompt_logprobs": None if last.error else outputs[0].prompt_logprobs,
        "embedding": last.embedding,
    }


def alone(new: NewRequest, choice: int, max_model_len: int) -> dict[str, Any]:
    """What one sample says with room for it and nobody beside it."""
    config = EngineConfig(
        num_kv_blocks=8, block_size=16, max_model_len=max_model_len, max_num_seqs=1, enable_prefix_caching=False
    )
    engine, _ = make_engine(config)
    engine.add(NewRequest(request_id="a", prompt_token_ids=new.prompt_token_ids, params=new.params, choice=choice))
    return answer(run(engine)["a"])


def has_requests(machine: "EngineMachine") -> bool:
    return bool(machine.unfinished)


class EngineMachine(RuleBasedStateMachine):
    @initialize(config=configs)
    def start(self, config: Mapping[str, Any]) -> None:
        logging.disable(logging.ERROR)  # steps raise here, and each is logged with its plan
        mode = "swap" if config["num_tier_slots"] else "recompute"
        self.engine, self.runner = make_engine(EngineConfig(preemption_mode=mode, **config))
        self.new: dict[str, NewRequest] = {}
        self.choices: dict[str, int] = {}
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.unfinished: list[str] = []
        self.num_aborted = 0

    @precondition(lambda self: len(self.unfinished) < MAX_UNFINISHED)
    @rule(
        own=st.binary(max_size=9),
        num_common=st.integers(0, 20),
        share=st.sampled_from([1.0, 0.6, 0.0]),
        num_samples=st.sampled_from([1, 3, 2]),
        sampling=st.sampled_from(SAMPLING),
        wishes=st.lists(st.sampled_from(WISHES), min_size=2, max_size=2),
        predicted=st.sampled_from([b"", b"abab", COMMON[:10]]),
        salt=st.sampled_from([{}, {}, {"cache_salt": "s"}]),
    )
    def add(
        self,
        own: bytes,
        num_common: int,
        share: float,
        num_samples: int,
        sampling: Mapping[str, Any],
        wishes: Sequence[Mapping[str, Any]],
        predicted: bytes,
        salt: Mapping[str, str],
    ) -> None:
        """Prompts of any length up to the context's; `share` of what it leaves is wanted, of nothing an embedding."""
        limit = self.engine.max_model_len
        prompt = (COMMON[:num_common] + own)[: limit - 1 if limit > 1 else 1] or b"a"
        max_tokens = round(share * (limit - len(prompt)))
        params: dict[str, Any] = {**sampling, **wishes[0], **wishes[1]} if max_tokens else {"embed": True}
        params["min_tokens"] = min(max_tokens, params.get("min_tokens", 0))
        num_samples = num_samples if max_tokens else 1
        names = [f"r{len(self.outputs)}.{choice}" for choice in range(num_samples)]
        made = NewRequest(
            request_id=names[0],
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=max_tokens, **params),
            sibling_ids=tuple(names[1:]),
            cache_salt=salt,
            prediction_token_ids=tuple(predicted),
        )
        if num_samples > self.engine.config.max_num_seqs:
            with pytest.raises(InvalidRequest, match=f"n is {num_samples}"):
                self.engine.add(made)
            return
        self.engine.add(made)
        for choice, name in enumerate(names):
            self.new[name], self.choices[name], self.outputs[name] = made, choice, []
        self.unfinished += names

    @precondition(has_requests)
    @rule(number=st.integers(0, MAX_UNFINISHED))
    def leave(self, number: int) -> None:
        name = self.unfinished.pop(number % len(self.unfinished))
        self.engine.abort(name)
        self.num_aborted += 1

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    @rule(is_held=st.booleans())
    def hold_the_pool(self, is_held: bool) -> None:
        (self.engine.hold_free_blocks if is_held else self.engine.release_held_blocks)()

    @rule()
    def let_a_step_fail(self) -> None:
        """Nobody is to blame, so nobody may notice."""
        self.runner.fails_next = True

    @rule(num_steps=st.sampled_from([1, 4, 12]))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for output in self.engine.step():
                self.outputs[output.request_id].append(output)
                if output.is_finished:
                    self.unfinished.remove(output.request_id)

    @invariant()
    def the_counters_tell_of_what_was_said(self) -> None:
        stats = self.engine.stats
        said = [outputs[-1] for outputs in self.outputs.values() if outputs]
        assert len(self.unfinished) == stats.num_running + stats.num_waiting
        assert stats.num_running <= self.engine.config.max_num_seqs
        assert stats.kv_blocks == stats.kv_blocks_free + stats.kv_blocks_used
        assert sum(output.num_generated_tokens for output in said) == stats.num_generation_tokens
        assert sum(output.is_finished for output in said) + self.num_aborted == sum(stats.finished.values())
        sources = stats.prompt_tokens_by_source
        assert stats.num_prompt_tokens == sources["local_compute"] + sources["local_cache_hit"]
        assert sources["local_cache_hit"] <= stats.prefix_cache_hits <= stats.prefix_cache_queries
        assert sum(stats.accepted_per_position) == stats.num_accepted_tokens <= stats.num_draft_tokens
        well = stats.finished["stop"] + stats.finished["length"]
        assert well == stats.histograms["request_generation_tokens"].count
        assert well >= stats.histograms["request_params_n"].count

    def teardown(self) -> None:
        try:
            if hasattr(self, "engine"):
                self.end_all()
        finally:
            logging.disable(logging.NOTSET)

    def end_all(self) -> None:
        """Also in a pool that is still held, for the oldest goes on."""
        for _ in range(SIZES.max_position_embeddings * (len(self.unfinished) + 1)):
            if not self.unfinished:
                break
            self.step(1)
        assert not self.unfinished
        self.engine.release_held_blocks()
        assert self.engine.stats.kv_blocks == self.engine.stats.kv_blocks_free
        for name, outputs in self.outputs.items():
            self.check_answer(name, outputs)

    def check_answer(self, name: str, outputs: list[RequestOutput]) -> None:
        params = self.new[name].params
        if not outputs or not (params.is_greedy or params.seed is not None or params.embed):
            return
        expected, found = alone(self.new[name], self.choices[name], self.engine.max_model_len), answer(outputs)
        if not outputs[-1].is_finished:
            num_tokens = len(found["tokens"])
            expected, found = {"tokens": expected["tokens"][:num_tokens]}, {"tokens": found["tokens"]}
        assert expected == found


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(stateful_step_count=25)
