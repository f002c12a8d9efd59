"""Random allocate, append, truncate, fork, publish and free on tiny pools: see block_manager_machine.py."""

from hypothesis import settings

from tests.core.memory.block_manager_machine import BlockManagerMachine

TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(stateful_step_count=50)
