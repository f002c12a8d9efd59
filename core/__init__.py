"""The engine's public names. What is not listed here is not for users.

Six of them are the lab: small contracts with which paged KV caches, continuous batching and speculative decoding can
be learnt and tested (`docs/lab.md`). The server runs on these very classes.
"""

from core.config import EMBEDDED_MODEL, EngineConfig, SpeculativeConfig
from core.decoding.json_schemas import lark_json
from core.decoding.speculative import speculative_accept
from core.engine import Engine
from core.errors import (
    ContextLengthExceeded,
    DuplicateRequest,
    EngineDead,
    InvalidRequest,
    InvariantViolation,
    ModelLoadError,
    OctavoError,
    UnknownRequest,
)
from core.loading import KVMemory, kv_memory, load_engine, numerics
from core.memory.block_manager import (
    BlockManager,
    Fragmentation,
    blocks_needed,
    kv_cache_blocks_fragmentation,
)
from core.pace import Progress
from core.request import (
    DraftOutcome,
    FinishReason,
    NewRequest,
    OutputToken,
    RequestOutput,
    RequestTimes,
    ScriptedToken,
    ScriptEntry,
    ScriptPiece,
    TokenLogprobs,
)
from core.sampling_params import MAX_BAD_WORDS, SamplingParams, StructuredOutput
from core.scheduling.scheduler import ContinuousBatchingScheduler, StepReport
from core.scheduling.static_batching import static_batching_steps
from core.stats import EngineStats, Histogram
from core.tokenizer import ByteTokenizer, IncrementalDetokenizer, Tokenizer, decode_pieces

__all__ = [
    "EMBEDDED_MODEL",
    "MAX_BAD_WORDS",
    "BlockManager",
    "ByteTokenizer",
    "ContextLengthExceeded",
    "ContinuousBatchingScheduler",
    "DraftOutcome",
    "DuplicateRequest",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "EngineStats",
    "FinishReason",
    "Fragmentation",
    "Histogram",
    "IncrementalDetokenizer",
    "InvalidRequest",
    "InvariantViolation",
    "KVMemory",
    "ModelLoadError",
    "NewRequest",
    "OctavoError",
    "OutputToken",
    "Progress",
    "RequestOutput",
    "RequestTimes",
    "SamplingParams",
    "ScriptEntry",
    "ScriptPiece",
    "ScriptedToken",
    "SpeculativeConfig",
    "StepReport",
    "StructuredOutput",
    "TokenLogprobs",
    "Tokenizer",
    "UnknownRequest",
    "blocks_needed",
    "decode_pieces",
    "kv_cache_blocks_fragmentation",
    "kv_memory",
    "lark_json",
    "load_engine",
    "numerics",
    "speculative_accept",
    "static_batching_steps",
]
