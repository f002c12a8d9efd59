"""The scheduler's machine finds every broken scheduler in tests/core/mutants/scheduler.py."""

import pytest

from core.scheduling.scheduler import ContinuousBatchingScheduler
from tests.core.mutants.hunt import hunt
from tests.core.mutants.scheduler import MUTANTS
from tests.core.scheduling.scheduler_machine import SchedulerMachine


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_scheduler_is_found(mutant: type[ContinuousBatchingScheduler]):
    machine = type(f"On{mutant.__name__}", (SchedulerMachine,), {"scheduler_class": mutant})

    assert hunt(machine) is not None
