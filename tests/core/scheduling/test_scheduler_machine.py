"""Random requests, aborts, steps and failures on tiny pools: see scheduler_machine.py."""

from hypothesis import settings

from tests.core.scheduling.scheduler_machine import SchedulerMachine

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=50)
