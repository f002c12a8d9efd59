"""Tiny random Llama models as twins: a Hugging Face directory and a GGUF file that hold the same weights.

    python -m tools.make_tiny_gguf OUT_DIR

makes OUT_DIR/hf and OUT_DIR/model.gguf, as Hugging Face and llama.cpp's converter would write them. Tests import
`TinyModel`, `write_safetensors_dir` and `write_gguf`. What is written follows the formats' own documents and
llama.cpp's converter, not our loader: this is the other side of the test.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Quant
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS, USER_DEFINED = "<|bos|>", "<|eos|>", "<|tool|>"
TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on. Grüße, 你好 世界! 😀 "
    "def add(a, b):\n    return a + b\n\nOnce upon a time there was a town by the sea; 1234567890 people lived there."
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """Sizes and traits of a tiny Llama; its weights and vocabulary follow from them and the seed.

    `rope_scaling` is Hugging Face's. `output_is_rotated` makes an untied output matrix whose rows are the
    embedding's, moved by one. Hidden sizes are multiples of 32, so that every tensor can be quantized.
    """

    seed: int = 0
    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 512
    is_tied: bool = True
    output_is_rotated: bool = False
    adds_bos: bool = True
    vocab_size: int = 384
    tokenizer: Tokenizer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokenizer", byte_level_bpe(self.vocab_size))

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Random float32 tensors by Hugging Face's names, large enough that greedy choices are clear."""
        rng = np.random.default_rng(self.seed)
        hidden, inner, queries = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim
        keys, vocab_size = self.num_kv_heads * self.head_dim, self.tokenizer.get_vocab_size()

        def matrix(rows: int, columns: int) -> NDArray[np.float32]:
            return (rng.standard_normal((rows, columns)) / np.sqrt(columns) * 1.5).astype(np.float32)

        def gain() -> NDArray[np.float32]:
            return (1 + 0.1 * rng.standard_normal(hidden)).astype(np.float32)

        tensors = {"model.embed_tokens.weight": matrix(vocab_size, hidden), "model.norm.weight": gain()}
        for i in range(self.num_layers):
            layer = {
                "input_layernorm": gain(),
                "self_attn.q_proj": matrix(queries, hidden),
                "self_attn.k_proj": matrix(keys, hidden),
                "self_attn.v_proj": matrix(keys, hidden),
                "self_attn.o_proj": matrix(hidden, queries),
                "post_attention_layernorm": gain(),
                "mlp.gate_proj": matrix(inner, hidden),
                "mlp.up_proj": matrix(inner, hidden),
                "mlp.down_proj": matrix(hidden, inner),
            }
            tensors |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
        if self.output_is_rotated:
            tensors["lm_head.weight"] = np.roll(tensors["model.embed_tokens.weight"], 1, axis=0)
        elif not self.is_tied:
            tensors["lm_head.weight"] = matrix(vocab_size, hidden)
        return tensors

    def hf_config(self) -> dict[str, Any]:
        """Its config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.tokenizer.get_vocab_size(),
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.is_tied and not self.output_is_rotated,
            "bos_token_id": self.tokenizer.token_to_id(BOS),
            "eos_token_id": self.tokenizer.token_to_id(EOS),
        }


def byte_level_bpe(vocab_size: int) -> Tokenizer:
    """A byte-level BPE trained on a few lines, split as SmolLM's is, with BOS, EOS and a user-defined token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        special_tokens=[AddedToken(BOS, special=True), AddedToken(EOS, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_tokens([AddedToken(USER_DEFINED, special=False, normalized=False)])
    return tokenizer


def write_safetensors_dir(model: TinyModel, path: Path, *, dtype: type = np.float32, num_shards: int = 1) -> Path:
    """The model as a Hugging Face directory, in one file or in shards with an index. Returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.astype(dtype) for name, value in model.weights().items()}
    (path / "config.json").write_text(json.dumps(model.hf_config(), indent=1))
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors")
    else:
        _write_shards(tensors, path, num_shards)
    model.tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "add_bos_token": model.adds_bos,
                "bos_token": BOS,
                "eos_token": {"content": EOS, "special": True},
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    return path


def _write_shards(tensors: Mapping[str, NDArray[Any]], path: Path, num_shards: int) -> None:
    names = sorted(tensors)
    weight_map = {}
    for n in range(num_shards):
        file = f"model-{n + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[n::num_shards]}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_gguf(
    model: TinyModel,
    path: Path,
    *,
    quant: Quant = Quant.F32,
    metadata: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
    extra_tensors: Mapping[str, NDArray[np.float32]] | None = None,
    byte_order: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """The model as llama.cpp's converter would write it. Returns `path`.

    Args:
        quant: type of the matrices; norms stay float32, as everywhere.
        metadata: more keys, or other values of those written: bool, int, float or str.
        without: metadata keys and GGUF tensor names to leave out.
        extra_tensors: by GGUF name; they replace those of the model.
        byte_order: of everything in the file.
    """
    writer = gguf.GGUFWriter(path, "llama", endianess=byte_order)
    for key, value in (_metadata(model) | dict(metadata or {})).items():
        if key not in without:
            _add(writer, key, value)
    for name, tensor in (_gguf_tensors(model) | dict(extra_tensors or {})).items():
        if name in without:
            continue
        if tensor.ndim == 1 or quant == Quant.F32:
            writer.add_tensor(name, tensor)
        elif quant == Quant.F16:
            writer.add_tensor(name, tensor.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """llama.cpp's row order for q and k: the two halves of each head interleaved."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def llama3_factors(model: TinyModel) -> NDArray[np.float32]:
    """The tensor rope_freqs.weight, by which llama.cpp keeps llama3 scaling: what each frequency is divided by."""
    scaling = model.rope_scaling or {}
    original = scaling["original_max_position_embeddings"]
    low_wavelength, high_wavelength = original / scaling["low_freq_factor"], original / scaling["high_freq_factor"]
    factors = []
    for i in range(0, model.head_dim, 2):
        wavelength = 2 * np.pi * model.rope_theta ** (i / model.head_dim)
        if wavelength < high_wavelength:
            factors.append(1.0)
        elif wavelength > low_wavelength:
            factors.append(scaling["factor"])
        else:
            smooth = (original / wavelength - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def _gguf_tensors(model: TinyModel) -> dict[str, NDArray[np.float32]]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.num_layers)
    tensors = {}
    for name, value in model.weights().items():
        if name.endswith("q_proj.weight"):
            value = permute(value, model.num_heads)
        elif name.endswith("k_proj.weight"):
            value = permute(value, model.num_kv_heads)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None, name
        tensors[gguf_name] = value
    if model.rope_scaling and _rope_type(model) == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(model)
    return tensors


def _rope_type(model: TinyModel) -> str | None:
    scaling = model.rope_scaling or {}
    return scaling.get("rope_type", scaling.get("type"))


def _metadata(model: TinyModel) -> dict[str, Any]:
    tokenizer = model.tokenizer
    tokens = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
    kinds = {BOS: gguf.TokenType.CONTROL, EOS: gguf.TokenType.CONTROL, USER_DEFINED: gguf.TokenType.USER_DEFINED}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    metadata: dict[str, Any] = {
        "llama.vocab_size": len(tokens),
        "llama.context_length": model.max_position_embeddings,
        "llama.embedding_length": model.hidden_size,
        "llama.block_count": model.num_layers,
        "llama.feed_forward_length": model.intermediate_size,
        "llama.attention.head_count": model.num_heads,
        "llama.attention.head_count_kv": model.num_kv_heads,
        "llama.attention.key_length": model.head_dim,
        "llama.attention.value_length": model.head_dim,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": model.rope_theta,
        "llama.rope.dimension_count": model.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kinds.get(t, gguf.TokenType.NORMAL)) for t in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.bos_token_id": tokenizer.token_to_id(BOS),
        "tokenizer.ggml.eos_token_id": tokenizer.token_to_id(EOS),
        "tokenizer.ggml.add_bos_token": model.adds_bos,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    if model.rope_scaling and _rope_type(model) == "linear":
        metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": model.rope_scaling["factor"]}
    return metadata


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def main() -> None:
    """Write one pair of twins."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument(
        "--quant", default="F32", choices=["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"]
    )
    parser.add_argument("--untied", action="store_true")
    arguments = parser.parse_args()
    model = TinyModel(is_tied=not arguments.untied)
    print(write_safetensors_dir(model, arguments.out_dir / "hf"))
    print(write_gguf(model, arguments.out_dir / "model.gguf", quant=Quant[arguments.quant]))


if __name__ == "__main__":
    main()
