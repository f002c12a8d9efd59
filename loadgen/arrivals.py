"""When requests are meant to leave: the whole schedule is drawn from the seed before the run starts.

An open loop does not wait for answers, so its schedule may not depend on them. Gaps are constant, exponential
(a Poisson process) or gamma with shape `burstiness`, whose coefficient of variation is 1/sqrt(burstiness): below
1 is burstier than Poisson, above 1 smoother. By default the gaps are scaled so that the mean rate over the run is
exactly the requested one; for Poisson arrivals that is the process given its number of arrivals.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Arrival = Literal["poisson", "gamma", "constant"]

# Separates the schedule's random numbers from those of the prompts, which use the same seed.
SCHEDULE_STREAM = 0x5C4ED


@dataclass(frozen=True)
class Schedule:
    """Offsets from the start of the run, ascending, the first at 0; the horizon includes the gap after the last."""

    offsets_s: npt.NDArray[np.float64]
    horizon_s: float

    @property
    def planned_rate(self) -> float:
        """Requests per second, infinite when all leave at once."""
        return len(self.offsets_s) / self.horizon_s if self.horizon_s > 0 else math.inf


def draw_gaps(
    arrival: Arrival, rate: float, num_gaps: int, *, seed: int, burstiness: float = 1.0
) -> npt.NDArray[np.float64]:
    """(num_gaps,) seconds between arrivals with mean 1/rate.

    Raises:
        ValueError: rate or burstiness is not a positive finite number.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"rate must be positive and finite, got {rate}")
    if not 0 < burstiness < math.inf:
        raise ValueError(f"burstiness must be positive and finite, got {burstiness}")
    rng = np.random.default_rng((seed % 2**64, SCHEDULE_STREAM))
    match arrival:
        case "constant":
            return np.full(num_gaps, 1.0 / rate)
        case "poisson":
            return rng.exponential(1.0 / rate, num_gaps)
        case "gamma":
            return rng.gamma(burstiness, 1.0 / (rate * burstiness), num_gaps)


def all_at_once(num_requests: int) -> Schedule:
    """An infinite rate: every request is meant to leave at the start."""
    return Schedule(np.zeros(num_requests), 0.0)


def schedule_requests(
    arrival: Arrival, rate: float, num_requests: int, *, seed: int, burstiness: float = 1.0, is_exact: bool = True
) -> Schedule:
    """A schedule of exactly `num_requests`; if exact, over exactly num_requests / rate seconds."""
    gaps = draw_gaps(arrival, rate, num_requests, seed=seed, burstiness=burstiness)
    if is_exact and gaps.sum() > 0:
        gaps *= num_requests / rate / gaps.sum()
    ends = np.cumsum(gaps)
    return Schedule(np.concatenate([[0.0], ends[:-1]]), float(ends[-1]))


def schedule_duration(
    arrival: Arrival, rate: float, duration_s: float, *, seed: int, burstiness: float = 1.0, is_exact: bool = True
) -> Schedule:
    """A schedule over `duration_s`; if exact, of round(rate * duration) requests, else of as many as fall in it."""
    if is_exact:
        num_requests = max(1, round(rate * duration_s))
        return schedule_requests(arrival, rate, num_requests, seed=seed, burstiness=burstiness)
    num_gaps = 16
    while True:
        gaps = draw_gaps(arrival, rate, num_gaps, seed=seed, burstiness=burstiness)
        offsets = np.concatenate([[0.0], np.cumsum(gaps)])
        if offsets[-1] >= duration_s:
            return Schedule(offsets[offsets < duration_s], duration_s)
        num_gaps *= 2
