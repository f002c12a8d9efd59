"""Faults on purpose, for those who test how their clients, gateways and dashboards bear them.

A request says in its field `fault` what is to go wrong. A middleware sees the body as the route reads it, and every
stream's events pass through `faulty` on their way out; so all endpoints have all faults, and none knows of them. What
the engine suffers is real: its thread is held up, its loop dies as of a lost block, its free blocks are taken.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import SERVER_ERROR, ApiError, ClientGone, unsupported
from app.middleware import cut_connection
from core import Engine, EngineDead, InvalidRequest, InvariantViolation

if TYPE_CHECKING:
    from app.engine_loop import EngineLoop

logger = logging.getLogger(__name__)
MAX_SECONDS = 30.0  # for one fault; the engine thread cannot be called back from a stall
MAX_FAULTS = 16
EVENT_END = b"\n\n"
FLAG = "--enable-fault-injection"


class Fault(BaseModel):
    """One fault: what, and before which event of a streamed answer; before event 0 is when the request has arrived.

    `delay` waits once and `slow` before each event from there on; `error` ends the answer with an error, `disconnect`
    cuts the connection; `stall_engine` holds up everybody's steps, `kill_engine` ends the engine and so the process;
    `fill_kv_pool` takes all free blocks, so that one request goes on and all others wait or are preempted.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    type: Literal["delay", "slow", "error", "disconnect", "stall_engine", "kill_engine", "fill_kv_pool"]
    after_events: Annotated[int, Field(ge=0)] = 0
    seconds: Annotated[float, Field(ge=0, le=MAX_SECONDS)] = 1.0


Faults = Fault | Annotated[list[Fault], Field(max_length=MAX_FAULTS)]
_ADAPTER: TypeAdapter[list[Fault]] = TypeAdapter(Annotated[list[Fault], Field(max_length=MAX_FAULTS)])


def parse_faults(value: Any) -> list[Fault]:
    """A body's `fault`: one or several. Raises InvalidRequest."""
    if value is None:
        return []
    try:
        return _ADAPTER.validate_python(value if isinstance(value, list) else [value])
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise InvalidRequest(f"fault {where}: {problem['msg']}", "fault") from None


class FaultInjection:
    """The middleware. Without the flag it refuses the field, which would otherwise be ignored silently."""

    def __init__(self, app: ASGIApp, *, is_enabled: bool) -> None:
        self._app = app
        self._is_enabled = is_enabled
        self._kv_pool = KVPool()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        body = bytearray()

        async def listening() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                body.extend(message.get("body", b""))
                if not message.get("more_body"):
                    await self._arrived(scope, bytes(body))
                    body.clear()
            return message

        return await self._app(scope, listening, send)

    async def _arrived(self, scope: Scope, body: bytes) -> None:
        """The request is there whole, and its route is about to begin. What is raised here is its answer."""
        faults = _faults_in(body)
        if not faults:
            return
        if not self._is_enabled:
            raise unsupported("fault", f"is only taken by a server started with {FLAG}")
        plan = _Plan(faults, scope, self._kv_pool)
        scope.setdefault("state", {})["fault_plan"] = plan
        await plan.strike(0)


def _faults_in(body: bytes) -> list[Fault]:
    if b'"fault"' not in body:  # most bodies need no second parser
        return []
    try:
        asked = json.loads(body)
        value, is_streamed = asked.get("fault"), asked.get("stream") is True
    except (ValueError, AttributeError, RecursionError):
        return []  # no JSON, or no object: the route will say so
    faults = parse_faults(value)
    late = next((fault.after_events for fault in faults if fault.after_events), None)
    if late is not None and not is_streamed:  # it would never strike, and a test pass for the wrong reason
        raise InvalidRequest(f"fault has after_events {late}, without stream it can only be 0", "fault")
    return faults


def faulty(scope: Scope, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """A stream's events, with the faults of its request among them."""
    plan: _Plan | None = scope.get("state", {}).get("fault_plan")
    return events if plan is None else plan.among(events)


class _Plan:
    """The faults of one request, each to strike before the event of its number."""

    def __init__(self, faults: Sequence[Fault], scope: Scope, kv_pool: "KVPool") -> None:
        self._faults = faults
        self._scope = scope
        self._kv_pool = kv_pool

    async def among(self, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        num_events = 0
        async with aclosing(events):
            async for data in events:
                for event in data.removesuffix(EVENT_END).split(EVENT_END):  # a step's events come as one
                    is_comment = event.startswith(b":")
                    if num_events and not is_comment:  # before event 0 it struck on arrival
                        await self.strike(num_events)
                    num_events += not is_comment
                    yield event + EVENT_END

    async def strike(self, num_events: int) -> None:
        """Let happen what is due before the event of this number."""
        for fault in self._faults:
            is_due = fault.after_events == num_events
            if is_due or (fault.type == "slow" and fault.after_events < num_events):
                logger.warning("fault injected", extra={"type": fault.type, "num_events": num_events})
                await self._happen(fault)

    async def _happen(self, fault: Fault) -> None:
        loop: EngineLoop = self._scope["app"].state.service.loop
        match fault.type:
            case "delay" | "slow":
                await asyncio.sleep(fault.seconds)
            case "error":
                raise ApiError(500, "an injected fault", kind=SERVER_ERROR, code="injected_fault")
            case "disconnect":
                cut_connection(self._scope)
                raise ClientGone
            case "stall_engine":
                await loop.call(partial(_stall, seconds=fault.seconds))
            case "kill_engine":
                await loop.call(_die)
            case "fill_kv_pool":
                await self._kv_pool.fill(loop, fault.seconds)


def _stall(engine: Engine, seconds: float) -> None:
    time.sleep(seconds)


def _die(engine: Engine) -> None:
    raise InvariantViolation("killed by an injected fault")


class KVPool:
    """Keeps the engine's free blocks from it until the last of those who wanted that has had enough."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_wanted = 0  # by so many it is to be full

    async def fill(self, loop: "EngineLoop", seconds: float) -> None:
        """Returns when the pool is full; it stays so for `seconds`."""
        self._num_wanted += 1
        try:
            await loop.call(Engine.hold_free_blocks)
        finally:  # whoever leaves before it is full has asked for it all the same
            task = asyncio.create_task(self._empty_later(loop, seconds), name="full KV pool")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _empty_later(self, loop: "EngineLoop", seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._num_wanted -= 1
        if not self._num_wanted:
            with suppress(EngineDead, ApiError):  # the server ends, and the blocks with it
                await loop.call(Engine.release_held_blocks)
