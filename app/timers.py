"""A timer for deadlines that are moved with every event and hardly ever reached: moving one costs nothing.

`asyncio.timeout` sets a timer and takes it back for each wait; with an event a token, that is a fifth of what a stream
costs. Here one timer of the event loop is set; when it goes off it asks how long there is to go, and is set anew.
"""

import asyncio
from collections.abc import Callable


class LazyTimer:
    """Calls `on_expiry` when `left_s()` has come down to 0.

    Args:
        left_s: seconds to go; None while nothing is waited for, and then the timer sleeps until `watch` is called.
        on_expiry: called in the event loop, once for each time it has expired.
    """

    def __init__(self, left_s: Callable[[], float | None], on_expiry: Callable[[], None]) -> None:
        self._left_s = left_s
        self._on_expiry = on_expiry
        self._handle: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Something is waited for from now on. Calling it for each wait is what it is made for."""
        if self._handle is None:
            self._set(self._left_s())

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _look(self) -> None:
        self._handle = None
        left_s = self._left_s()
        if left_s is not None and left_s <= 0:
            self._on_expiry()
        else:
            self._set(left_s)

    def _set(self, left_s: float | None) -> None:
        if left_s is not None:
            self._handle = asyncio.get_running_loop().call_later(max(0.0, left_s), self._look)
