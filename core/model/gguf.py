"""GGUF files: llama.cpp's one-file format, made to look like Hugging Face's.

Three things differ. Names. Quantization, undone by the package `gguf`. And the row order of q_proj and k_proj:
llama.cpp's converter interleaves the two halves of each rotary pair, so rows are put back here; forgetting it gives
a model that loads and babbles.

Reading the metadata of a real vocabulary and dequantizing take seconds, so the result may be kept as a float32
safetensors file that the next start maps. It is named after the source's path, size and modification time, written
beside and renamed, and rebuilt whenever it cannot be read.
"""

import dataclasses
import glob
import hashlib
import json
import logging
import os
import re
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from core.errors import ModelLoadError
from core.model.config import ModelConfig, RopeScaling
from core.model.weights import (
    LoadedWeights,
    check_fits,
    check_tensors,
    read_safetensors,
    read_safetensors_metadata,
)

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

logger = logging.getLogger(__name__)

CACHE_FORMAT = 2  # raise it when what is written changes meaning
_ROPE_FACTORS = "rope_freqs.weight"
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_gguf(path: Path, *, cache_dir: Path | None = None) -> LoadedWeights:
    """Load a GGUF file of architecture llama; see `core.model.weights.load_model_files`."""
    if cache_dir is None:
        return _convert(path)
    kept = cache_file(path, cache_dir, "safetensors")
    if kept.exists():
        try:
            return _read_kept(kept)
        except ModelLoadError as error:
            logger.warning("converted weights are damaged and made anew: %s", error)
    weights = _convert(path)
    _keep(weights, kept)
    return weights


def read_gguf_config(path: Path, *, cache_dir: Path | None = None) -> ModelConfig:
    """The config that a GGUF file's metadata describes, from the kept weights' header if there are any."""
    if cache_dir is not None and path.exists() and (kept := cache_file(path, cache_dir, "safetensors")).exists():
        try:
            return _read_kept_config(kept)
        except ModelLoadError as error:
            logger.warning("converted weights are damaged: %s", error)
    return _config(open_gguf(path), path)


def open_gguf(path: Path) -> "GGUFReader":
    """A reader over the mapped file. Raises ModelLoadError if it is no whole GGUF file, or of the other byte order."""
    from core.model.gguf_reader import BoundedReader

    try:
        reader = BoundedReader(path)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, OverflowError, RecursionError, struct.error) as error:  # what damage leads to
        raise ModelLoadError(f"{path} is no whole GGUF file: {error}") from error
    if reader.byte_order != "I":  # the package swaps metadata, and dequantizes tensors as they lie
        raise ModelLoadError(f"{path} is of another byte order than this machine: convert it with gguf-convert-endian")
    return reader


def gguf_fields(reader: "GGUFReader") -> dict[str, Any]:
    """All metadata as plain Python values. Raises ModelLoadError for text that is no UTF-8."""
    fields = {}
    for name, field in reader.fields.items():
        try:
            fields[name] = field.contents()
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"metadata {name} is not UTF-8: {error}") from error
    return fields


def cache_file(source: Path, cache_dir: Path, kind: str) -> Path:
    """Where what was converted from `source` is kept: another path, size or modification time, another file."""
    stat = source.stat()
    place = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:8]
    state = hashlib.sha256(f"{CACHE_FORMAT} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:8]
    return cache_dir / f"{source.stem[:100]}-{place}-{state}.{kind}"


def write_cache(file: Path, write: Callable[[Path], object]) -> None:
    """Put a file into the cache whole or not at all, and drop what older states of its source left.

    Args:
        file: from `cache_file`.
        write: called with the path to write to. A full or read-only disk is logged, not raised: it costs time only.
    """
    temporary: Path | None = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}-")
        os.close(handle)
        temporary = Path(name)
        write(temporary)
        temporary.replace(file)
        for old in file.parent.glob(f"{glob.escape(file.stem.rpartition('-')[0])}-*{file.suffix}"):
            if old != file:
                old.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("converted model is not kept in %s: %s", file.parent, error)
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _convert(path: Path) -> LoadedWeights:
    reader = open_gguf(path)
    config = _config(reader, path)
    check_fits(sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.tensor_type.name != "F32"), path)
    tensors = {}
    for tensor in reader.tensors:
        if tensor.name != _ROPE_FACTORS:
            tensors[_hf_name(tensor.name)] = _dequantize(tensor, path)
    checked = check_tensors(config, tensors, path)
    for name in checked:
        if name.endswith("q_proj.weight"):
            checked[name] = unpermute(checked[name], config.num_heads)
        elif name.endswith("k_proj.weight"):
            checked[name] = unpermute(checked[name], config.num_kv_heads)
    return LoadedWeights(config, checked)


def unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of each head from llama.cpp's order (0, half, 1, half + 1, ...) back to (0, 1, ..., half, half + 1, ...)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _config(reader: "GGUFReader", path: Path) -> ModelConfig:
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors: tuple[float, ...] = ()
    if _ROPE_FACTORS in tensors:
        factors = tuple(float(f) for f in _dequantize(tensors[_ROPE_FACTORS], path).ravel())
    try:
        fields = gguf_fields(reader)
        if (parts := fields.get("split.count", 1)) not in (0, 1):
            raise ModelLoadError(f"it is one of {parts} parts: merge them with llama-gguf-split")
        return ModelConfig.from_gguf(fields, is_tied="output.weight" not in tensors, rope_factors=factors)
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def _dequantize(tensor: "ReaderTensor", path: Path) -> NDArray[np.float32]:
    from gguf.quants import dequantize

    try:
        values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ModelLoadError(f"{path}: tensor {tensor.name} is {kind}, which the package gguf cannot read") from error
    except ValueError as error:  # of a tensor without numbers
        raise ModelLoadError(f"{path}: tensor {tensor.name} cannot be read: {error}") from error
    return np.asarray(values, dtype=np.float32)  # a plain array, also where the file's own is only mapped


def _hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; a name unknown to us stays, and is refused by the shape check."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"
    return _TOP_NAMES.get(name, name)


def _read_kept(file: Path) -> LoadedWeights:
    config = _read_kept_config(file)
    return LoadedWeights(config, check_tensors(config, dict(read_safetensors(file)), file))


def _read_kept_config(file: Path) -> ModelConfig:
    metadata = read_safetensors_metadata(file)
    try:
        fields = json.loads(metadata["config"])
        scaling = fields.pop("rope_scaling")
        if scaling is not None:
            scaling = RopeScaling(**scaling | {"factors": tuple(scaling["factors"])})
        return ModelConfig(**fields, rope_scaling=scaling)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{file} is not of our making: {error}") from error


def _keep(weights: LoadedWeights, file: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    config = json.dumps(dataclasses.asdict(weights.config))
    tensors: dict[str, Any] = {name: np.ascontiguousarray(value) for name, value in weights.tensors.items()}

    def write(temporary: Path) -> None:
        try:
            save_file(tensors, temporary, metadata={"config": config})
        except SafetensorError as error:  # which a full disk is, too
            raise OSError(str(error)) from error

    write_cache(file, write)
