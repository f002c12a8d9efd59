"""Server-sent events as OpenAI's clients read them, and the watch for clients that leave.

An event is one `data:` line. The status and the first event leave together, when the first event is there: until
then a failure still has a real status code. Later failures are an event with an error object. Every stream ends with
`data: [DONE]`: an end without it looks like success to official clients, and truncation would be silent. There are no
`id:` and no `event:` lines: next to a comment, an `id:` makes the official Python client fail.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.errors import ClientGone, as_api_error
from app.faults import faulty
from app.schemas.base import dumped

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
T = TypeVar("T")
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_LINE_ENDS = {end.encode(): b"\\u%04x" % ord(end) for end in "\x85\u2028\u2029"}


def one_line(data: bytes) -> bytes:
    """JSON in which no reader sees the end of a line.

    Python's `str.splitlines`, and `iter_lines` of httpx by it, take three characters for one that events do not.
    """
    if data.isascii():  # most is
        return data
    for end, escape in _LINE_ENDS.items():
        data = data.replace(end, escape)
    return data


def event(chunk: BaseModel) -> bytes:
    """One chunk as one event."""
    return b"data: " + one_line(dumped(chunk)) + b"\n\n"


def error_event(error: Exception) -> bytes:
    return b"data: " + json.dumps(as_api_error(error).body).encode() + b"\n\n"


class EventStream(Response):
    """Sends what a generator of bytes yields, ready-made events or comments, and `end` behind them.

    `failure` writes what tells the client of an exception that comes when the stream has begun.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        *,
        failure: Callable[[Exception], bytes] = error_event,
        end: bytes = DONE,
    ) -> None:
        super().__init__(headers={**HEADERS, **headers}, media_type="text/event-stream")
        del self.headers["content-length"]  # of the empty body that Response assumed
        self._events = events
        self._failure = failure
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await while_connected(receive, self._send_all(send, faulty(scope, self._events)))

    async def _send_all(self, send: Send, stream: AsyncGenerator[bytes, None]) -> None:
        is_started = False
        async with aclosing(stream) as events:
            try:
                async for data in events:
                    if not is_started:
                        await self._start(send)
                        is_started = True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                end = self._end
            except ClientGone:
                raise
            except Exception as error:
                if not is_started:
                    raise
                told = as_api_error(error)
                is_ours = told.status == 500 and told is not error
                logger.warning("stream ends with an error: %s", told, exc_info=error if is_ours else None)
                end = self._failure(error) + self._end
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client leaves first.

    The request's body must have been read. `work` has cleaned up when this returns.

    Raises:
        ClientGone: the client left first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
