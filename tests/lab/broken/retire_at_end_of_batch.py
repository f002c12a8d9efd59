"""Fault: places are given out again only when everyone of the batch is done: static batching in disguise."""

from core import *  # noqa: F403
from core import ContinuousBatchingScheduler as CorrectScheduler


class ContinuousBatchingScheduler(CorrectScheduler):
    """Holds the queue back until the batch has drained."""

    def __init__(self, max_batch, block_manager):
        super().__init__(max_batch, block_manager)
        self._fault_places, self._fault_queue = max_batch, []

    def add(self, *request):
        self._fault_queue.append(request)

    def step(self):
        if not super().has_unfinished_requests:
            batch, self._fault_queue = self._fault_queue[: self._fault_places], self._fault_queue[self._fault_places :]
            for request in batch:
                super().add(*request)
        return super().step()

    @property
    def has_unfinished_requests(self):
        return super().has_unfinished_requests or bool(self._fault_queue)
