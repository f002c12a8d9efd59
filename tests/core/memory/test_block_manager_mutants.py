"""The block manager's machine finds every broken manager in tests/core/mutants/block_manager.py."""

import pytest

from core.memory.block_manager import BlockManager
from tests.core.memory.block_manager_machine import BlockManagerMachine
from tests.core.mutants.block_manager import MUTANTS
from tests.core.mutants.hunt import hunt


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_manager_is_found(mutant: type[BlockManager]):
    machine = type(f"On{mutant.__name__}", (BlockManagerMachine,), {"manager_class": mutant})

    assert hunt(machine) is not None
