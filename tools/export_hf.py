"""A model that Octavo serves as a Hugging Face folder, so that other engines can serve the same weights.

    python -m tools.export_hf octavo-tiny build/tiny             # the embedded pair: also octavo-tiny-draft
    python -m tools.export_hf octavo-tiny-draft build/tiny-draft
    python -m tools.export_hf smollm2 build/smollm2              # a pulled model, a .gguf file, a directory
    python -m tools.export_hf smollm2 build/smollm2.bf16.gguf    # or one GGUF file, for llama.cpp (from .gguf only)

The weights are the dequantised ones that we compute with, rounded to `--dtype`. A vocabulary of bytes becomes a
byte-level BPE without merges, whose ids are ours. Tensors are converted and written one after the other.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.model import tiny
from core.model.config import ModelConfig
from core.model.weights import load_model_files
from core.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from core.tokenizer_files import VocabularyTokenizer, byte_alphabet

EMBEDDED = {"octavo-tiny": tiny.TARGET_DIR, "octavo-tiny-draft": tiny.DRAFT_DIR}
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # as safetensors calls them
GGUF_TYPES = {**DTYPES, "q8_0": "Q8_0"}
GGUF_FILE_TYPES = {"bfloat16": "MOSTLY_BF16", "float16": "MOSTLY_F16", "float32": "ALL_F32", "q8_0": "MOSTLY_Q8_0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="octavo-tiny, octavo-tiny-draft, smollm2, a .gguf file or a directory")
    parser.add_argument("output", type=Path, help="a folder, or a file that ends in .gguf")
    parser.add_argument("--dtype", choices=[*DTYPES, "q8_0"], default="bfloat16", help="q8_0 for .gguf only")
    options = parser.parse_args()
    source = EMBEDDED.get(options.model) or _path_of(options.model)
    if options.output.suffix == ".gguf":
        export_gguf(source, options.output, options.dtype)
    else:
        export(source, options.output, options.dtype)


def _path_of(model: str) -> Path:
    from app.hub import resolve_model
    from app.settings import Settings

    return Path(resolve_model(model, cache_dir=Settings().cache_dir))


def export(source: Path, directory: Path, dtype: str = "bfloat16") -> None:
    """Write config.json, model.safetensors, tokenizer.json and what goes with it."""
    weights = load_model_files(source)
    tokenizer = ByteTokenizer(tiny.chat_template()) if source in EMBEDDED.values() else load_tokenizer(source)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", hf_config(weights.config, tokenizer, dtype))
    _write_json(directory / "generation_config.json", {"eos_token_id": sorted(tokenizer.eos_token_ids)})
    (directory / "tokenizer.json").write_text(tokenizer_json(tokenizer), encoding="utf-8")
    _write_json(directory / "tokenizer_config.json", tokenizer_config(tokenizer))
    write_safetensors(directory / "model.safetensors", weights.tensors, dtype)


def write_safetensors(file: Path, tensors: Mapping[str, NDArray[np.float32]], dtype: str) -> None:
    """The format by hand, since the package has no bfloat16 for NumPy: length of the header, header, data."""
    width = 4 if dtype == "float32" else 2
    ends = list(accumulate((width * array.size for array in tensors.values()), initial=0))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for (name, array), place in zip(tensors.items(), pairwise(ends), strict=True):
        header[name] = {"dtype": DTYPES[dtype], "shape": list(array.shape), "data_offsets": list(place)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    with file.open("wb") as output:
        output.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            output.write(as_bytes(array, dtype))


def hf_config(config: ModelConfig, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    """What Hugging Face calls a model's sizes. Raises ValueError for rotary factors that only GGUF can say."""
    scaling = config.rope_scaling
    if scaling is not None and scaling.rope_type == "factors":
        raise ValueError("rope_freqs.weight of a GGUF file has no equal in config.json")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": scaling.rope_type,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        },
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": min(tokenizer.eos_token_ids, default=None),
        "torch_dtype": dtype,
    }


def tokenizer_json(tokenizer: Tokenizer) -> str:
    """The package's form of a tokenizer of ours."""
    if isinstance(tokenizer, VocabularyTokenizer):
        return tokenizer.to_json()
    return str(_bytes_as_bpe(tokenizer).to_str())


def _bytes_as_bpe(tokenizer: Tokenizer) -> Any:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as HfTokenizer

    vocabulary = dict(sorted(byte_alphabet().items(), key=lambda item: item[1]))
    bpe = HfTokenizer(models.BPE(vocabulary, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    # Behind the bytes in order of their ids, so that each gets its own.
    ends = [tokenizer.token_text(token_id) for token_id in range(len(vocabulary), tokenizer.vocab_size)]
    bpe.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ends])
    return bpe


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.adds_bos,
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_token_texts,
    }
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    return config


def as_bytes(array: NDArray[np.float32], dtype: str) -> bytes:
    """Little-endian values in `dtype`, rounded to nearest, ties to even."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(array, dtype={"float16": "<f2", "float32": "<f4"}[dtype]).tobytes()
    return bfloat16_bits(array).tobytes()


def bfloat16_bits(array: NDArray[np.float32]) -> NDArray[np.uint16]:
    """A bfloat16 is a float32's upper half: add just under half of what goes, and one more if that makes it even."""
    bits = np.ascontiguousarray(array, dtype="<f4").view("<u4")
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded


def export_gguf(source: Path, output: Path, dtype: str) -> None:
    """Write a GGUF file with matrices in `dtype`, metadata, names and row order of the file it came from."""
    import gguf

    if source.suffix != ".gguf":
        raise ValueError(f"{source} is no .gguf file")
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(output, arch="llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            kind, sub_kind = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), kind, sub_kind)
    writer.add_file_type(gguf.LlamaFileType[GGUF_FILE_TYPES[dtype]])
    for name, array in _matrices(reader):
        quant = gguf.GGMLQuantizationType[GGUF_TYPES[dtype] if array.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quantize(array, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _matrices(reader: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    from gguf import dequantize

    for tensor in reader.tensors:
        yield tensor.name, dequantize(tensor.data, tensor.tensor_type)


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
