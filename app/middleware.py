"""What happens to every request before and after its route: its body and its reader bounded, its id echoed.

Plain ASGI, for streams pass through unbuffered and a client's leaving must be seen by the route.
"""

import asyncio
import logging

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import ApiError
from app.json_size import JsonSize
from app.timers import LazyTimer

logger = logging.getLogger(__name__)

# Of an answer's last piece: more than that is sent as if more would come, so that its end waits for its reader.
MAX_UNWATCHED_BYTES = 2**16


def cut_connection(scope: Scope) -> None:
    """Drop the connection of a request with whatever is still to be sent; where there is no server there is no way.

    Closing it would first wait for the client to read what it does not read.
    """
    if "app" in scope and (cut := getattr(scope["app"].state, "cut_connection", None)) is not None:
        cut(scope)


class BodyLimits:
    """413 for bodies with too much in them, before they are read whole; 408 for those that take too long to come."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        body, headers = _Body(receive, self._max_bytes, self._timeout_s), Headers(scope=scope)
        declared = headers.get("content-length", "")
        try:
            if declared.isdecimal() and int(declared) > self._max_bytes:
                # The connection stays open: uvicorn throws the rest of the body away as it comes. Closing on a client
                # that is still sending would reset the connection, and the client would never see the answer.
                return await ApiError(413, body.too_long).response()(scope, receive, send)
            return await self._app(scope, body.receive, send)
        finally:
            if not body.is_complete and (declared not in ("", "0") or "transfer-encoding" in headers):
                # Answered without it. By then it has come, or another request, or nobody means it well.
                asyncio.get_running_loop().call_later(self._timeout_s, cut_connection, scope)


class _Body:
    """One request's body on its way in; the exceptions are those that FastAPI lets pass while it reads one."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float) -> None:
        self.is_complete = False
        self.too_long = f"the body is longer than {max_bytes} bytes"
        self._receive = receive
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._size = JsonSize()
        self._timeout_s = timeout_s
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s

    async def receive(self) -> Message:
        try:
            async with asyncio.timeout_at(None if self.is_complete else self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            late = f"the body was not complete within {self._timeout_s:g} s"
            raise HTTPException(408, late, {"Connection": "close"}) from None
        self.is_complete = not message.get("more_body", False)
        self._count(message.get("body", b""))
        return message

    def _count(self, piece: bytes) -> None:
        if (place := piece.find(b"\0")) >= 0:  # the parser would read UTF-16 too, which is not counted right
            place += self._num_bytes
            raise HTTPException(400) from UnicodeDecodeError("utf-8", b"", place, place + 1, "a NUL")
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_bytes:
            raise HTTPException(413, self.too_long)
        self._size.feed(piece)
        if (excess := self._size.excess) is not None:
            raise HTTPException(413, f"the body has {excess}")


class ReaderLimit:
    """Cuts the connection of a client that takes nothing of its answer for too long: it would hold it for ever."""

    def __init__(self, app: ASGIApp, *, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        loop = asyncio.get_running_loop()
        since_s: float | None = None  # of the send under way

        def left_s() -> float | None:
            return None if since_s is None else since_s + self._timeout_s - loop.time()

        async def send_in_time(message: Message) -> None:
            nonlocal since_s
            since_s = loop.time()
            timer.watch()
            try:
                await send(message)
            finally:
                since_s = None

        async def send_watched(message: Message) -> None:
            if len(message.get("body", b"")) > MAX_UNWATCHED_BYTES and not message.get("more_body", False):
                await send_in_time({**message, "more_body": True})
                message = {**message, "body": b""}
            await send_in_time(message)

        limit = asyncio.timeout(None)
        timer = LazyTimer(left_s, lambda: limit.reschedule(loop.time()))
        try:
            async with limit:
                await self._app(scope, receive, send_watched)
        except TimeoutError:
            if not limit.expired():
                raise
            logger.warning("connection is cut: its client reads nothing", extra={"path": scope["path"]})
            cut_connection(scope)
            await asyncio.sleep(0)  # for the transport to tell uvicorn, which would miss the end of the answer
        finally:
            timer.stop()


class RequestIdEcho:
    """Gives the caller's X-Request-Id back on every answer, errors too, unless the route has set one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id") if scope["type"] == "http" else None
        if not given:
            return await self._app(scope, receive, send)

        async def echoing(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault("x-request-id", given)
            await send(message)

        return await self._app(scope, receive, echoing)
