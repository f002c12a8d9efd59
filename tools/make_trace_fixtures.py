"""The public traces that tests replay, cut down to what they replay: lengths, and which blocks are the same.

    python -m tools.make_trace_fixtures TRACE_DIR tests/data

TRACE_DIR holds azure_llm_2023_conv.csv (Azure) and mooncake_{conversation,synthetic}.jsonl.gz (Mooncake).
No timestamps are kept. A Mooncake request is kept as runs of consecutive block ids: since ids are given in order of
first appearance, most requests are a piece of an older one and a run of new ids. What is written is the same, byte for
byte, each time.
"""

import argparse
import csv
import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

AZURE = {
    "source": "Azure public dataset, LLM inference trace 2023, conversation: ContextTokens and GeneratedTokens",
    "url": "https://github.com/Azure/AzurePublicDataset/blob/master/AzureLLMInferenceDataset2023.md",
    "licence": "CC-BY 4.0, Microsoft Azure",
}
MOONCAKE = {
    "source": "Mooncake trace, {name}: input_length and hash_ids (of 512-token blocks), all rows in order",
    "url": "https://github.com/kvcache-ai/Mooncake",
    "licence": "Apache-2.0, Mooncake project",
    "runs": "per request: how far below the next new id a run of consecutive ids begins, and its length, alternating",
}
MOONCAKE_NAMES = ("conversation", "synthetic")


def encode_runs(hash_ids: Sequence[int], next_new: int) -> tuple[list[int], int]:
    """One request's ids as (distance below the next new id, length) pairs; and the next new id behind it."""
    runs: list[int] = []
    previous = None
    for hash_id in hash_ids:
        if previous is not None and hash_id == previous + 1:
            runs[-1] += 1
        else:
            runs += [next_new - hash_id, 1]
        previous = hash_id
        next_new = max(next_new, hash_id + 1)
    return runs, next_new


def azure_lengths(path: Path) -> dict[str, Any]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return AZURE | {
        "prompt_lens": [int(row["ContextTokens"]) for row in rows],
        "output_lens": [int(row["GeneratedTokens"]) for row in rows],
    }


def mooncake_blocks(path: Path, name: str) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    about = {key: value.format(name=name) for key, value in MOONCAKE.items()}
    return about | {
        "input_lens": [row["input_length"] for row in rows],
        "runs_of_requests": list(_runs(row["hash_ids"] for row in rows)),
    }


def _runs(requests: Iterable[Sequence[int]]) -> Iterable[list[int]]:
    next_new = 0
    for hash_ids in requests:
        runs, next_new = encode_runs(hash_ids, next_new)
        yield runs


def write(path: Path, content: dict[str, Any]) -> None:
    # No time of day and no file name in the header, so that the same content is the same file.
    path.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 9, mtime=0))
    print(f"{path}: {path.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    write(options.out / "azure_conv_2023.json.gz", azure_lengths(options.traces / "azure_llm_2023_conv.csv"))
    for name in MOONCAKE_NAMES:
        content = mooncake_blocks(options.traces / f"mooncake_{name}.jsonl.gz", name)
        write(options.out / f"mooncake_{name}.json.gz", content)


if __name__ == "__main__":
    main()
