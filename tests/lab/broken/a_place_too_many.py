"""Fault: one more request runs than max_batch allows."""

from core import *  # noqa: F403
from core import ContinuousBatchingScheduler as CorrectScheduler


class ContinuousBatchingScheduler(CorrectScheduler):
    """Compares with <= where < belongs."""

    def __init__(self, max_batch, block_manager):
        super().__init__(max_batch + 1, block_manager)
