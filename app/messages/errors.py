"""Errors as Anthropic's clients know them, for the paths that are theirs.

Whatever refuses a request - a route, a body that does not validate, a missing key, a body too long - writes OpenAI's
error object. On its way out the answer is written anew here, in one place, so that none of them knows two shapes.
"""

import json
from typing import Any, Literal

from pydantic import BaseModel
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.auth import path_below_root
from app.errors import ApiError

PATH = "/v1/messages"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicError(BaseModel):
    """What every failure is told in."""

    type: Literal["error"]
    error: ErrorDetail


# For the OpenAPI document.
RESPONSES: dict[int | str, dict[str, Any]] = {status: {"model": AnthropicError} for status in (*_TYPES, 499, 500)}


def error_body(error: ApiError) -> dict[str, Any]:
    return _body(error.status, error.message)


def _body(status: int, message: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class AnthropicErrors:
    """Rewrites refusals on the paths of the Messages API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (path_below_root(scope) + "/").startswith(f"{PATH}/"):
            return await self._app(scope, receive, send)
        return await self._app(scope, receive, _Rewriting(send).send)


class _Rewriting:
    """Passes answers on; of a refusal it waits for the whole body, and sends another."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._refusal: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._refusal = message
        elif self._refusal is None or message["type"] != "http.response.body":
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._send_refusal(self._refusal)

    async def _send_refusal(self, start: Message) -> None:
        body = self._body
        if body:  # a client that has gone is answered with none
            body = json.dumps(_body(start["status"], json.loads(body)["error"]["message"])).encode()
            MutableHeaders(scope=start)["content-length"] = str(len(body))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})
