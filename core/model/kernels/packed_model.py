"""A transformer over packed weights, with the interface of `core.model.transformer.Transformer`.

Weights are packed once; a pass lays the batch out as arrays and makes one compiled call, on all threads of a team.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from core.errors import NumericalFault
from core.model.config import ModelConfig, rope_frequencies
from core.model.kernels.attention import CHUNK, QUERY_TILE
from core.model.kernels.packed_cache import PackedKVCache
from core.model.kernels.packing import (
    PANEL,
    VALUES_A_WORD,
    WORD_DTYPES,
    aligned,
    allocate,
    bfloat16_bits,
    group_size,
    pack_into,
)
from core.model.kernels.products import ROW_BLOCK
from core.model.kernels.simd import LANES
from core.model.kernels.step import (
    OTHER_PHASES,
    PHASES_A_LAYER,
    Batch,
    Scratch,
    Sizes,
    Weights,
    hidden_states,
    logits,
)
from core.model.kernels.team import Team
from core.model.transformer import FlatBatch

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class PackedTransformer:
    """Forward passes over packed weights. Interface of `Transformer`.

    Args:
        config: its sizes; widths are multiples of 32 (see `core.model.numerics`).
        tensors: by Hugging Face's names, (out, in).
        max_positions: positions it will be asked for.
        dtype: of the weights and of the products' left operands.
        num_threads: threads that work on a pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, NDArray[np.floating]],
        max_positions: int | None = None,
        *,
        dtype: str = "float32",
        num_threads: int = 1,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._group = group_size(config.hidden_size, config.head_dim, config.intermediate_size)
        self._weights = _pack_weights(config, tensors, dtype, self._group)
        positions = np.arange(max_positions or config.max_position_embeddings)
        angles = np.outer(positions, rope_frequencies(config))
        self._cos, self._sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self._scratch: Scratch | None = None
        self._team = Team(num_threads, PHASES_A_LAYER * config.num_layers + OTHER_PHASES)

    def forward(self, batch: FlatBatch, cache: PackedKVCache, logits_rows: Ints) -> Floats:
        """Compute the batch, leave its keys and values in `cache`, and return (R, V) logits of R rows."""
        return self.logits(self.hidden_states(batch, cache, logits_rows))

    def hidden_states(self, batch: FlatBatch, cache: PackedKVCache, rows: Ints) -> Floats:
        """The same, up to the last norm: (R, D) float32.

        Raises:
            NumericalFault: a key or value is not finite.
        """
        scratch = self._room(max(len(batch.token_ids_T), len(rows)), cache)
        scratch.fault[0] = 0
        sizes = self._sizes(cache.block_size)
        self._team.run(hidden_states, sizes, self._weights, _arrays(batch, rows), cache.arrays, scratch)
        if scratch.fault[0]:
            raise NumericalFault(f"keys or values of layer {scratch.fault[0] - 1} are not finite")
        return scratch.final[: len(rows)].copy()

    def logits(self, hidden_RD: Floats) -> Floats:
        """(R, V) float32 logits of so many rows of hidden states."""
        hidden_RD = np.ascontiguousarray(hidden_RD, np.float32)
        num_rows, width = hidden_RD.shape
        # A row that is a whole number of pages would keep all rows in the same corner of the cache.
        out = np.empty((num_rows, self._weights.head.words.shape[1] * PANEL + LANES), np.float32)
        words = aligned((num_rows, width // VALUES_A_WORD[self.dtype]), WORD_DTYPES[self.dtype])
        scales = np.empty((num_rows, width // self._group), np.float32)
        if num_rows:
            self._team.run(logits, self._weights, self._group, hidden_RD, words, scales, out)
        return out[:, : self.config.vocab_size]

    def stamps(self, column: int) -> Ints:
        """When each phase of the last pass ended, in ticks of the machine's own: for benchmarks."""
        return self._team.sync[:, column].copy()

    def _sizes(self, block_size: int) -> Sizes:
        c = self.config
        return Sizes(
            c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, block_size, self._group,
            self._team.num_ranks, np.float32(c.rms_norm_eps), self._cos, self._sin,
        )  # fmt: skip

    def _room(self, num_rows: int, cache: PackedKVCache) -> Scratch:
        """Scratch for a pass of so many rows; kept, and made anew to grow or for a cache of another dtype."""
        old, dtype = self._scratch, WORD_DTYPES[cache.dtype]
        if old is None or len(old.stream) < num_rows or old.query.dtype != dtype:
            self._scratch = old = self._make_scratch(num_rows, cache)
        return old

    def _make_scratch(self, rows: int, cache: PackedKVCache) -> Scratch:
        c, dtype = self.config, self.dtype
        attention_width = c.num_heads * c.head_dim

        def words(num_rows: int, width: int, of: str):
            return aligned((num_rows, width // VALUES_A_WORD[of]), WORD_DTYPES[of])

        def floats(num_rows: int, width: int) -> Floats:
            return aligned((num_rows, width), np.float32)

        def scales(width: int) -> Floats:
            return floats(rows, width // self._group if dtype == "int8" else 1)

        w = self._weights
        own = self._team.num_ranks * QUERY_TILE * (c.num_heads // c.num_kv_heads)
        return Scratch(
            stream=floats(rows, c.hidden_size),
            normed=words(rows, c.hidden_size, dtype),
            normed_scales=scales(c.hidden_size),
            qkv=floats(rows, w.qkv.words.shape[1] * PANEL),
            query=words(rows, attention_width, cache.dtype),
            attended=words(rows, attention_width, dtype),
            attended_scales=scales(attention_width),
            gate_up=floats(self._team.num_ranks * ROW_BLOCK, 4 * PANEL + LANES),
            hidden=words(rows, c.intermediate_size, dtype),
            hidden_scales=scales(c.intermediate_size),
            final=floats(rows, c.hidden_size),
            fault=np.zeros(1, np.int64),
            row=floats(self._team.num_ranks, c.hidden_size),
            head=floats(self._team.num_ranks, c.head_dim),
            activated=floats(self._team.num_ranks, 2 * PANEL),
            queries=words(own, c.head_dim, cache.dtype),
            scores=floats(own, CHUNK),
            weights=words(own, CHUNK, cache.dtype),
            output=floats(own, c.head_dim),
            top=np.zeros(own, np.float32),
            total=np.zeros(own, np.float32),
        )


def _pack_weights(config: ModelConfig, tensors: Mapping[str, NDArray[np.floating]], dtype: str, group: int) -> Weights:
    layers, hidden, width = config.num_layers, config.hidden_size, config.intermediate_size
    attention_width = config.num_heads * config.head_dim
    qkv = allocate(dtype, (layers,), hidden, attention_width + 2 * config.num_kv_heads * config.head_dim, group)
    output = allocate(dtype, (layers,), attention_width, hidden, group)
    gate_up = allocate(dtype, (layers,), hidden, 2 * width, group)
    down = allocate(dtype, (layers,), width, hidden, group)
    embedding_VD = tensors["model.embed_tokens.weight"]
    head = allocate(dtype, (1,), hidden, config.vocab_size, group)
    norms = []
    for i in range(layers):

        def tensor(name: str, i: int = i) -> NDArray[np.floating]:
            return tensors[f"model.layers.{i}.{name}.weight"]

        norms += [tensor("input_layernorm"), tensor("post_attention_layernorm")]
        attention = np.concatenate([tensor(f"self_attn.{name}_proj") for name in "qkv"])
        both = np.stack([tensor("mlp.gate_proj"), tensor("mlp.up_proj")])
        interleaved = both.reshape(2, width // PANEL, PANEL, hidden).transpose(1, 0, 2, 3).reshape(2 * width, hidden)
        for room, weight in (
            (qkv, attention),
            (output, tensor("self_attn.o_proj")),
            (gate_up, interleaved),
            (down, tensor("mlp.down_proj")),
        ):
            pack_into(type(room)(*(array[i] for array in room)), dtype, weight, group)
    pack_into(type(head)(*(array[0] for array in head)), dtype, tensors.get("lm_head.weight", embedding_VD), group)
    embedding = np.ascontiguousarray(embedding_VD, np.float32) if dtype == "float32" else bfloat16_bits(embedding_VD)
    norms_ND = np.stack([*norms, tensors["model.norm.weight"]]).astype(np.float32)
    return Weights(embedding, norms_ND, qkv, output, gate_up, down, head)


def _arrays(batch: FlatBatch, wanted: Ints) -> Batch:
    """Block tables and query tiles of the batch as arrays, tiles with the longest context first."""
    tables = np.zeros((len(batch.spans), max(len(span.block_ids) for span in batch.spans)), np.int64)
    tiles = []
    for index, span in enumerate(batch.spans):
        tables[index, : len(span.block_ids)] = span.block_ids
        for start in range(0, span.num_tokens, QUERY_TILE):
            num = min(QUERY_TILE, span.num_tokens - start)
            tiles.append((index, span.row + start, num, span.position + start))
    tiles.sort(key=lambda tile: -tile[3])
    return Batch(
        batch.token_ids_T,
        batch.positions_T,
        batch.slots_T,
        tables,
        np.array(tiles, np.int64),
        np.asarray(wanted, np.int64),
    )
