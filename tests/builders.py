"""Small real parts for tests: requests, plans, engines. What a test does not name has a plain value."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from core.config import EngineConfig, SpeculativeConfig
from core.engine import Engine
from core.memory.block_manager import BlockManager
from core.model.config import ModelConfig
from core.request import Decoder, NewRequest, Request, RequestOutput, ScriptEntry
from core.sampling_params import SamplingParams
from core.scheduling.scheduler import ContinuousBatchingScheduler
from core.step import Execute, ScheduledRequest, SchedulerOutput, count_only
from core.tokenizer import ByteTokenizer, IncrementalDetokenizer

END = ByteTokenizer.END_TOKEN_ID

TINY_SIZES = ModelConfig(
    vocab_size=257,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
)


def request(
    request_id: str = "a",
    prompt: Sequence[int] = (1,),
    max_tokens: int = 4,
    *,
    eos: Iterable[int] = (),
    decoder: Decoder | None = None,
    num_drafts: int = 0,
    seed: int = 0,
    choice: int = 0,
    salt: bytes = b"",
    siblings: Sequence[Request] = (),
    **params: Any,
) -> Request:
    """A request whose noise has `seed` and which wants `num_drafts` drafts a step."""
    made = Request(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens, **params),
        eos_token_ids=frozenset(eos),
        decoder=decoder,
        seed=seed,
        choice=choice,
        cache_salt=salt,
        siblings=siblings,
    )
    made.num_speculative_tokens = num_drafts
    return made


def family(
    request_id: str, num_samples: int, prompt: Sequence[int] = (1,), max_tokens: int = 4, **fields: Any
) -> Request:
    """A request and its siblings, `id`, `id.1`, `id.2` and so on."""
    ids = [request_id, *(f"{request_id}.{choice}" for choice in range(1, num_samples))]
    siblings = [request(name, prompt, max_tokens, choice=i, **fields) for i, name in enumerate(ids[1:], 1)]
    return request(request_id, prompt, max_tokens, siblings=siblings, **fields)


def text_decoder() -> IncrementalDetokenizer:
    """Tokens are UTF-8 bytes."""
    return IncrementalDetokenizer(ByteTokenizer())


def scheduler(
    max_batch: int = 4, num_blocks: int = 100, block_size: int = 4, *, execute: Execute = count_only, **limits: Any
) -> ContinuousBatchingScheduler:
    return ContinuousBatchingScheduler(max_batch, BlockManager(num_blocks, block_size), execute=execute, **limits)


def plan(*requests: Request, num_draft_slots: int = 0) -> SchedulerOutput:
    """A plan that computes all that each request is missing, for target and draft alike."""
    shares = [
        ScheduledRequest(
            r,
            r.num_computed_tokens,
            r.num_missing_tokens,
            num_draft_slots,
            (0,),
            r.num_tokens - r.num_draft_computed_tokens,
        )
        for r in requests
    ]
    return SchedulerOutput(0, tuple(shares))


def new_request(
    request_id: str = "a",
    prompt: Sequence[int] = (1,),
    max_tokens: int | None = 4,
    *,
    script: Sequence[ScriptEntry] | None = None,
    arrival_s: float = 0.0,
    sibling_ids: Sequence[str] = (),
    cache_salt: Mapping[str, str] | None = None,
    **params: Any,
) -> NewRequest:
    return NewRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, **params),
        script=tuple(script) if script is not None else None,
        arrival_s=arrival_s,
        sibling_ids=tuple(sibling_ids),
        cache_salt=cache_salt or {},
    )


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def engine(execute: Execute = count_only, *, clock: Clock | None = None, num_drafts: int = 0, **config: Any) -> Engine:
    """An engine over bytes that takes scripts; its model is `execute`."""
    config = {"num_kv_blocks": 100, "block_size": 4, "enable_scripts": True, **config}
    speculative = SpeculativeConfig(num_speculative_tokens=num_drafts) if num_drafts else None
    return Engine(
        EngineConfig(speculative=speculative, **config), TINY_SIZES, ByteTokenizer(), execute, clock=clock or Clock()
    )


def run(engine: Engine, max_steps: int = 1000) -> dict[str, list[RequestOutput]]:
    """Step until nothing is unfinished; outputs by request, in order."""
    outputs: dict[str, list[RequestOutput]] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"unfinished after {max_steps} steps")


def text_of(outputs: Iterable[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def token_ids_of(outputs: Iterable[RequestOutput]) -> list[int]:
    return [token.token_id for output in outputs for token in output.tokens]
