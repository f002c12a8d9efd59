"""Tensors from disk to float32 arrays, under Hugging Face's Llama names and in its layout.

Every matrix is (out_features, in_features) and rotary pairs are (i, i + head_dim/2), whatever the file's own order
was; GGUF's differences end in `core.model.gguf`. Float32 tensors stay where they are and are mapped, not read, so
that a start costs no copy. Each tensor's shape is held to the config before anything runs.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.config import memory_limit_bytes
from core.errors import ModelLoadError
from core.model.config import ModelConfig

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # NumPy has no bfloat16: its bits


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A model as loaded: float32 tensors by Hugging Face name. `lm_head.weight` is there only if untied.

    Arrays may be read-only views of a mapped file.
    """

    config: ModelConfig
    tensors: Mapping[str, NDArray[np.float32]]


def load_model_config(path: Path, *, cache_dir: Path | None = None) -> ModelConfig:
    """The config of a .gguf file or of a directory with config.json, without its weights."""
    if path.is_dir():
        return ModelConfig.from_hf(read_json(path / "config.json"))
    from core.model.gguf import read_gguf_config

    return read_gguf_config(path, cache_dir=cache_dir)


def load_model_files(path: Path, *, cache_dir: Path | None = None) -> LoadedWeights:
    """Load a .gguf file, or a directory with config.json and safetensors.

    Args:
        path: file or directory.
        cache_dir: where converted GGUF weights are kept for the next start; None to convert every time.

    Raises:
        ModelLoadError: a file or tensor is missing, damaged, of the wrong shape, or of a kind we do not run.
    """
    if path.is_dir():
        return load_safetensors_dir(path)
    if not path.exists():
        raise ModelLoadError(f"{path} does not exist")
    from core.model.gguf import load_gguf

    return load_gguf(path, cache_dir=cache_dir)


def load_safetensors_dir(path: Path) -> LoadedWeights:
    """Load a directory as Hugging Face lays it out: config.json, and safetensors in one file or in shards."""
    config = load_model_config(path)
    tensors: dict[str, NDArray[np.float32]] = {}
    files = _safetensors_files(path)
    check_fits(sum(_num_converted(file) for file in files), path)
    for file in files:
        tensors.update(read_safetensors(file))
    if config.tie_word_embeddings and _has_its_own_head(tensors):
        logger.warning("%s: lm_head.weight is not the embedding, so it is used, though the config ties the two", path)
        config = replace(config, tie_word_embeddings=False)
    return LoadedWeights(config, check_tensors(config, tensors, path))


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this config has."""
    return dict(_expected_tensors(config))


def _expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The same one by one: a damaged config may speak of billions of layers."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for index in range(config.num_layers):
        yield from ((f"model.layers.{index}.{name}.weight", shape) for name, shape in layer.items())
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def check_tensors(
    config: ModelConfig, tensors: Mapping[str, NDArray[np.float32]], source: Path
) -> dict[str, NDArray[np.float32]]:
    """The model's tensors, each of its right shape. Raises ModelLoadError naming the tensor and both shapes.

    A tensor that the config does not know (a bias, say) would change the numbers, so it is refused as well.
    """
    expected = []
    for name, shape in _expected_tensors(config):
        if name not in tensors:
            raise ModelLoadError(f"{source}: tensor {name} is missing, expected shape {shape}")
        if tensors[name].shape != shape:
            raise ModelLoadError(f"{source}: tensor {name} has shape {tensors[name].shape}, expected {shape}")
        expected.append(name)
    for name in sorted(tensors.keys() - set(expected)):
        if not _is_derived(name):
            raise ModelLoadError(f"{source}: tensor {name} has no place in this model")
    return {name: tensors[name] for name in expected}


def read_safetensors(file: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Name and float32 array of each tensor in one file; float32 ones are views of the mapped file."""
    header, data = _map_safetensors(file)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ModelLoadError(f"{file}: tensor {name} is {entry['dtype']}, supported are {', '.join(_DTYPES)}")
        begin, end = entry["data_offsets"]
        array = data[begin:end].view(dtype).reshape(entry["shape"])
        yield name, _bfloat16_to_float32(array) if entry["dtype"] == "BF16" else array.astype(np.float32, copy=False)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelLoadError naming the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} holds a {type(value).__name__}, expected an object")
    return value


def check_fits(num_converted: int, source: Path) -> None:
    """So many numbers become float32, all at once. Raises ModelLoadError where memory is too small for that."""
    needed, limit = 4 * num_converted, memory_limit_bytes()
    if needed > limit:
        raise ModelLoadError(
            f"{source}: to load its weights takes {needed:,} bytes of memory, this machine's limit is {limit:,}"
        )


def _num_converted(file: Path) -> int:
    """Numbers in a file that are not mapped as they are."""
    header, _ = _map_safetensors(file)
    return sum(math.prod(entry["shape"]) for entry in header.values() if entry.get("dtype", "F32") != "F32")


def _has_its_own_head(tensors: Mapping[str, NDArray[np.float32]]) -> bool:
    head, embedding = tensors.get("lm_head.weight"), tensors.get("model.embed_tokens.weight")
    return head is not None and embedding is not None and not np.array_equal(head, embedding)


def _safetensors_files(path: Path) -> list[Path]:
    if (path / SINGLE_FILE).exists():
        return [path / SINGLE_FILE]
    if (path / INDEX_FILE).exists():
        places = read_json(path / INDEX_FILE).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
            raise ModelLoadError(f"{path / INDEX_FILE} has no weight_map from tensors to files")
        return [path / shard for shard in sorted(set(places.values()))]
    raise ModelLoadError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def read_safetensors_metadata(file: Path) -> dict[str, str]:
    """The free-form strings in a file's header."""
    header, _ = _map_safetensors(file)
    metadata: dict[str, str] = header.get("__metadata__", {})
    return metadata


def _map_safetensors(file: Path) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """Header and mapped data. The library checks the header; it has no bfloat16 for NumPy and copies, so we map."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            pass
        mapped = np.asarray(np.memmap(file, dtype=np.uint8, mode="r"))
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    header_end = 8 + int.from_bytes(bytes(mapped[:8]), "little")
    return json.loads(bytes(mapped[8:header_end])), mapped[header_end:]


def _bfloat16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _is_derived(name: str) -> bool:
    """Old checkpoints also hold what follows from the config; a tied model may repeat its embedding."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"
