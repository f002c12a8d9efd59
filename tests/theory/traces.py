"""The public traces of tests/data as lists; source and licence stand in each file (tools/make_trace_fixtures.py)."""

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Lengths:
    """A request of which only lengths are known."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


def _read(name: str) -> Any:
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


@cache
def azure_conversations(max_total: int = 2048) -> list[Lengths]:
    """Azure's conversations of at most `max_total` tokens, in file order."""
    content = _read("azure_conv_2023.json.gz")
    rows = map(Lengths, content["prompt_lens"], content["output_lens"])
    return [row for row in rows if row.total <= max_total]


@dataclass(frozen=True)
class BlockTrace:
    """Requests of a Mooncake trace: prompt length, and an id for each of its 512-token blocks, the last one partial."""

    input_lens: list[int]
    hash_ids: list[list[int]]

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.hash_ids))

    @property
    def num_distinct(self) -> int:
        return len({hash_id for ids in self.hash_ids for hash_id in ids})


@cache
def mooncake(name: str) -> BlockTrace:
    content = _read(f"mooncake_{name}.json.gz")
    requests, next_new = [], 0
    for runs in content["runs_of_requests"]:
        hash_ids: list[int] = []
        for distance, length in zip(runs[::2], runs[1::2], strict=True):
            start = next_new - distance
            hash_ids += range(start, start + length)
            next_new = max(next_new, start + length)
        requests.append(hash_ids)
    return BlockTrace(content["input_lens"], requests)
