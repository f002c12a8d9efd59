"""Who goes next and who gives way. First come, first served: age is arrival, then choice.

A policy answers two questions and changes nothing. The oldest running request is never a victim; so it always
gets on, finishes, and leaves its blocks to the others: no livelock.
"""

from collections.abc import Sequence

from core.request import Request


class FirstComeFirstServed:
    """Both sequences are in order of age, oldest first."""

    def admission_order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """The waiting in the order in which they are admitted; if one does not fit, nobody passes it."""
        return list(waiting)

    def victim(self, running: Sequence[Request]) -> Request | None:
        """The running request to preempt: the youngest. None if only the oldest is left."""
        return running[-1] if len(running) > 1 else None
