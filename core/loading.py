"""From a config to a running engine: files to weights, memory to blocks, cores to threads."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.config import (
    DEFAULT_KV_SHARE,
    DEFAULT_SWAP_BYTES,
    EMBEDDED_MODEL,
    MAX_DEFAULT_KV_BYTES,
    EngineConfig,
    memory_limit_bytes,
    num_usable_cores,
)
from core.decoding.prediction import PredictionProposer
from core.decoding.proposers import DraftModelProposer, NgramProposer, Proposer
from core.decoding.speculative import VERIFICATION_RULES
from core.engine import Engine
from core.errors import InvalidRequest, ModelLoadError, NumericalFault
from core.memory.block_manager import blocks_needed
from core.model import tiny
from core.model.config import ModelConfig
from core.model.numerics import Cache, Model, Numerics, make_cache, make_model, resolve
from core.model.transformer import flat_batch
from core.model.weights import LoadedWeights, load_model_config, load_model_files
from core.model_runner import ModelRunner
from core.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

SLOW_WARM_UP_S = 3.0
MAX_KERNEL_THREADS = 16  # a product of few rows is cut into about as many units

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVMemory:
    """How the KV cache is cut up. `max_concurrency`: requests of full context length that fit at once."""

    bytes_per_token: int
    block_size: int
    num_blocks: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.bytes_per_token

    @property
    def max_concurrency(self) -> float:
        return self.num_blocks / blocks_needed(self.max_model_len, self.block_size)


def kv_memory(config: EngineConfig) -> KVMemory:
    """The cut of the KV cache for this config, without loading weights. Raises ModelLoadError, InvalidRequest."""
    model, draft = _model_configs(config)
    return _kv_memory(config, model, draft, _numerics(config, model, draft))


def numerics(config: EngineConfig) -> Numerics:
    """What the model will be computed with, without loading it. Raises ModelLoadError, InvalidRequest."""
    return _numerics(config, *_model_configs(config))


def _numerics(config: EngineConfig, model: ModelConfig, draft: ModelConfig | None) -> Numerics:
    return resolve(
        config.kernels,
        config.dtype,
        config.kv_cache_dtype,
        [model, draft] if draft else [model],
        config.block_size,
        is_embedded=config.model == EMBEDDED_MODEL,
    )


def _model_configs(config: EngineConfig) -> tuple[ModelConfig, ModelConfig | None]:
    draft_path = _draft_path(config)
    draft = load_model_config(draft_path, cache_dir=config.cache_dir) if draft_path else None
    return load_model_config(_model_path(config.model), cache_dir=config.cache_dir), draft


def _kv_memory(config: EngineConfig, model: ModelConfig, draft: ModelConfig | None, of: Numerics) -> KVMemory:
    models = [model, draft] if draft else [model]
    weight_bytes, limit_bytes = sum(each.num_parameters for each in models) * of.weight_bytes, memory_limit_bytes()
    if weight_bytes > limit_bytes:
        raise ModelLoadError(
            f"the weights of {config.model} take {weight_bytes:,} bytes as {of.dtype}, this machine's limit is"
            f" {limit_bytes:,}"
        )
    bytes_per_token = sum(each.kv_bytes_per_token(of.kv_bytes) for each in models)
    max_model_len = config.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise InvalidRequest(
            f"max_model_len is {max_model_len}, the model's limit is {model.max_position_embeddings}", "max_model_len"
        )
    num_blocks = config.num_kv_blocks or _default_num_blocks(config, bytes_per_token, max_model_len)
    if num_blocks < 1:
        raise InvalidRequest(
            f"kv_cache_memory_bytes is {config.kv_cache_memory_bytes}, one block takes"
            f" {config.block_size * bytes_per_token}",
            "kv_cache_memory_bytes",
        )
    memory = KVMemory(
        bytes_per_token, config.block_size, num_blocks, min(max_model_len, num_blocks * config.block_size)
    )
    if (config.num_kv_blocks or config.kv_cache_memory_bytes) and memory.num_bytes > limit_bytes - weight_bytes:
        name = "num_kv_blocks" if config.num_kv_blocks else "kv_cache_memory_bytes"
        raise InvalidRequest(
            f"{name} asks for {memory.num_bytes:,} bytes of KV cache, this machine's limit is {limit_bytes:,}, of which"
            f" the weights take {weight_bytes:,}",
            name,
        )
    return memory


def _default_num_blocks(config: EngineConfig, bytes_per_token: int, max_model_len: int) -> int:
    bytes_per_block = config.block_size * bytes_per_token
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // bytes_per_block
    useful = config.max_num_seqs * blocks_needed(max_model_len, config.block_size)
    share = min(int(memory_limit_bytes() * DEFAULT_KV_SHARE), MAX_DEFAULT_KV_BYTES)
    return max(1, min(useful, share // bytes_per_block))


def _model_path(model: str) -> Path:
    return tiny.TARGET_DIR if model == EMBEDDED_MODEL else Path(model)


def _draft_path(config: EngineConfig) -> Path | None:
    if config.speculative is None or config.speculative.method == "ngram":
        return None
    if config.speculative.model is not None:
        return _model_path(config.speculative.model)
    if config.model != EMBEDDED_MODEL:
        raise InvalidRequest(
            f"speculative method draft_model needs a draft 'model' beside {config.model}; 'ngram' needs none", "model"
        )
    return tiny.DRAFT_DIR


def load_engine(config: EngineConfig, *, clock: Callable[[], float] = time.monotonic) -> Engine:
    """Load the model and start an engine on it; `clock` gives seconds, `arrival_s` of requests must come from it.

    Raises:
        ModelLoadError: files are missing, damaged, of a kind we do not run, or target and draft do not match.
        InvalidRequest: the config does not suit the model.
    """
    weights = load_model_files(_model_path(config.model), cache_dir=config.cache_dir)
    draft_path = _draft_path(config)
    draft_weights = load_model_files(draft_path, cache_dir=config.cache_dir) if draft_path else None
    draft_config = draft_weights.config if draft_weights else None
    chosen = _numerics(config, weights.config, draft_config)
    memory = _kv_memory(config, weights.config, draft_config, chosen)
    config = replace(
        config,
        num_kv_blocks=memory.num_blocks,
        num_tier_slots=_num_tier_slots(config, memory),
        max_model_len=memory.max_model_len,
        num_threads=config.num_threads or _default_threads(chosen),
    )
    _limit_threads(config, chosen)
    model, cache = _model_and_cache(weights, memory, config, chosen, "target")
    verify = VERIFICATION_RULES[config.speculative.verification if config.speculative else "block"]
    proposer = PredictionProposer(_proposer(config, weights.config, draft_weights, memory, chosen, clock))
    tokenizer = _tokenizer(config)
    no_tokens = sorted({*range(tokenizer.vocab_size, weights.config.vocab_size)} - tokenizer.eos_token_ids)
    runner = ModelRunner(model, cache, proposer, verify=verify, clock=clock, no_tokens=no_tokens)
    return Engine(config, weights.config, tokenizer, runner, clock=clock)


def _proposer(
    config: EngineConfig,
    target: ModelConfig,
    draft_weights: LoadedWeights | None,
    memory: KVMemory,
    chosen: Numerics,
    clock: Callable[[], float],
) -> Proposer | None:
    if draft_weights is not None:
        _check_pair(target, draft_weights.config)
        return DraftModelProposer(*_model_and_cache(draft_weights, memory, config, chosen, "draft"), clock=clock)
    if config.speculative is not None:
        return NgramProposer(config.speculative.prompt_lookup_min, config.speculative.prompt_lookup_max)
    return None


def _num_tier_slots(config: EngineConfig, memory: KVMemory) -> int:
    if config.preemption_mode == "recompute":
        return 0
    num_bytes = config.swap_space_bytes or DEFAULT_SWAP_BYTES
    num_slots = num_bytes // (memory.block_size * memory.bytes_per_token)
    if num_slots < 1:
        raise InvalidRequest(
            f"swap_space_bytes is {num_bytes}, one block takes {memory.block_size * memory.bytes_per_token}",
            "swap_space_bytes",
        )
    return num_slots


def _model_and_cache(
    weights: LoadedWeights, memory: KVMemory, config: EngineConfig, chosen: Numerics, name: str
) -> tuple[Model, Cache]:
    tensors: Mapping[str, NDArray[np.floating[Any]]] = weights.tensors
    model = make_model(
        chosen,
        weights.config,
        tensors,
        memory.max_model_len,
        num_threads=config.num_threads or 1,
        cache_dir=config.cache_dir,
    )
    tier_file = config.swap_file.with_name(f"{config.swap_file.name}.{name}") if config.swap_file else None
    cache = make_cache(
        chosen,
        weights.config,
        memory.num_blocks,
        memory.block_size,
        num_tier_slots=config.num_tier_slots,
        tier_file=tier_file,
    )
    try:
        _warm_up(model, cache)
    except NumericalFault as error:
        raise ModelLoadError(f"the weights of the {name} model are damaged: {error}") from error
    return model, cache


def _default_threads(chosen: Numerics) -> int:
    """All cores for the kernels, as far as a pass has work for them; one less for BLAS."""
    return max(1, num_usable_cores() - 1) if chosen.kernels == "numpy" else min(MAX_KERNEL_THREADS, num_usable_cores())


def _warm_up(model: Model, cache: Cache) -> None:
    """Compile, or load what was compiled, before the first request: one token in a block that nobody owns yet.

    Raises:
        NumericalFault: what comes out are no numbers, as it would be for every request.
    """
    started_s = time.monotonic()
    logits_1V = model.forward(flat_batch([([0], 0, [0])], cache.block_size), cache, np.zeros(1, np.int64))
    if not np.isfinite(logits_1V).all():
        raise NumericalFault("logits are not finite")
    if (seconds := time.monotonic() - started_s) > SLOW_WARM_UP_S:
        logger.info("the first pass took %.0f s, most of it to compile", seconds)


def _check_pair(target: ModelConfig, draft: ModelConfig) -> None:
    if target.vocab_size != draft.vocab_size:
        raise ModelLoadError(f"draft model has vocabulary {draft.vocab_size}, the target's is {target.vocab_size}")


def _tokenizer(config: EngineConfig) -> Tokenizer:
    if config.model == EMBEDDED_MODEL:
        return ByteTokenizer(tiny.chat_template())
    return load_tokenizer(Path(config.model), cache_dir=config.cache_dir)


def _limit_threads(config: EngineConfig, chosen: Numerics) -> None:
    """Never more threads than cores: two that share a core wait for each other. Beside the kernels BLAS has one."""
    from threadpoolctl import threadpool_limits

    num_threads = config.num_threads or 1
    threadpool_limits(limits=num_threads if chosen.kernels == "numpy" else 1, user_api="blas")
    logger.info("numerics: %s, %d thread%s", chosen, num_threads, "" if num_threads == 1 else "s")
