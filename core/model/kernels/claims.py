"""How threads share the work of a step: phases of units that are claimed, not handed out.

Every thread walks through the same phases. In each it claims units by counting up, works, and counts up what is
complete; the phase is over when all its units are. Nobody waits for a thread, only for units: if the other one is late,
or the operating system gave its core to somebody else, the units are done without it. A counter lies on a cache line of
its own.
"""

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from core.model.kernels.packing import aligned
from core.model.kernels.simd import cycle_counter, fetch_add, load_acquire, pause

_LINE_WORDS = 8  # int64 in a cache line
_LINE = 64
STAMP = 15  # where a phase's line holds the time of its end
_SPINS = 2000  # then the core is offered to whoever wants it
_yield = types.ExternalFunction("sched_yield", types.int32())


def counters(num_phases: int) -> NDArray[np.int64]:
    """(phases, 2 * 8) int64 zeros: claimed and complete units of each phase; to be zeroed before each step."""
    return aligned((num_phases, 2 * _LINE_WORDS), np.int64)


@njit(nogil=True, error_model="numpy")
def claim(sync, phase):
    """The number of a unit that is this thread's to do; past the last one when there is no more."""
    return fetch_add(sync.ctypes.data + phase * 2 * _LINE, 1)


@njit(nogil=True, error_model="numpy")
def complete(sync, phase):
    """A claimed unit is done, and what it wrote may be read."""
    fetch_add(sync.ctypes.data + phase * 2 * _LINE + _LINE, 1)


@njit(nogil=True, error_model="numpy")
def wait(sync, phase, num_units):
    """Until all units of the phase are complete; leaves the time at the end of the phase's line."""
    address, spins = sync.ctypes.data + phase * 2 * _LINE + _LINE, 0
    while load_acquire(address) < num_units:
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            _yield()
    sync[phase, STAMP] = cycle_counter()
