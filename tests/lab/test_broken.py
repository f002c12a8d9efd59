"""The lab can fail: each broken module is caught by the test named for its fault, the skeleton by every test.

Beside the test that must fail, each module runs a close one that must pass, so that the first is seen to fail for
the fault and not for a module that does nothing right.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
LAB = "tests/lab/test_lab.py"


class Fault(NamedTuple):
    """A module of tests/lab/broken, the tests that must fail for it, and one next to them that must not."""

    module: str
    found_by: tuple[str, ...]
    not_by: str


FAULTS = [
    Fault(
        "a_block_too_many",
        found_by=("test_exact_multiples_need_no_extra_block",),
        not_by="test_a_begun_block_counts_whole",
    ),
    Fault(
        "waste_counts_whole_blocks",
        found_by=("test_one_long_sequence_makes_everybody_pay_only_without_pages",),
        not_by="test_waste_on_skewed_batches",
    ),
    Fault(
        "append_too_early",
        found_by=("test_append_allocates_new_block_only_when_last_is_full",),
        not_by="test_a_table_only_grows_at_its_end",
    ),
    Fault(
        "append_too_late",
        found_by=("test_append_allocates_new_block_only_when_last_is_full",),
        not_by="test_tables_need_not_be_contiguous",
    ),
    Fault(
        "leak_on_free",
        found_by=("test_freed_blocks_are_used_again",),
        not_by="test_append_allocates_new_block_only_when_last_is_full",
    ),
    Fault(
        "partial_allocation",
        found_by=("test_allocate_out_of_memory_is_none_and_changes_nothing",),
        not_by="test_append_out_of_memory_is_none_and_changes_nothing",
    ),
    Fault(
        "partial_append",
        found_by=("test_append_out_of_memory_is_none_and_changes_nothing",),
        not_by="test_append_of_several_tokens_takes_every_block_they_need",
    ),
    Fault(
        "truncate_keeps_blocks",
        found_by=("test_truncate_gives_back_whole_blocks",),
        not_by="test_freed_blocks_are_used_again",
    ),
    Fault(
        "fork_copies_everything",
        found_by=("test_fork_shares_blocks_instead_of_taking_more",),
        not_by="test_no_block_has_two_owners",
    ),
    Fault(
        "fork_without_references",
        found_by=("test_shared_blocks_go_back_with_their_last_holder",),
        not_by="test_fork_shares_blocks_instead_of_taking_more",
    ),
    Fault(
        "shared_block_written",
        found_by=("test_a_shared_block_is_copied_before_it_is_written",),
        not_by="test_forks_that_part_at_a_full_block_copy_nothing",
    ),
    Fault(
        "first_token_a_step_late",
        found_by=("test_the_step_that_completes_a_prompt_yields_its_first_token",),
        not_by="test_no_more_than_max_batch_run",
    ),
    Fault(
        "a_place_too_many",
        found_by=("test_no_more_than_max_batch_run",),
        not_by="test_every_running_request_gets_one_token_a_step",
    ),
    Fault(
        "retire_at_end_of_batch",
        found_by=(
            "test_a_place_left_is_taken_in_the_next_step",
            "test_continuous_batching_beats_static_on_wasted_slot_steps",
        ),
        not_by="test_equal_lengths_gain_nothing",
    ),
    Fault(
        "ratio_turned_round",
        found_by=("test_a_draft_is_accepted_with_the_ratio_of_target_to_draft",),
        not_by="test_drafts_from_the_target_itself_are_all_accepted",
    ),
    Fault(
        "goes_on_after_refusal",
        found_by=("test_acceptance_stops_at_the_first_refusal",),
        not_by="test_a_draft_is_accepted_with_the_ratio_of_target_to_draft",
    ),
    Fault(
        "resample_from_target",
        found_by=(
            "test_a_refused_draft_is_replaced_from_the_residual",
            "test_spec_decode_preserves_target_distribution",
        ),
        not_by="test_full_acceptance_adds_a_bonus_token_from_the_last_row",
    ),
    Fault(
        "bonus_from_row_before",
        found_by=("test_full_acceptance_adds_a_bonus_token_from_the_last_row",),
        not_by="test_a_refused_draft_is_replaced_from_the_residual",
    ),
    Fault(
        "stops_drawing_when_refused",
        found_by=("test_one_draw_a_draft_and_one_more_are_always_taken",),
        not_by="test_acceptance_stops_at_the_first_refusal",
    ),
]


def run_lab(module: str, *tests: str) -> dict[str, set[str]]:
    """Run the lab, or only these tests of it, against a module; each test's outcomes (one or more if parametrized)."""
    ids = [f"{LAB}::{test}" for test in tests] or [LAB]
    # Without hypothesis, which the lab does not use and which takes half of a start.
    options = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--noconftest", "-v", "--tb=no", "-r", "N"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *ids],
        cwd=ROOT,
        env=os.environ | {"LAB_MODULE": module, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    outcomes: dict[str, set[str]] = {}
    for test, outcome in re.findall(r"^\S+::(\w+)\S* (PASSED|FAILED|ERROR|SKIPPED|XFAIL)", result.stdout, re.MULTILINE):
        outcomes.setdefault(test, set()).add(outcome)
    assert outcomes, result.stdout + result.stderr
    return outcomes


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.module for fault in FAULTS])
def test_each_fault_is_found_by_the_tests_named_for_it(fault: Fault) -> None:
    outcomes = run_lab(f"tests.lab.broken.{fault.module}", *fault.found_by, fault.not_by)

    assert {*fault.found_by, fault.not_by} == set(outcomes)
    assert all("FAILED" in outcomes[test] for test in fault.found_by)
    assert {"PASSED"} == outcomes[fault.not_by]


def test_no_broken_module_is_left_out() -> None:
    modules = [path.stem for path in (ROOT / "tests/lab/broken").glob("*.py") if path.stem != "__init__"]

    assert sorted(modules) == sorted(fault.module for fault in FAULTS)


def test_the_skeleton_passes_nothing_yet() -> None:
    outcomes = run_lab("tests.lab.lab")

    assert {"FAILED"} == set.union(*outcomes.values())
    assert len(outcomes) >= 25
