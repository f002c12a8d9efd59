"""Tells an engine that has stalled from one that is busy: how long it may go without a sign of life.

The engine's thread cannot be asked while it computes, so its silence is measured. How much is too much depends on what
it said last (`core.Progress`): between two computations next to nothing is to be done; a computation may take ten
times as long as the longest of its size so far; of the first nobody knows how long it takes, for memory is touched and
kernels are compiled in it. Nothing is decided here but what /health says, and a step that does come back is forgiven.
"""

from core import Progress

MARGIN = 10.0
FIRST_STEP_S = 60.0


def patience_s(last: Progress, stall_timeout_s: float) -> float:
    """How long after its last sign the engine counts as alive, while it has work."""
    if last.longest_s is None:
        return max(stall_timeout_s, FIRST_STEP_S)
    return max(stall_timeout_s, MARGIN * last.longest_s)
