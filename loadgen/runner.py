"""When each request leaves: an open loop keeps to its schedule, a closed loop keeps its number in flight.

All times are the event loop's monotonic clock, which a test may replace by a virtual one. In an open loop with a
concurrency limit, a request that may not leave yet waits in the client's queue, first come first served; its
intended time stays what it was. A run with a duration stops planning at its end, and stops waiting for what is
still under way a grace period later.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from loadgen.arrivals import Schedule
from loadgen.record import NOT_SENT, Failure, RequestRecord
from loadgen.workload import Prompt, PromptSource

LAG_PROBE_INTERVAL_S = 0.05


class Complete(Protocol):
    """Sends one prompt and answers with its record, also when it fails."""

    def __call__(
        self, index: int, prompt: Prompt, *, t_sched: float, t_queue: float, deadline: float | None
    ) -> Awaitable[RequestRecord]: ...


@dataclass
class Run:
    """What happened: records in the order they ended, and how late the client's own event loop was."""

    t_start: float
    t_end: float = 0.0
    records: list[RequestRecord] = field(default_factory=list)
    loop_lags_s: list[float] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        return self.t_end - self.t_start


def _ignore(record: RequestRecord) -> None:
    pass


class Runner:
    """One run of requests through `complete`.

    Args:
        on_done: called with each record as it ends.
        max_concurrency: most requests in flight; None for no limit.
        stop_after_s: how long after the start to wait for answers; None for as long as they take.
    """

    def __init__(
        self,
        complete: Complete,
        prompts: PromptSource,
        *,
        max_concurrency: int | None = None,
        stop_after_s: float | None = None,
        on_done: Callable[[RequestRecord], None] = _ignore,
    ) -> None:
        self._complete = complete
        self._prompts = prompts
        self._max_concurrency = max_concurrency
        self._on_done = on_done
        self._now = asyncio.get_running_loop().time
        self._run = Run(self._now())
        self._deadline = None if stop_after_s is None else self._run.t_start + stop_after_s

    async def open_loop(self, schedule: Schedule) -> Run:
        """Send request i at its offset, whatever became of the others."""
        gate = None if self._max_concurrency is None else asyncio.Semaphore(self._max_concurrency)
        with self._measured():
            async with asyncio.TaskGroup() as group:
                for index, offset_s in enumerate(schedule.offsets_s):
                    t_sched = self._run.t_start + float(offset_s)
                    # Made while there is time: after the sleep it would delay the request.
                    prompt = self._prompts(index)
                    await asyncio.sleep(max(0.0, t_sched - self._now()))
                    group.create_task(self._send_through(gate, index, prompt, t_sched))
                    # A new task starts at the next turn of the loop: not after the next prompt has been made.
                    await asyncio.sleep(0)
        return self._run

    async def closed_loop(self, num_requests: int | None, *, duration_s: float | None = None) -> Run:
        """Keep `max_concurrency` in flight until so many were sent, or so long has passed."""
        indices = itertools.count() if num_requests is None else iter(range(num_requests))
        t_stop = None if duration_s is None else self._run.t_start + duration_s
        with self._measured():
            async with asyncio.TaskGroup() as group:
                for _ in range(self._max_concurrency or 1):
                    group.create_task(self._work(indices, t_stop))
        return self._run

    async def _work(self, indices: Iterable[int], t_stop: float | None) -> None:
        for index in indices:
            t_free = self._now()
            await self._send(index, self._prompts(index), t_free, t_queue=t_free)
            if t_stop is not None and self._now() >= t_stop:
                return

    async def _send_through(self, gate: asyncio.Semaphore | None, index: int, prompt: Prompt, t_sched: float) -> None:
        t_queue = self._now()
        if gate is None:
            await self._send(index, prompt, t_sched, t_queue=t_queue)
            return
        try:
            async with asyncio.timeout_at(self._deadline):
                await gate.acquire()
        except TimeoutError:
            self._keep(self._never_sent(index, prompt, t_sched, t_queue))
            return
        try:
            await self._send(index, prompt, t_sched, t_queue=t_queue)
        finally:
            gate.release()

    async def _send(self, index: int, prompt: Prompt, t_sched: float, *, t_queue: float) -> None:
        self._keep(await self._complete(index, prompt, t_sched=t_sched, t_queue=t_queue, deadline=self._deadline))

    def _never_sent(self, index: int, prompt: Prompt, t_sched: float, t_queue: float) -> RequestRecord:
        now = self._now()
        return RequestRecord(
            index=index,
            t_sched=t_sched,
            t_queue=t_queue,
            t_send=now,
            t_end=now,
            num_planned_prompt_tokens=prompt.num_tokens,
            num_planned_output_tokens=prompt.max_tokens,
            failure=Failure(NOT_SENT, "still in the client's queue when the run ended"),
        )

    def _keep(self, record: RequestRecord) -> None:
        self._run.records.append(record)
        self._on_done(record)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        probe = asyncio.create_task(self._probe_lag())
        try:
            yield
        finally:
            probe.cancel()
            self._run.t_end = self._now()

    async def _probe_lag(self) -> None:
        """How late a timer fires tells how late an arrival may have been noticed."""
        while True:
            due = self._now() + LAG_PROBE_INTERVAL_S
            await asyncio.sleep(LAG_PROBE_INTERVAL_S)
            self._run.loop_lags_s.append(self._now() - due)
