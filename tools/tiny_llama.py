"""The two models of `octavo-tiny` in torch, and their files in Hugging Face's layout.

Written out here rather than taken from a library, since it is short, and since what is trained must be exactly what
`core.model.transformer` computes: rotate-half rotary embedding, grouped queries, SwiGLU, tied embeddings.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_text import END
from torch import nn
from torch.nn import functional

VOCABULARY = END + 1


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one model; every projection's width is a multiple of 16, as batch-invariant products ask."""

    num_layers: int
    hidden: int = 192
    feed_forward: int = 448
    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 32
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_positions: int = 8192

    def to_config(self) -> dict[str, object]:
        """The config.json of a Hugging Face Llama."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": END,
            "torch_dtype": "float16",
        }


TARGET = Shape(num_layers=8)
DRAFT = Shape(num_layers=1, feed_forward=1024)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the rotate_half convention: component i turns with component i + E/2."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention; parameter names are Hugging Face's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            p(x).view(rows, length, -1, self.shape.head_size).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        group = self.shape.num_heads // self.shape.num_kv_heads
        k = rotate(k, cos, sin).repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
        mixed = functional.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Token ids (rows, length), positions (length,) to logits (rows, length, 257), tied."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        exponents = torch.arange(0, shape.head_size, 2, dtype=torch.float64) / shape.head_size
        angles = torch.outer(torch.arange(shape.max_positions).double(), shape.rope_theta**-exponents)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        self._initialise(shape)

    def _initialise(self, shape: Shape) -> None:
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # Branch outputs start small, so that the residual stream does not grow with depth.
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 1 / math.sqrt(2 * shape.num_layers) if is_output else 1.0
                is_embedding = name.startswith("embed")
                nn.init.normal_(weight, std=0.05 if is_embedding else scale / math.sqrt(weight.shape[1]))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self.cos[positions], self.sin[positions]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.norm(x), self.embed_tokens.weight)


def save_model(state: dict[str, torch.Tensor], shape: Shape, directory: Path) -> None:
    """Write config.json and float16 safetensors under Hugging Face's names."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": value.to(torch.float16).contiguous() for name, value in state.items()}
    file = directory / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors leaves it to the owner alone; an installed server runs as somebody else
    (directory / "config.json").write_text(json.dumps(shape.to_config(), indent=2) + "\n")


def load_model(shape: Shape, directory: Path) -> Llama:
    model = Llama(shape)
    tensors = load_file(directory / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): value.float() for name, value in tensors.items()})
    return model.eval()
