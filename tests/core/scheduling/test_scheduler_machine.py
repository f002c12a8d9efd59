"""Random requests, aborts, steps and failures on tiny pools: see scheduler_machine.py."""

from hypothesis import settings

from tests.core.scheduling.scheduler_machine import SchedulerMachine

TestScheduler = SchedulerMachine.TestCase
# Rarest are failing stores that are looked for again: more examples than the profile's fifty.
TestScheduler.settings = settings(stateful_step_count=50, max_examples=max(250, settings.default.max_examples))
