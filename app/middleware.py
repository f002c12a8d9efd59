"""What happens to every request before and after its route: body limit, and the caller's request id echoed.

Plain ASGI, for streams pass through unbuffered and a client's leaving must be seen by the route.
"""

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import ApiError


class BodyLimit:
    """413 for bodies longer than the limit, before they are read whole."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            return await self._refusal().response()(scope, receive, send)
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:  # FastAPI lets its own exceptions pass while it reads a body, no others
                refusal = self._refusal()
                raise HTTPException(refusal.status, refusal.message)
            return message

        return await self._app(scope, counted, send)

    def _refusal(self) -> ApiError:
        # The connection stays open: uvicorn throws the rest of the body away as it comes. Closing on a client that is
        # still sending would reset the connection, and the client would never see the answer.
        return ApiError(413, f"the body is longer than {self._max_bytes} bytes")


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
