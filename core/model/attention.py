"""Grouped-query attention over block tables, with bits that do not depend on who else is in the batch.

Queries are taken in tiles of TILE positions, aligned to absolute positions, so that a position has the same place in
its tile whether it is computed alone, in a chunk or again after a preemption. The context is taken in splits of a fixed
number of blocks, counted from the first, and softmax runs over splits as it goes (Milakov and Gimelshein 2018,
arXiv:1805.02867). All products then have one shape, and a split that lies wholly in the future adds exact zeros.
Short requests share one gather; a long prompt has its keys gathered once for all its tiles. Paged KV: arXiv:2309.06180.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TILE = 4  # query positions in a tile
SPLIT_TOKENS = 128  # context positions in a split, as far as whole blocks allow
_MAX_SHARED_TILES = 2  # requests with more tiles than this are computed by themselves

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """A run of neighbouring positions of one request in the flat batch.

    Rows [row, row + num_tokens) are positions [position, position + num_tokens); `block_ids` covers all up to them.
    """

    row: int
    num_tokens: int
    position: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Split:
    """A stretch of context for those tiles that see any of it, which are the first `num_tiles`.

    tables_NB are the blocks of each tile, or one row for all; is_future_NQC marks what a query may not see, None if
    there is no such thing.
    """

    num_tiles: int
    tables_NB: Ints
    is_future_NQC: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class _TileGroup:
    """Query tiles that are computed together, longest context first.

    rows_NQ says which flat rows lie in the tiles: T, one past the last, where there is none.
    """

    rows_NQ: Ints
    splits: tuple[_Split, ...]


class AttentionPlan:
    """Where each query lies and what it may see; made once a step, used by every layer.

    Args:
        spans: the requests' runs; together they cover rows 0..num_rows of the flat batch.
        num_rows: rows of the flat batch without padding.
        block_size: token slots in a block.
    """

    def __init__(self, spans: Sequence[Span], num_rows: int, block_size: int) -> None:
        self._num_rows = num_rows
        self._block_size = block_size
        self._split_blocks = max(1, SPLIT_TOKENS // block_size)
        short = [span for span in spans if _num_tiles(span) <= _MAX_SHARED_TILES]
        self._groups = [self._group([span]) for span in spans if _num_tiles(span) > _MAX_SHARED_TILES]
        if short:
            self._groups.append(self._group(short))

    def _group(self, spans: Sequence[Span]) -> _TileGroup:
        first_tile = [span.position // TILE for span in spans]
        tile_span = [i for i, span in enumerate(spans) for _ in range(_num_tiles(span))]
        tile_index = [first + j for first, span in zip(first_tile, spans, strict=True) for j in range(_num_tiles(span))]
        positions_NQ = np.array(tile_index)[:, None] * TILE + np.arange(TILE)
        start = np.array([span.position for span in spans])[tile_span][:, None]
        num = np.array([span.num_tokens for span in spans])[tile_span][:, None]
        row = np.array([span.row for span in spans])[tile_span][:, None]
        is_real_NQ = (positions_NQ >= start) & (positions_NQ < start + num)
        rows_NQ = np.where(is_real_NQ, row + positions_NQ - start, self._num_rows)
        split_tokens = self._split_blocks * self._block_size
        last_N = np.where(is_real_NQ, positions_NQ, 0).max(axis=1)
        num_splits_N = last_N // split_tokens + 1
        order = np.argsort(-num_splits_N, kind="stable")
        tables_NB = self._tables(spans)
        if len(spans) > 1:  # else one table serves all tiles
            tables_NB = tables_NB[np.array(tile_span)[order]]
        splits = self._splits(positions_NQ[order], num_splits_N[order], tables_NB)
        return _TileGroup(rows_NQ[order], tuple(splits))

    def _splits(self, positions_NQ: Ints, num_splits_N: Ints, tables_NB: Ints) -> Iterator[_Split]:
        split_tokens = self._split_blocks * self._block_size
        for split in range(int(num_splits_N[0])):
            n = int((num_splits_N > split).sum())
            context_C = split * split_tokens + np.arange(split_tokens)
            is_future_NQC = context_C > positions_NQ[:n, :, None]
            blocks = slice(split * self._split_blocks, (split + 1) * self._split_blocks)
            yield _Split(n, tables_NB[:n, blocks], is_future_NQC if is_future_NQC.any() else None)

    def _tables(self, spans: Sequence[Span]) -> Ints:
        longest = max(len(span.block_ids) for span in spans)
        width = -(-longest // self._split_blocks) * self._split_blocks
        tables_NB = np.zeros((len(spans), width), np.int64)
        for row, span in zip(tables_NB, spans, strict=True):
            row[: len(span.block_ids)] = span.block_ids
        return tables_NB

    def attend(self, query_THE: Floats, keys_BSGE: Floats, values_BSGE: Floats) -> Floats:
        """(T, H, E) attention output for queries whose keys and values are in the cache already.

        Query head h reads key/value head h // (H // G). T may exceed the plan's rows; the rest comes out as zeros.
        """
        num_heads, head_dim = query_THE.shape[1:]
        num_groups = keys_BSGE.shape[2]
        scale = np.float32(head_dim**-0.5)
        padded_THE = np.concatenate([query_THE[: self._num_rows], np.zeros((1, num_heads, head_dim), np.float32)])
        output_THE = np.zeros((max(len(query_THE), self._num_rows) + 1, num_heads, head_dim), np.float32)
        for group in self._groups:
            shape = (*group.rows_NQ.shape, num_groups, num_heads // num_groups, head_dim)
            query_NGQHE = (padded_THE[group.rows_NQ] * scale).reshape(shape).transpose(0, 2, 1, 3, 4)
            query_NGME = query_NGQHE.reshape(shape[0], num_groups, -1, head_dim)
            result_NGME = self._attend_group(group, query_NGME, keys_BSGE, values_BSGE)
            result = result_NGME.reshape(query_NGQHE.shape).transpose(0, 2, 1, 3, 4)
            output_THE[group.rows_NQ] = result.reshape(*group.rows_NQ.shape, num_heads, head_dim)
        output_THE[self._num_rows :] = 0.0  # where the tiles' empty places were written
        return output_THE[: len(query_THE)]

    def _attend_group(self, group: _TileGroup, query_NGME: Floats, keys_BSGE: Floats, values_BSGE: Floats) -> Floats:
        top_NGM = np.full(query_NGME.shape[:3], -np.inf, np.float32)
        total_NGM = np.zeros_like(top_NGM)
        output_NGME = np.zeros_like(query_NGME)
        for split in group.splits:
            n = split.num_tiles
            keys_NCGE = _gather(keys_BSGE, split.tables_NB)
            scores_NGMC = np.matmul(query_NGME[:n], keys_NCGE.transpose(0, 2, 3, 1))
            if split.is_future_NQC is not None:
                scores_NGQHC = scores_NGMC.reshape(*scores_NGMC.shape[:2], TILE, -1, scores_NGMC.shape[3])
                np.copyto(scores_NGQHC, -np.inf, where=split.is_future_NQC[:, None, :, None])
            new_top_NGM = np.maximum(top_NGM[:n], scores_NGMC.max(axis=-1))
            weights_NGMC = np.exp(scores_NGMC - new_top_NGM[..., None])
            decay_NGM = np.exp(top_NGM[:n] - new_top_NGM)
            top_NGM[:n] = new_top_NGM
            total_NGM[:n] = total_NGM[:n] * decay_NGM + weights_NGMC.sum(axis=-1)
            values_NGCE = _gather(values_BSGE, split.tables_NB).transpose(0, 2, 1, 3)
            output_NGME[:n] = output_NGME[:n] * decay_NGM[..., None] + np.matmul(weights_NGMC, values_NGCE)
        return output_NGME / total_NGM[..., None]


def _num_tiles(span: Span) -> int:
    return (span.position + span.num_tokens - 1) // TILE - span.position // TILE + 1


def _gather(cache_BSGE: Floats, tables_NB: Ints) -> Floats:
    """(N, C, G, E): the contents of each row's blocks, one after another."""
    gathered = cache_BSGE[tables_NB]
    return gathered.reshape(len(tables_NB), -1, *cache_BSGE.shape[2:])
