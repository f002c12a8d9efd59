"""A state machine that has never failed proves little: here it is set on copies that are broken on purpose."""

from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from core.errors import OctavoError

# The same examples every time, and no shrinking: it is enough that one of them fails. Most mutants fall within a few
# dozen examples; the rarest takes 900 on average, so this many are enough whatever examples come.
HUNT = settings(
    max_examples=6000,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)
FOUND = (AssertionError, OctavoError, LookupError, ValueError)


def hunt(machine: type[RuleBasedStateMachine]) -> BaseException | None:
    """What the machine found wrong, or None."""
    try:
        run_state_machine_as_test(machine, settings=HUNT)
    except FOUND as fault:
        return fault
    return None
