"""What the engine is told, checked once and frozen; and what it works out from the machine: threads and KV memory.

Flags and environment are the service's affair (`app.settings`). Here are only values and their limits. Memory and
threads come from the control group and the CPU affinity, for in a container the machine's own figures lie.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from core.errors import InvalidRequest

EMBEDDED_MODEL = "octavo-tiny"
DEFAULT_KV_SHARE = 0.25  # of the memory limit, when neither blocks nor bytes are given
MAX_DEFAULT_KV_BYTES = 2 * 2**30
MAX_SPECULATIVE_TOKENS = 16
DEFAULT_MAX_DRAFTING = 8  # requests in a step, where the number of drafts is fixed
PREEMPTION_MODES = ("recompute", "swap", "auto")
KERNELS = ("auto", "numpy", "numba")
DTYPES = ("auto", "float32", "bfloat16", "int8")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16")
DEFAULT_SWAP_BYTES = 2**30
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made and judged; spelled as vLLM's.

    Args:
        method: `draft_model`, or `ngram`, which looks the last tokens up in what has been said before.
        num_speculative_tokens: drafts of a request and step; with `adaptive`, at most.
        adaptive: choose the number by what drafts cost and bring, 0 included (`core.scheduling.draft_controller`).
        model: the draft model, as `EngineConfig.model`; None for the embedded pair's.
        prompt_lookup_min, prompt_lookup_max: tokens that must be found again, longest first (`ngram`).
        disable_by_batch_size: with more requests than this in a step nobody drafts; None for no limit, or 8 if the
            number is fixed: rows are no longer free then.
        verification: `block` or `token`, the rule for requests without a seed (see `core.decoding.speculative`).
    """

    method: str = "draft_model"
    num_speculative_tokens: int = 3
    model: str | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    verification: str = "block"
    disable_by_batch_size: int | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.disable_by_batch_size is None and not self.adaptive:
            object.__setattr__(self, "disable_by_batch_size", DEFAULT_MAX_DRAFTING)
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "disable_by_batch_size"):
            value = getattr(self, name)
            if type(value) is not int and (name, value) != ("disable_by_batch_size", None):
                # It comes from JSON, where 2.5 and true are numbers too.
                raise InvalidRequest(f"{name} is {value!r}, a whole number is needed", name)
        if type(self.adaptive) is not bool:
            raise InvalidRequest(f"adaptive is {self.adaptive!r}, allowed are true and false", "adaptive")
        if self.method not in ("draft_model", "ngram"):
            raise InvalidRequest(
                f"speculative method is {self.method!r}, allowed are 'draft_model' and 'ngram'", "method"
            )
        if self.verification not in ("block", "token"):
            raise InvalidRequest(
                f"verification is {self.verification!r}, allowed are 'block' and 'token'", "verification"
            )
        if self.disable_by_batch_size is not None and self.disable_by_batch_size < 1:
            raise InvalidRequest(
                f"disable_by_batch_size is {self.disable_by_batch_size}, at least 1 is needed", "disable_by_batch_size"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise InvalidRequest(
                f"prompt_lookup_min is {self.prompt_lookup_min}, allowed is"
                f" [1, prompt_lookup_max = {self.prompt_lookup_max}]",
                "prompt_lookup_min",
            )
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise InvalidRequest(
                f"num_speculative_tokens is {self.num_speculative_tokens}, allowed is [1, {MAX_SPECULATIVE_TOKENS}]",
                "num_speculative_tokens",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Raises InvalidRequest on values that cannot be.

    Args:
        model: `octavo-tiny`, the path of a .gguf file, or a directory with safetensors.
        block_size: tokens in a KV block.
        num_kv_blocks: blocks in the pool; or `kv_cache_memory_bytes`; or neither: a share of the memory limit.
        num_tier_slots: blocks of the second tier; set from `swap_space_bytes` when the model is known.
        max_model_len: longest prompt + output; None for the model's own.
        max_num_seqs: most requests running at once (the scheduler's `max_batch`).
        max_num_batched_tokens: most tokens computed in one step.
        enable_prefix_caching: let requests with equal beginnings share KV blocks.
        preemption_mode: what becomes of a preempted request's blocks: `recompute`, `swap` or `auto`.
        swap_space_bytes: size of the second tier; None for none, or 1 GiB where the mode needs one.
        swap_file: file that the second tier is mapped to; None for memory.
        max_logprobs: most alternatives a request may ask for.
        seed: where the noise of requests without a seed comes from.
        speculative: None for no speculation.
        enable_scripts: accept requests that carry a script.
        kernels: what computes: `numpy`, `numba`, or `auto` (see `core.model.numerics`).
        dtype: of the weights: `float32`, `bfloat16`, `int8`, or `auto`.
        kv_cache_dtype: of the KV cache: `float32`, `bfloat16`, or `auto`.
        num_threads: threads of the numerics; None for all the cores we may use with the kernels, which wait for no
            thread, and for one less with NumPy: a BLAS thread that waits for a core holds all the others up (a step
            took 30 times as long).
        cache_dir: where converted weights are kept for the next start; None to convert every time.
    """

    model: str = EMBEDDED_MODEL
    block_size: int = 16
    num_kv_blocks: int | None = None
    num_tier_slots: int = 0
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    preemption_mode: str = "recompute"
    swap_space_bytes: int | None = None
    swap_file: Path | None = None
    max_logprobs: int = 20
    seed: int = 0
    speculative: SpeculativeConfig | None = None
    enable_scripts: bool = False
    kernels: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    num_threads: int | None = None
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.preemption_mode not in PREEMPTION_MODES:
            raise InvalidRequest(
                f"preemption_mode is {self.preemption_mode!r}, allowed are {', '.join(PREEMPTION_MODES)}",
                "preemption_mode",
            )
        if self.preemption_mode == "recompute" and (self.swap_space_bytes or self.swap_file):
            name = "swap_space_bytes" if self.swap_space_bytes else "swap_file"
            raise InvalidRequest(f"{name} needs preemption_mode swap or auto", name)
        for name in (
            "swap_space_bytes",
            "block_size",
            "num_kv_blocks",
            "kv_cache_memory_bytes",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} is {value}, at least 1 is needed", name)


def num_usable_cores() -> int:
    """Cores this process may use: CPU affinity, cut down by the control group's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read_words(_CGROUP / "cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def memory_limit_bytes() -> int:
    """Memory this process may use: the control group's limit or the machine's, whichever is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        words = _read_words(_CGROUP / name)
        if words and words[0] != "max":
            limits.append(int(words[0]))
    return min(limits)


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
