"""The traces that the other tests here replay are the public ones, whole: counts from THEORY B1 and B6."""

import gzip
import json

import pytest

from tests.theory.traces import DATA, azure_conversations, mooncake
from tools.make_trace_fixtures import MOONCAKE_NAMES, encode_runs

FILES = ["azure_conv_2023.json.gz", *(f"mooncake_{name}.json.gz" for name in MOONCAKE_NAMES)]


def test_azures_conversations_are_those_of_the_table():
    """16,528 of 19,366 have at most 2,048 tokens; mean 753.7 + 232.5."""
    rows = azure_conversations()

    assert [16_528, 19_366] == [len(rows), len(azure_conversations(max_total=2**31))]
    assert [753.7, 232.5] == [
        round(sum(part) / len(rows), 1) for part in zip(*((r.prompt, r.output) for r in rows), strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "num_requests", "num_blocks"), [("conversation", 12_031, 288_500), ("synthetic", 3_993, 121_877)]
)
def test_mooncakes_requests_are_all_there_with_a_block_for_every_512_tokens(
    name: str, num_requests: int, num_blocks: int
):
    trace = mooncake(name)

    assert [num_requests, num_blocks] == [len(trace.hash_ids), trace.num_blocks]
    assert [-(-length // 512) for length in trace.input_lens] == [len(ids) for ids in trace.hash_ids]
    assert set(range(trace.num_distinct)) == {hash_id for ids in trace.hash_ids for hash_id in ids}


def test_runs_are_distances_below_the_next_new_id_and_lengths():
    assert ([0, 3], 3) == encode_runs([0, 1, 2], 0)
    assert ([3, 2, 0, 2], 5) == encode_runs([0, 1, 3, 4], 3)
    assert ([5, 1, 3, 1], 5) == encode_runs([0, 2], 5)
    assert ([], 5) == encode_runs([], 5)


def test_every_file_names_its_source_and_licence_and_all_are_small():
    contents = [json.loads(gzip.decompress((DATA / name).read_bytes())) for name in FILES]

    assert all({"source", "url", "licence"} <= set(content) for content in contents)
    assert sum((DATA / name).stat().st_size for name in FILES) < 1_500_000
