"""A lazy timer expires when the time is up, by what it is told each time it looks, and not before."""

import asyncio
from collections.abc import Iterator

from app.timers import LazyTimer


class Watched:
    """A timer that is told these seconds to go, one answer after the other, and counts how often it expired."""

    def __init__(self, *left_s: float | None) -> None:
        self.answers: Iterator[float | None] = iter(left_s)
        self.num_expired = 0
        self.expired = asyncio.Event()
        self.timer = LazyTimer(lambda: next(self.answers), self._expire)

    def _expire(self) -> None:
        self.num_expired += 1
        self.expired.set()


async def turns(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_a_deadline_that_has_moved_on_is_waited_for_again():
    watched = Watched(0, 0.0001, 0.0001, 0)
    watched.timer.watch()
    await watched.expired.wait()

    assert (1, []) == (watched.num_expired, list(watched.answers))


async def test_watching_again_asks_nothing_while_the_timer_runs():
    watched = Watched(0, 0)
    for _ in range(5):
        watched.timer.watch()
    await watched.expired.wait()

    assert 1 == watched.num_expired


async def test_it_sleeps_while_nothing_is_waited_for_and_wakes_by_watching():
    watched = Watched(0, None, 0, 0)
    watched.timer.watch()
    await turns()
    assert 0 == watched.num_expired

    watched.timer.watch()
    await watched.expired.wait()
    assert 1 == watched.num_expired


async def test_a_stopped_timer_never_expires():
    watched = Watched(0, 0)
    watched.timer.watch()
    watched.timer.stop()
    await turns()

    assert 0 == watched.num_expired
