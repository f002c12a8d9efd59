"""The fast provider: a transformer and a KV cache with the interfaces of `core.model.transformer` and `core.model.kv_cache`.

Weights are packed once; a pass lays the batch out as arrays and makes one compiled call, on as many threads as there are
ranks. The only thread that core starts lives here: it runs the same call and holds no state.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core.errors import NumericalFault
from core.model.config import ModelConfig, rope_frequencies
from core.model.kernels.attention import CHUNK, QUERY_TILE
from core.model.kernels.claims import counters
from core.model.kernels.packing import (
    PANEL,
    VALUES_A_WORD,
    WORD_DTYPES,
    Dtype,
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
    CacheArrays,
    Scratch,
    Sizes,
    Weights,
    run,
)
from core.model.transformer import FlatBatch

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
KVDtype = Dtype


class PackedKVCache:
    """Keys and values of every slot, as `attention` reads them. Interface of `KVCache`."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: Dtype,
        *,
        num_tier_slots: int = 0,
        tier_file: Path | None = None,
    ) -> None:
        per, word = VALUES_A_WORD[dtype], WORD_DTYPES[dtype]
        lead = (config.num_layers, num_blocks, config.num_kv_heads)
        self.block_size = block_size
        self.dtype = dtype
        keys = aligned((*lead, block_size // LANES, config.head_dim // per, LANES), word)
        values = aligned((*lead, block_size // per, config.head_dim), word)
        slots = values if per == 1 else values.view(np.uint16).reshape(*values.shape, 2)
        self.arrays = CacheArrays(keys, values, slots)
        block_words = keys[0, 0].size * config.num_layers
        tier_shape = (num_tier_slots, 2, config.num_layers, block_words // config.num_layers)
        if tier_file is None or num_tier_slots == 0:
            self._tier = np.zeros(tier_shape, word)
        else:
            self._tier = np.memmap(tier_file, word, "w+", shape=tier_shape)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in order."""
        for source, destination in copies:
            for array in (self.arrays.keys, self.arrays.values):
                array[:, destination] = array[:, source]

    def store(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to the second tier, (block, tier slot)."""
        for block, slot in pairs:
            for half, array in enumerate((self.arrays.keys, self.arrays.values)):
                self._tier[slot, half] = array[:, block].reshape(len(array), -1)

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks back from the second tier, (tier slot, block)."""
        for slot, block in pairs:
            for half, array in enumerate((self.arrays.keys, self.arrays.values)):
                array[:, block] = self._tier[slot, half].reshape(array[:, block].shape)


class PackedTransformer:
    """Forward passes over packed weights. Interface of `Transformer`.

    Args:
        config: its sizes; `supports` says which will do.
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
        dtype: Dtype = "float32",
        num_threads: int = 1,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._num_ranks = num_threads
        self._group = group_size(config.hidden_size, config.head_dim, config.intermediate_size)
        self._weights = _pack_weights(config, tensors, dtype, self._group)
        positions = np.arange(max_positions or config.max_position_embeddings)
        angles = np.outer(positions, rope_frequencies(config))
        self._cos, self._sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self._sync = counters(PHASES_A_LAYER * config.num_layers + OTHER_PHASES)
        self._scratch: Scratch | None = None
        self._helpers = ThreadPoolExecutor(max(1, num_threads - 1), "octavo-kernels")

    def forward(self, batch: FlatBatch, cache: PackedKVCache, logits_rows: Ints) -> Floats:
        """Compute the batch, leave its keys and values in `cache`, and return logits of some rows, (R, V) float32.

        Raises:
            NumericalFault: a key or value is not finite.
        """
        scratch = self._run(batch, cache, logits_rows, True)
        return scratch.logits[: len(logits_rows), : self.config.vocab_size]

    def _run(self, batch: FlatBatch, cache: PackedKVCache, wanted: Ints, with_logits: bool) -> Scratch:
        scratch = self._room(len(batch.token_ids_T), len(wanted) if with_logits else 0, cache)
        scratch.fault[0] = 0
        self._sync[:] = 0
        sizes = self._sizes(cache.block_size)
        args = (self._sync, sizes, self._weights, _arrays(batch, wanted), cache.arrays, scratch, with_logits)
        helpers = [self._helpers.submit(run, rank, *args) for rank in range(1, self._num_ranks)]
        run(0, *args)
        for helper in helpers:
            if not helper.cancel():  # it came too late for anything, and no unit waits for it
                helper.result()
        if scratch.fault[0]:
            raise NumericalFault(f"keys or values of layer {scratch.fault[0] - 1} are not finite")
        return scratch

    def _sizes(self, block_size: int) -> Sizes:
        c = self.config
        return Sizes(
            c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size, block_size, self._group,
            self._num_ranks, np.float32(c.rms_norm_eps), self._cos, self._sin,
        )  # fmt: skip

    def _room(self, num_rows: int, num_logits: int, cache: PackedKVCache) -> Scratch:
        """Scratch for a pass of so many rows; kept, and made anew only to grow."""
        old = self._scratch
        if old is None or len(old.stream) < num_rows or len(old.logits) < num_logits:
            rows = max(num_rows, len(old.stream) if old else 0)
            self._scratch = self._make_scratch(rows, max(num_logits, len(old.logits) if old else 0), cache)
        assert self._scratch is not None
        return self._scratch

    def _make_scratch(self, rows: int, num_logits: int, cache: PackedKVCache) -> Scratch:
        c, dtype = self.config, self.dtype
        attention_width = c.num_heads * c.head_dim

        def words(num_rows: int, width: int, of: Dtype):  # type: ignore[no-untyped-def]
            return aligned((num_rows, width // VALUES_A_WORD[of]), WORD_DTYPES[of])

        def floats(num_rows: int, width: int) -> Floats:
            return aligned((num_rows, width), np.float32)  # type: ignore[return-value]

        def scales(width: int) -> Floats:
            return floats(rows, width // self._group if dtype == "int8" else 1)

        w = self._weights
        own = self._num_ranks * QUERY_TILE * (c.num_heads // c.num_kv_heads)
        return Scratch(
            stream=floats(rows, c.hidden_size),
            normed=words(rows, c.hidden_size, dtype),
            normed_scales=scales(c.hidden_size),
            qkv=floats(rows, w.qkv.words.shape[1] * PANEL),
            query=words(rows, attention_width, cache.dtype),
            attended=words(rows, attention_width, dtype),
            attended_scales=scales(attention_width),
            gate_up=floats(self._num_ranks * ROW_BLOCK, 4 * PANEL + LANES),
            hidden=words(rows, c.intermediate_size, dtype),
            hidden_scales=scales(c.intermediate_size),
            final=floats(rows, c.hidden_size),
            logits=floats(num_logits, w.head.words.shape[1] * PANEL + LANES),  # a stride of whole pages is slow
            fault=np.zeros(1, np.int64),
            no_scales=floats(1, 1),
            row=floats(self._num_ranks, c.hidden_size),
            head=floats(self._num_ranks, c.head_dim),
            activated=floats(self._num_ranks, 2 * PANEL),
            queries=words(own, c.head_dim, cache.dtype),
            scores=floats(own, CHUNK),
            weights=words(own, CHUNK, cache.dtype),
            output=floats(own, c.head_dim),
            top=np.zeros(own, np.float32),
            total=np.zeros(own, np.float32),
        )


def _pack_weights(
    config: ModelConfig, tensors: Mapping[str, NDArray[np.floating]], dtype: Dtype, group: int
) -> Weights:
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
