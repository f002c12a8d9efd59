"""A Llama-architecture transformer over a flat batch: tokens of many requests, one after another.

Norm, rotary attention over the paged cache, norm, SwiGLU; each layer adds to the residual stream. Positions, slots and
spans say which token is whose; nothing here knows a request. Every row's bits are its own (`linear`, `attention`).
Touvron et al. 2023, arXiv:2302.13971; RoPE: Su et al. 2021, arXiv:2104.09864; GQA: Ainslie et al. 2023,
arXiv:2305.13245.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.model.attention import AttentionPlan, Span
from core.model.config import ModelConfig, rope_frequencies
from core.model.kv_cache import KVCache
from core.model.linear import Linear, pad_rows

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """Tokens of one pass. All arrays are (T,) int64; `spans` cut the rows into requests.

    Positions, slots and visibility (in the spans) are kept apart, so that one may change without the others.
    """

    token_ids_T: Ints
    positions_T: Ints
    slots_T: Ints
    spans: tuple[Span, ...]


def flat_batch(runs: Sequence[tuple[Sequence[int], int, Sequence[int]]], block_size: int) -> FlatBatch:
    """Lay runs of tokens end to end.

    Args:
        runs: (token ids, position of the first, block table) of each.
        block_size: token slots in a block.
    """
    spans, row = [], 0
    for token_ids, position, block_ids in runs:
        spans.append(Span(row, len(token_ids), position, block_ids))
        row += len(token_ids)
    token_ids_T = np.fromiter((t for token_ids, _, _ in runs for t in token_ids), np.int64, row)
    positions = [np.arange(span.position, span.position + span.num_tokens) for span in spans]
    slots = [
        np.asarray(span.block_ids, np.int64)[p // block_size] * block_size + p % block_size
        for span, p in zip(spans, positions, strict=True)
    ]
    return FlatBatch(token_ids_T, np.concatenate(positions), np.concatenate(slots), tuple(spans))


class _Layer:
    """Weights of one layer; query, key and value are one product, gate and up another."""

    def __init__(
        self, tensors: Mapping[str, NDArray[np.floating]], index: int, row_tiles: dict[tuple[int, int], int | None]
    ) -> None:
        def tensor(name: str) -> NDArray[np.floating]:
            return tensors[f"model.layers.{index}.{name}.weight"]

        self.attention_norm_D = tensor("input_layernorm").astype(np.float32)
        self.mlp_norm_D = tensor("post_attention_layernorm").astype(np.float32)
        self.qkv = Linear(np.concatenate([tensor(f"self_attn.{name}_proj") for name in "qkv"]), row_tiles)
        self.output = Linear(tensor("self_attn.o_proj"), row_tiles)
        self.gate_up = Linear(np.concatenate([tensor("mlp.gate_proj"), tensor("mlp.up_proj")]), row_tiles)
        self.down = Linear(tensor("mlp.down_proj"), row_tiles)


class Transformer:
    """Forward passes of one model.

    Args:
        config: its sizes.
        tensors: by Hugging Face's names, (out, in), in the rotate-half convention; `lm_head.weight` only if untied.
        max_positions: positions it will be asked for; rotary tables are made for so many.
    """

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, NDArray[np.floating]], max_positions: int | None = None
    ) -> None:
        self.config = config
        row_tiles: dict[tuple[int, int], int | None] = {}
        embedding_VD = tensors["model.embed_tokens.weight"]
        self._embedding_VD = np.ascontiguousarray(embedding_VD, np.float32)
        self._layers = [_Layer(tensors, i, row_tiles) for i in range(config.num_layers)]
        self._norm_D = tensors["model.norm.weight"].astype(np.float32)
        self._head = Linear(tensors.get("lm_head.weight", embedding_VD), row_tiles)
        positions = np.arange(max_positions or config.max_position_embeddings)
        angles = np.outer(positions, rope_frequencies(config))
        self._cos, self._sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def forward(self, batch: FlatBatch, cache: KVCache, logits_rows: Ints) -> Floats:
        """Compute the batch, leave its keys and values in `cache`, and return (R, V) logits of R rows."""
        return self.logits(self.hidden_states(batch, cache, logits_rows))

    def hidden_states(self, batch: FlatBatch, cache: KVCache, rows: Ints) -> Floats:
        """Compute the batch, leave its keys and values in `cache`, and return what the last layer says of some rows.

        Args:
            batch: T tokens; those that earlier positions of the same spans need are in the cache already.
            rows: (R,) rows of the batch that are wanted.

        Returns:
            (R, D) float32, normalised.
        """
        num_rows = len(batch.token_ids_T)
        plan = AttentionPlan(batch.spans, num_rows, cache.block_size)
        positions_T = pad_rows(batch.positions_T)
        rotation = (self._cos[positions_T][:, None], self._sin[positions_T][:, None])
        stream_TD = self._embedding_VD[pad_rows(batch.token_ids_T)]
        for index, layer in enumerate(self._layers):
            normed_TD = self._normalise(stream_TD, layer.attention_norm_D)
            stream_TD += self._attention(index, layer, normed_TD, rotation, batch.slots_T, plan, cache)
            stream_TD += _swiglu(layer, self._normalise(stream_TD, layer.mlp_norm_D), self.config.intermediate_size)
        return self._normalise(stream_TD[rows], self._norm_D)

    def logits(self, hidden_RD: Floats) -> Floats:
        """(R, V) float32 logits of so many rows of hidden states; each row's bits are its own here, too."""
        if len(hidden_RD) == 0:
            return np.empty((0, self.config.vocab_size), np.float32)
        padded_RD = np.asarray(pad_rows(hidden_RD), np.float32)
        return self._head(padded_RD)[: len(hidden_RD), : self.config.vocab_size]

    def _normalise(self, x_TD: NDArray[np.generic], weight_D: Floats) -> Floats:
        """Root-mean-square norm over the last axis."""
        x_TD = np.asarray(x_TD, np.float32)
        mean_square_T1 = np.square(x_TD).mean(axis=-1, keepdims=True)
        return np.asarray(x_TD / np.sqrt(mean_square_T1 + np.float32(self.config.rms_norm_eps)) * weight_D)

    def _attention(
        self,
        index: int,
        layer: _Layer,
        x_TD: Floats,
        rotation: tuple[Floats, Floats],
        slots_T: Ints,
        plan: AttentionPlan,
        cache: KVCache,
    ) -> Floats:
        config = self.config
        k_end = (config.num_heads + config.num_kv_heads) * config.head_dim
        qkv_TX = layer.qkv(x_TD)
        rotated_TXE = _rotate(qkv_TX[:, :k_end].reshape(len(x_TD), -1, config.head_dim), *rotation)
        query_THE, key_TGE = rotated_TXE[:, : config.num_heads], rotated_TXE[:, config.num_heads :]
        value_TGE = qkv_TX[:, k_end : layer.qkv.num_out].reshape(len(x_TD), -1, config.head_dim)
        cache.write(index, slots_T, key_TGE[: len(slots_T)], value_TGE[: len(slots_T)])
        output_THE = plan.attend(query_THE, cache.keys_LBSGE[index], cache.values_LBSGE[index])
        return layer.output(output_THE.reshape(len(x_TD), -1))[:, : config.hidden_size]


def _rotate(x_THE: Floats, cos_T1E: Floats, sin_T1E: Floats) -> Floats:
    """Rotary embedding, halves convention: element i turns with element i + E/2."""
    half = x_THE.shape[-1] // 2
    first, second = x_THE[..., :half], x_THE[..., half:]
    return np.concatenate([first * cos_T1E - second * sin_T1E, second * cos_T1E + first * sin_T1E], axis=-1)


def _swiglu(layer: _Layer, x_TD: Floats, width: int) -> Floats:
    gate_up_TF = layer.gate_up(x_TD)
    gate_TF, up_TF = gate_up_TF[:, :width], gate_up_TF[:, width : 2 * width]
    with np.errstate(
        over="ignore"
    ):  # exp of a large negative gate's opposite is inf, and x / inf is the 0 it should be
        hidden_TF = gate_TF / (1 + np.exp(-gate_TF)) * up_TF
    return layer.down(hidden_TF)[:, : layer.down.num_out]
