"""Small random models, and the real scheduler over the real runner on top of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.decoding.proposers import DraftModelProposer, Proposer
from core.decoding.speculative import Verify
from core.memory.block_manager import BlockManager
from core.model.config import ModelConfig
from core.model.kv_cache import KVCache
from core.model.transformer import Transformer
from core.model.weights import expected_shapes
from core.model_runner import ModelRunner
from core.request import OutputToken, Request
from core.sampling_params import SamplingParams
from core.scheduling.drafting import DraftPolicy, FixedDrafts
from core.scheduling.scheduler import ContinuousBatchingScheduler
from core.step import Execute, ModelRunnerOutput, SchedulerOutput

Tensors = dict[str, NDArray[np.float32]]
EOS = frozenset({2})

TARGET = ModelConfig(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=256,
)
DRAFT = replace(TARGET, num_layers=1)


def random_tensors(config: ModelConfig, seed: int, *, loudness: float = 2.0, gain: float = 1.5) -> Tensors:
    """Weights whose layers multiply what they are given by about `gain`; logits have a spread of about `loudness`.

    The louder the layers, the more does rounding grow from one to the next.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        else:
            scale = loudness if name.startswith(("lm_head", "model.embed")) else gain
            tensors[name] = (rng.standard_normal(shape) * scale / np.sqrt(shape[1])).astype(np.float32)
    return tensors


@dataclass(frozen=True)
class Model:
    """A config and weights for it."""

    config: ModelConfig
    tensors: Tensors

    def transformer(self) -> Transformer:
        return Transformer(self.config, self.tensors)


def good_draft_for(target: Model) -> Model:
    """The target without its last layer, so that the laws are alike but not equal."""
    config = replace(target.config, num_layers=target.config.num_layers - 1)
    return Model(config, {name: target.tensors[name] for name in expected_shapes(config)})


@dataclass
class Served:
    """Requests run through a real scheduler: what came out of each, and how it went."""

    tokens: dict[str, list[OutputToken]] = field(default_factory=dict)
    num_steps: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    drafted_and_accepted: list[tuple[int, int]] = field(default_factory=list)  # of each request and step with drafts
    first_accepted: dict[str, int] = field(default_factory=dict)  # in each request's first step that gave tokens

    def ids(self, request_id: str) -> list[int]:
        return [token.token_id for token in self.tokens[request_id]]


def a_request(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    drafts: int = 0,
    seed: int = 0,
    choice: int = 0,
    prediction: Sequence[int] = (),
) -> Request:
    request = Request(
        request_id,
        prompt,
        params,
        choice=choice,
        seed=params.seed if params.seed is not None else seed,
        eos_token_ids=EOS,
        prediction=prediction,
    )
    request.num_speculative_tokens = drafts
    return request


def a_runner(
    target: Model,
    draft: Model | None,
    num_blocks: int,
    block_size: int,
    make_proposer: Callable[[Transformer, KVCache], DraftModelProposer] = DraftModelProposer,
    *,
    proposer: Proposer | None = None,
    verify: Verify | None = None,
) -> ModelRunner:
    """A runner that drafts with a model, with another proposer, or (neither given) not at all."""
    if draft is not None:
        proposer = make_proposer(draft.transformer(), KVCache(draft.config, num_blocks, block_size))
    cache = KVCache(target.config, num_blocks, block_size)
    rule = {} if verify is None else {"verify": verify}
    return ModelRunner(target.transformer(), cache, proposer, **rule)


def serve(
    execute: Execute,
    requests: Sequence[Request],
    *,
    num_blocks: int,
    block_size: int = 4,
    max_batch: int = 8,
    token_limit: int | None = None,
    after_step: Callable[[], None] | None = None,
    drafting: DraftPolicy | None = None,
    **limits: Any,
) -> Served:
    """Run the requests to their ends; the scheduler's invariants are checked after every step.

    `limits` are more arguments of the scheduler's.
    """
    manager = BlockManager(num_blocks, block_size)
    served = Served({member.request_id: [] for request in requests for member in (request, *request.siblings)})

    def counted(plan: SchedulerOutput) -> ModelRunnerOutput:
        result = execute(plan)
        served.num_drafts += sum(sampled.num_draft_tokens for sampled in result.sampled.values())
        served.num_accepted += sum(sampled.num_accepted_tokens for sampled in result.sampled.values())
        for request_id, sampled in result.sampled.items():
            if sampled.num_draft_tokens:
                served.drafted_and_accepted.append((sampled.num_draft_tokens, sampled.num_accepted_tokens))
            served.first_accepted.setdefault(request_id, sampled.num_accepted_tokens)
        return result

    scheduler = ContinuousBatchingScheduler(
        max_batch,
        manager,
        execute=counted,
        max_num_batched_tokens=token_limit,
        drafting=drafting or FixedDrafts(),
        **limits,
    )
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests:
        scheduler.step()
        served.num_steps += 1
        scheduler.check_invariants()
        if after_step:
            after_step()
        for output in scheduler.take_outputs():
            assert output.error is None, output.error
            served.tokens[output.request_id] += output.tokens
    assert num_blocks == manager.num_free_blocks
    served.num_preemptions = scheduler.num_preemptions
    return served


def outputs(served: Served) -> dict[str, list[int]]:
    """The token ids of each request."""
    return {request_id: served.ids(request_id) for request_id in served.tokens}
