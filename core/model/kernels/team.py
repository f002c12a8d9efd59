"""The only threads that core starts: they make the same compiled call as their caller, and hold no state."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from core.model.kernels.claims import counters


class Team:
    """Runs one compiled function on `num_ranks` threads, the caller's among them.

    Args:
        num_ranks: threads.
        num_phases: most phases that a function has.
    """

    def __init__(self, num_ranks: int, num_phases: int) -> None:
        self.num_ranks = num_ranks
        self.sync = counters(num_phases)
        self._helpers = ThreadPoolExecutor(max(1, num_ranks - 1), "octavo-kernels")

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """function(rank, sync, *args) on all ranks; back when every unit is complete and nobody is inside any more."""
        self.sync[:] = 0
        helpers: list[Future[None]] = []
        try:
            for rank in range(1, self.num_ranks):
                helpers.append(self._helpers.submit(function, rank, self.sync, *args))
            function(0, self.sync, *args)
        finally:  # nobody may be inside when the counters are next set to zero
            for helper in helpers:
                if not helper.cancel():  # one that has not begun came too late, and no unit waits for it
                    helper.result()
