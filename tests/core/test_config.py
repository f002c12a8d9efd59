"""Limits are held when a config is made; the machine's figures are those of the control group."""

from pathlib import Path
from typing import Any

import pytest

from core import config
from core.config import EngineConfig, SpeculativeConfig, memory_limit_bytes, num_usable_cores
from core.errors import InvalidRequest


@pytest.mark.parametrize(
    "name",
    [
        "block_size",
        "num_kv_blocks",
        "kv_cache_memory_bytes",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "num_threads",
    ],
)
def test_counts_start_at_one(name: str):
    with pytest.raises(InvalidRequest) as refused:
        EngineConfig(**{name: 0})

    assert (f"{name} is 0, at least 1 is needed", name) == (str(refused.value), refused.value.param)
    assert 1 == getattr(EngineConfig(**{name: 1}), name)


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"method": "eagle"}, "speculative method is 'eagle', allowed are 'draft_model' and 'ngram'", "method"),
        ({"verification": "fast"}, "verification is 'fast', allowed are 'block' and 'token'", "verification"),
        ({"adaptive": 1}, "adaptive is 1, allowed are true and false", "adaptive"),
        (
            {"disable_by_batch_size": 2.0},
            "disable_by_batch_size is 2.0, a whole number is needed",
            "disable_by_batch_size",
        ),
        ({"disable_by_batch_size": 0}, "disable_by_batch_size is 0, at least 1 is needed", "disable_by_batch_size"),
        (
            {"prompt_lookup_min": 0},
            "prompt_lookup_min is 0, allowed is [1, prompt_lookup_max = 4]",
            "prompt_lookup_min",
        ),
        (
            {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min is 4, allowed is [1, prompt_lookup_max = 3]",
            "prompt_lookup_min",
        ),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0, allowed is [1, 16]", "num_speculative_tokens"),
        ({"num_speculative_tokens": 17}, "num_speculative_tokens is 17, allowed is [1, 16]", "num_speculative_tokens"),
    ],
)
def test_speculation_knows_its_limits(fields: dict[str, Any], message: str, param: str):
    with pytest.raises(InvalidRequest) as refused:
        SpeculativeConfig(**fields)

    assert (message, param) == (str(refused.value), refused.value.param)


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        (
            {"preemption_mode": "pause"},
            "preemption_mode is 'pause', allowed are recompute, swap, auto",
            "preemption_mode",
        ),
        ({"swap_space_bytes": 9}, "swap_space_bytes needs preemption_mode swap or auto", "swap_space_bytes"),
        ({"swap_file": Path("f")}, "swap_file needs preemption_mode swap or auto", "swap_file"),
        ({"preemption_mode": "swap", "swap_space_bytes": 0}, "swap_space_bytes is 0, at least 1", "swap_space_bytes"),
    ],
)
def test_a_second_tier_needs_a_mode_that_uses_it(fields: dict[str, Any], message: str, param: str):
    with pytest.raises(InvalidRequest, match=message) as refused:
        EngineConfig(**fields)
    assert param == refused.value.param


def test_fractions_of_drafts_are_refused():
    """It comes from JSON, where 2.5 and true are numbers too."""
    for value in (2.5, True):
        with pytest.raises(InvalidRequest, match=f"num_speculative_tokens is {value}, a whole number is needed"):
            SpeculativeConfig(num_speculative_tokens=value)  # type: ignore[arg-type]


def test_a_fixed_number_of_drafts_has_a_limit_on_requests_and_a_chosen_one_has_none():
    limits = [SpeculativeConfig(adaptive=adaptive).disable_by_batch_size for adaptive in (True, False)]
    assert [None, 8] == limits
    assert 3 == SpeculativeConfig(adaptive=True, disable_by_batch_size=3).disable_by_batch_size


def test_speculation_at_its_limits_is_taken():
    narrow = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=1,
        prompt_lookup_min=1,
        prompt_lookup_max=1,
        verification="token",
        disable_by_batch_size=1,
    )
    assert ("ngram", 16) == (narrow.method, SpeculativeConfig(num_speculative_tokens=16).num_speculative_tokens)


def cgroup(monkeypatch: pytest.MonkeyPatch, folder: Path, **files: str) -> None:
    """A control group with these files; dots are written as double underscores."""
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    monkeypatch.setattr(config, "_CGROUP", folder)


@pytest.mark.parametrize(
    ("quota", "num_cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8)]
)
def test_cores_are_those_of_the_affinity_cut_down_by_the_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, num_cores: int
):
    monkeypatch.setattr(config.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    cgroup(monkeypatch, tmp_path, cpu__max=quota)

    assert num_cores == num_usable_cores()


def test_without_a_control_group_the_affinity_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(config.os, "sched_getaffinity", lambda pid: {3, 5}, raising=False)
    cgroup(monkeypatch, tmp_path)

    assert 2 == num_usable_cores()


def test_memory_is_the_control_groups_limit_or_the_machines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    cgroup(monkeypatch, tmp_path)
    machine = memory_limit_bytes()
    assert machine > 2**20

    (tmp_path / "memory.max").write_text("1048576\n")
    assert 2**20 == memory_limit_bytes()
    for unlimited in ("max\n", f"{2**63 - 4096}\n"):
        (tmp_path / "memory.max").write_text(unlimited)
        assert machine == memory_limit_bytes()


def test_the_older_control_group_is_read_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("2097152\n")
    cgroup(monkeypatch, tmp_path)

    assert 2**21 == memory_limit_bytes()
