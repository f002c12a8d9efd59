"""What `python -m core` prints must be right: its numbers are read back and computed here by other means."""

import os
import re
import subprocess
import sys
from math import ceil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TARGET, DRAFT = (0.5, 0.3, 0.15, 0.05), (0.3, 0.3, 0.2, 0.2)


@pytest.fixture(scope="module")
def printed() -> str:
    run = subprocess.run([sys.executable, "-m", "core"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "" == run.stderr
    return run.stdout


def test_a_reader_who_has_read_enough_may_leave():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as output:
        command = [sys.executable, "-m", "core"]
        run = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, check=True)

    assert b"" == run.stderr


def diagram(printed: str, name: str) -> list[str]:
    """The lines between bars below the heading `name`."""
    section = printed.split(f"   {name}: ")[1]
    return re.findall(r"\|(.*)\|", section.split(" steps")[1])


def test_blocks_needed_is_the_ceiling(printed: str):
    rows = re.findall(r"blocks_needed\((\d+), (\d+)\) = (\d+)", printed)

    assert len(rows) >= 4
    for num_tokens, block_size, blocks in rows:
        assert ceil(int(num_tokens) / int(block_size)) == int(blocks)


def test_fragmentation_of_three_lengths_is_28_against_54(printed: str):
    assert (28, 54) == ((1 + 2 + 1) * 16 - 36, 3 * 30 - 36)
    assert "paged: 4 blocks x 16 = 64 slots, less 36 tokens: 28 wasted" in printed
    assert "naive: 3 requests x 30 = 90 slots, less 36 tokens: 54 wasted" in printed


def test_the_table_grows_only_past_a_full_block_and_has_a_gap(printed: str):
    """Of 4 slots a block, 7 tokens leave one slot: the eighth takes nothing, the ninth a block, not the next one."""
    lines = [line.split("->")[1].split("free")[0].strip() for line in printed.splitlines() if '("' in line]

    assert ["[0, 1]", "[2]", "[]", "[3]", "[]", "None", "", "[0]"] == lines
    assert "a [0, 1, 3]" in printed
    assert "b [2, 0]" in printed


def test_out_of_memory_is_none_and_changes_nothing(printed: str):
    lines = printed.splitlines()
    refused = next(i for i, line in enumerate(lines) if "-> None" in line)
    before, after = (lines[i].split("free", 1)[1] for i in (refused - 1, refused))

    assert " 0, tables: a [0, 1, 3], b [2]" == before
    assert before == after


def test_static_and_continuous_steps_are_those_of_the_lengths(printed: str):
    lengths = {
        name: int(n) for name, n in re.findall(r"([A-Z]) (\d+)", printed.split("output lengths")[1].split(";")[0])
    }
    num_static = max(lengths["A"], lengths["B"]) + max(lengths["C"], lengths["D"]) + max(lengths["E"], lengths["F"])
    ends = [0, 0]
    for length in lengths.values():  # each goes to the place that is free first
        ends[ends.index(min(ends))] += length

    assert {"A": 8, "B": 2, "C": 3, "D": 1, "E": 6, "F": 2} == lengths
    assert f"static: {num_static} steps, {2 * num_static - 22} of {2 * num_static} slot-steps wasted" in printed
    assert f"continuous: {max(ends)} steps, {2 * max(ends) - 22} of {2 * max(ends)} slot-steps wasted" in printed


def test_the_diagrams_give_each_request_its_length_in_one_place(printed: str):
    for lines in (diagram(printed, "static"), diagram(printed, "continuous")):
        assert 2 == len(lines)
        assert len(lines[0]) == len(lines[1])
        for letter, length in zip("ABCDEF", (8, 2, 3, 1, 6, 2), strict=True):
            assert [letter * length] == [run for line in lines for run in re.findall(f"{letter}+", line)]


def test_acceptance_and_tokens_per_step_follow_from_the_laws(printed: str):
    acceptance = 1 - sum(abs(t - d) for t, d in zip(TARGET, DRAFT, strict=True)) / 2
    per_step = (1 - acceptance**5) / (1 - acceptance)

    assert f"= {acceptance:.1f}\n" in printed
    assert f"= {per_step:.4f}\n" in printed
    assert "3.3616" == f"{per_step:.4f}"


@pytest.mark.parametrize(
    ("drafts", "emitted"),
    [
        # Kept: .9 < 1 and .6 < .75; refused: .4 >= .25; the residual has token 0 alone.
        ([0, 2, 3], [0, 2, 0]),
        # Kept as well: .4 < 1; .7 lies between .5 and .8, the target's token 1.
        ([0, 2, 1], [0, 2, 1, 1]),
    ],
)
def test_the_traced_steps_emit_what_their_draws_say(printed: str, drafts: list[int], emitted: list[int]):
    trace = printed.split(f"drafts {drafts}, draws [0.9, 0.6, 0.4, 0.7]:")[1].split("drafts")[0]

    assert f"emitted {emitted}\n" in trace
    for token, drawn, sign, target, draft, verdict in re.findall(
        r"token (\d): ([\d.]+) (<|>=) min\(1, ([\d.]+) / ([\d.]+)\): (\w+)", trace
    ):
        is_kept = float(drawn) < min(1.0, TARGET[int(token)] / DRAFT[int(token)])
        assert (TARGET[int(token)], DRAFT[int(token)]) == (float(target), float(draft))
        assert (("<", "kept") if is_kept else (">=", "refused")) == (sign, verdict)
