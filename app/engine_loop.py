"""The asyncio background loop: the only caller of the engine, and the only road to it.

Requests wait in an inbox until the next step; one worker thread adds them, aborts those whose clients have left, and
takes the step; the outputs of a step come back all at once and are dealt out to their streams. So the engine is
touched by one thread at a time and needs no lock. Three things are bounded: the queue (503 beyond it), a stream's
buffer (a reader that stops reading is aborted), and a drain (what is still open at its end gets an error).
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from app.errors import ApiError, unavailable
from app.timers import LazyTimer
from app.watchdog import patience_s
from core import DuplicateRequest, Engine, EngineDead, InvalidRequest, NewRequest, RequestOutput

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BUFFERED_OUTPUTS = 1024  # per sequence; far more than a reader on a bad line leaves lying
STALL_TIMEOUT_S = 1.5
WORKER_TIMEOUT_S = 5.0  # for the last turn, when all is to end
IDLE_S = 15.0  # a quiet stream is given a sign of life this often: proxies cut at 30 s or 60 s


def family_ids(request: NewRequest) -> tuple[str, ...]:
    """Ids of all samples of a request, choice by choice."""
    return (request.request_id, *request.sibling_ids)


def _num_sequences(requests: Iterable[NewRequest]) -> int:
    return sum(1 + len(request.sibling_ids) for request in requests)


class Stream:
    """The outputs of one HTTP request's sequences, dealt out step by step.

    Iterating gives lists: what has come since the last time, or [] when for `idle_s` the client was shown nothing
    (what comes may be held back, so the reader says what it showed); it ends when all sequences have ended, and raises
    what the client is to be told when they cannot end well. `close` aborts whatever still runs: call it in a `finally`.
    """

    def __init__(
        self,
        loop: "EngineLoop",
        request_ids: Sequence[str],
        *,
        max_buffered: int,
        idle_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.request_ids = tuple(request_ids)
        self.open_ids = set(request_ids)
        self._loop = loop
        self._max_buffered = max_buffered * len(request_ids)
        self._idle_s = idle_s
        self._clock = clock
        self._shown_s = clock()
        self._buffer: list[RequestOutput] = []
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        self._timer = LazyTimer(self._quiet_s, self._ready.set)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> list[RequestOutput]:
        while not self._buffer and self._error is None:
            if not self.open_ids:
                raise StopAsyncIteration
            if self._quiet_s() <= 0:
                await asyncio.sleep(0)  # whoever reads on and on leaves the others a turn
                break
            self._timer.watch()
            await self._ready.wait()
            self._ready.clear()
        if self._error is not None:
            raise self._error
        if not self._buffer:
            self.mark_shown()
        outputs, self._buffer = self._buffer, []
        return outputs

    def _quiet_s(self) -> float:
        """Seconds until the client is due a sign of life."""
        return self._shown_s + self._idle_s - self._clock()

    def mark_shown(self) -> None:
        """The client has been sent something just now."""
        self._shown_s = self._clock()

    def put(self, output: RequestOutput) -> None:
        """Take one output; past the bound the reader has stopped reading, and its sequences are aborted."""
        if output.is_finished:
            self.open_ids.discard(output.request_id)
        self._buffer.append(output)
        self._ready.set()
        if len(self._buffer) > self._max_buffered:
            logger.warning("stream aborted, its reader has stopped reading", extra={"request_id": output.request_id})
            self.close()
            self.fail(ApiError(408, "The stream was not read in time", code="slow_reader"))

    def fail(self, error: Exception) -> None:
        """Let the reader hear of `error` next; what it has not read is dropped."""
        self._error = error
        self._buffer.clear()
        self._ready.set()

    def close(self) -> None:
        """Abort what still runs. Calling it again, or after the end, does nothing."""
        self._timer.stop()
        self._loop.release(self)


@dataclass(slots=True)
class _Turn:
    """What one visit to the worker thread brings: requests to add and to abort in, outputs and refusals out."""

    new: deque[NewRequest]
    aborts: list[str]
    calls: list[tuple[Callable[[Engine], Any], asyncio.Future[Any]]]
    answers: list[Any] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    refused: dict[str, Exception] = field(default_factory=dict)


class EngineLoop:
    """Owns the engine from `start` to `stop`.

    Args:
        max_queue: most requests waiting for a place in the batch.
        stall_timeout_s: how long the worker may give no sign of life, where no step is known to take so long.
        max_buffered: most outputs per sequence that wait for their reader.
        on_death: called once, in the event loop, when the engine cannot go on.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_queue: int,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        max_buffered: int = MAX_BUFFERED_OUTPUTS,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
        on_death: Callable[[], None] | None = None,
    ) -> None:
        self.engine = engine
        self.on_death = on_death
        self.is_dead = False
        self.is_draining = False
        self.is_stuck = False  # it was stopped, and its worker did not come back
        self.num_rejections = 0
        self._max_queue = max_queue
        self._stall_timeout_s = stall_timeout_s
        self._turn_started_s: float | None = None
        self._at_work: asyncio.Future[None] | None = None  # the worker's last turn
        self._is_stall_logged = False  # of this turn
        self._is_stopped = False
        self._max_buffered = max_buffered
        self._idle_s = idle_s
        self._clock = clock
        self._inbox: list[NewRequest] = []
        self._handed_over: deque[NewRequest] = deque()  # the worker takes them from here one by one
        self._num_handed_over = 0  # in this turn, those already taken included
        self._aborts: list[str] = []
        self._calls: list[tuple[Callable[[Engine], Any], asyncio.Future[Any]]] = []
        self._unanswered: set[asyncio.Future[Any]] = set()  # of calls, those in a turn included
        self._streams: dict[str, Stream] = {}  # by request id
        self._known = engine.stats  # as of the end of the last turn, so that it agrees with _num_handed_over
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._is_stopped = self.is_stuck = False
        self._task = asyncio.create_task(self._run(), name="engine loop")
        self._task.add_done_callback(self._on_end)

    @property
    def num_in_inbox(self) -> int:
        """Sequences that the engine has not been told of yet; they wait as much as those it queues."""
        return _num_sequences(self._inbox) + _num_sequences(tuple(self._handed_over))

    @property
    def num_open_streams(self) -> int:
        return len(set(map(id, self._streams.values())))

    @property
    def is_busy(self) -> bool:
        return bool(self._inbox or self._aborts or self._calls or self.engine.has_unfinished_requests)

    def submit(self, requests: Sequence[NewRequest]) -> Stream:
        """Queue the sequences of one HTTP request, all or none.

        Raises:
            ApiError: 503, the queue is full or the server drains.
            EngineDead: so it is.
            InvalidRequest: the queue could never hold so many.
        """
        self.refuse_if_closed()
        ids = [request_id for request in requests for request_id in family_ids(request)]
        self._refuse_if_full(len(ids))
        stream = Stream(self, ids, max_buffered=self._max_buffered, idle_s=self._idle_s, clock=self._clock)
        self._streams.update(dict.fromkeys(ids, stream))
        self._inbox.extend(requests)
        self._idle.clear()
        self._wake.set()
        return stream

    async def call(self, function: Callable[[Engine], T]) -> T:
        """What `function` returns, called with the engine between two steps. It must not raise.

        Raises what streams hear if the loop ends before.
        """
        self.refuse_if_closed()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.append((function, future))
        self._unanswered.add(future)
        future.add_done_callback(self._unanswered.discard)
        self._wake.set()
        return await future

    def release(self, stream: Stream) -> None:
        """Forget a stream and abort what still runs of it, within one step."""
        self._aborts.extend(stream.open_ids)
        stream.open_ids.clear()
        for request_id in stream.request_ids:
            self._streams.pop(request_id, None)
        self._settle()
        self._wake.set()

    @property
    def stalled_s(self) -> float | None:
        """For how long the worker has given no sign of life, if that is longer than it should be; else None."""
        if self._turn_started_s is None:
            return None
        last = self.engine.progress
        silent_s = self.engine.clock() - max(last.at_s, self._turn_started_s)
        return silent_s if silent_s > patience_s(last, self._stall_timeout_s) else None

    def refuse_if_unwell(self) -> None:
        """Raise the 503 of a server that had better be started anew: its engine is dead or seems to be stuck."""
        if self.is_dead:
            raise EngineDead("the engine has stopped after a fault")
        if (stalled_s := self.stalled_s) is not None:
            what = f"the engine has given no sign of life for {stalled_s:.1f} s"
            if not self._is_stall_logged:
                logger.critical("%s, computing %d tokens", what, self.engine.progress.num_tokens)
                self._is_stall_logged = True
            raise unavailable(what, "engine_stalled")

    def refuse_if_closed(self) -> None:
        """Raise the 503 that a request gets when nothing more is taken."""
        if self.is_dead:
            raise EngineDead("the engine has stopped after a fault")
        if self.is_draining:
            raise unavailable("the server is shutting down", "shutting_down")

    async def drain(self, timeout_s: float) -> None:
        """Take nothing more; return when all streams have ended, those still open after `timeout_s` with an error."""
        self.is_draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("shutdown timeout, streams cut", extra={"num_streams": self.num_open_streams})
            self._fail_all(unavailable("the server is shutting down", "shutting_down"))

    async def stop(self) -> None:
        """End the loop after the turn that is under way. Open streams get an error."""
        self.is_draining = self._is_stopped = True
        self._fail_all(unavailable("the server is shutting down", "shutting_down"))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._worker.shutdown(wait=False)
        await self._wait_for_worker()

    async def _wait_for_worker(self) -> None:
        """Whatever it computes is let end, but not waited for without end."""
        if self._at_work is None:
            return
        done, stuck = await asyncio.wait([self._at_work], timeout=WORKER_TIMEOUT_S)
        self.is_stuck = bool(stuck)
        for future in done:
            future.exception()  # nobody is left to hear of it

    def _refuse_if_full(self, num_new: int) -> None:
        max_batch = self.engine.config.max_num_seqs
        if num_new > self._max_queue + max_batch:
            limit = self._max_queue + max_batch
            raise InvalidRequest(f"the prompts times n are {num_new} sequences, limit is {limit}")
        num_waiting = self._known.num_waiting + self._num_handed_over + _num_sequences(self._inbox)
        num_places = max(0, max_batch - self._known.num_running)
        if num_waiting + num_new > self._max_queue + num_places:
            self.num_rejections += 1
            raise unavailable(f"{num_waiting} requests are waiting, limit is {self._max_queue}", "queue_full")

    async def _run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self.is_busy:
                    await self._turn()
        except Exception as error:  # ours too: nobody would step the engine any more
            self._die(error)

    async def _turn(self) -> None:
        turn = _Turn(deque(self._inbox), self._aborts, self._calls)
        self._handed_over, self._num_handed_over = turn.new, _num_sequences(turn.new)
        self._inbox, self._aborts, self._calls = [], [], []
        self._turn_started_s, self._is_stall_logged = self.engine.clock(), False
        self._at_work = asyncio.get_running_loop().run_in_executor(self._worker, self._take, turn)
        await asyncio.shield(self._at_work)  # the worker cannot be called back
        self._turn_started_s = None
        self._num_handed_over = 0
        self._known = self.engine.stats
        self._deal_out(turn)

    def _take(self, turn: _Turn) -> None:
        """In the worker thread: calls, add, abort, step. Aborts come behind adds, so that each finds its request."""
        turn.answers = [function(self.engine) for function, _ in turn.calls]
        while turn.new:
            request = turn.new[0]
            try:
                self.engine.add(request)
            except (InvalidRequest, DuplicateRequest) as error:
                turn.refused[request.request_id] = error
            turn.new.popleft()  # only now, so that at every moment either the inbox or the engine counts it
        for request_id in turn.aborts:
            self.engine.abort(request_id)
        if self.engine.has_unfinished_requests:
            turn.outputs = self.engine.step()

    def _deal_out(self, turn: _Turn) -> None:
        for (_, future), answer in zip(turn.calls, turn.answers, strict=True):
            if not future.done():  # its caller has gone, or has been told that we close
                future.set_result(answer)
        for request_id, error in turn.refused.items():
            if (stream := self._streams.get(request_id)) is not None:
                stream.open_ids.discard(request_id)
                stream.fail(error)
                stream.close()
        for output in turn.outputs:
            if (stream := self._streams.get(output.request_id)) is not None:
                stream.put(output)
                if output.is_finished:
                    self._streams.pop(output.request_id, None)
        self._settle()

    def _settle(self) -> None:
        if not self._streams:
            self._idle.set()

    def _fail_all(self, error: Exception) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error)
            stream.close()
        for future in self._unanswered:
            if not future.done():
                future.set_exception(error)

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        if not self._is_stopped and not self.is_dead:  # somebody has cancelled it
            self._die(RuntimeError("the engine loop has ended"))

    def _die(self, error: Exception) -> None:
        logger.critical("engine died", exc_info=error)
        self.is_dead = True
        self._fail_all(EngineDead("the engine has stopped after a fault"))
        if self.on_death is not None:
            self.on_death()
