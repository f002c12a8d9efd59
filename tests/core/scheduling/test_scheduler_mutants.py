"""The scheduler's machine finds every broken scheduler in tests/core/mutants/scheduler.py."""

import pytest

from tests.core.mutants.hunt import hunt
from tests.core.mutants.scheduler import MUTANTS, Part, parts_with
from tests.core.scheduling.scheduler_machine import SchedulerMachine


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_scheduler_is_found(mutant: type[Part]):
    machine = type(f"On{mutant.__name__}", (SchedulerMachine,), parts_with(mutant))

    assert hunt(machine) is not None
