"""Errors as clients know them: OpenAI's error object and the right status, whatever went wrong.

Every failure becomes `{"error": {message, type, param, code}}`. Official clients decide on retries by the status and
show `message`; `code` is a string or null, never the status. There is no 422: a body that does not validate is 400.
"""

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core import ContextLengthExceeded, EngineDead, InvalidRequest

logger = logging.getLogger(__name__)

INVALID = "invalid_request_error"
SERVER_ERROR = "server_error"
MAX_SHOWN = 64  # characters of a wrong value that are quoted
MAX_SHOWN_PATH = 256
MAX_PROBLEMS = 5  # problems of one body that are listed; a list of a million wrong items has a million


class ApiError(Exception):
    """An answer that is not a success: status, and the fields of OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        # In ASCII: a message may quote half of a surrogate pair, which JSON can carry and UTF-8 cannot.
        return Response(json.dumps(self.body), self.status, self.headers, media_type="application/json")


class ClientGone(Exception):
    """The client closed the connection before its answer was complete; nobody reads what is sent now."""


def unavailable(message: str, code: str, *, retry_after_s: int = 1) -> ApiError:
    """503: later, or on another replica, the same request may succeed."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, kind="service_unavailable", code=code, headers=headers)


def rate_limited(message: str, *, kind: str, retry_after_s: int = 1) -> ApiError:
    """429: this caller has had its share. `kind` is what ran out, as OpenAI says it: requests or tokens."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, kind=kind, code="rate_limit_exceeded", headers=headers)


def unsupported(param: str, why: str = "is not supported by this server") -> ApiError:
    """400: a field we know and do not honour. Ignoring it would give a wrong answer silently."""
    return ApiError(400, f"'{param}' {why}", param=param, code="unsupported_parameter")


def unknown_field(param: str) -> ApiError:
    """400: a field that nobody knows, where the server is told to take none."""
    shown = shortened(param)
    return ApiError(400, f"Unknown parameter: '{shown}'", param=shown, code="unknown_parameter")


def model_not_found(name: str) -> ApiError:
    return ApiError(404, f"The model '{shortened(name)}' does not exist", param="model", code="model_not_found")


def shortened(text: str, limit: int = MAX_SHOWN) -> str:
    """What a client wrote, as it is quoted back: an answer does not grow with a wrong value."""
    return text if len(text) <= limit else text[:limit] + "..."


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of any exception; of our own mistakes no more than that there was one."""
    match error:
        case ApiError():
            return error
        case ContextLengthExceeded():
            return ApiError(400, str(error), param=error.param, code="context_length_exceeded")
        case InvalidRequest():
            return ApiError(400, str(error), param=error.param)
        case EngineDead():
            return unavailable("the engine has stopped after a fault", "engine_dead", retry_after_s=5)
        case _:
            return ApiError(500, "The server had an error while processing your request", kind=SERVER_ERROR)


def install(app: FastAPI) -> None:
    """Make every failure that a route foresees an error object; `Answer500` does so with the others."""
    for kind in (ApiError, InvalidRequest, EngineDead):
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(RequestValidationError, _handle_validation)
    app.add_exception_handler(HTTPException, _handle_http)
    app.add_exception_handler(ClientGone, _handle_gone)


class Answer500:
    """Answers what no route foresaw, and raises it again when the answer has begun.

    A middleware, since Starlette would ask a handler for `Exception` only outside of all middlewares: its answer would
    have neither the request's id nor the headers without which a browser does not show it to its script.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        is_started = False

        async def watching(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, watching)
        except Exception as error:
            if is_started:
                raise
            await (await _handle(Request(scope), error))(scope, receive, send)


async def _handle(request: Request, error: Exception) -> Response:
    api_error = as_api_error(error)
    if api_error.status == 500 and not isinstance(error, ApiError):
        logger.error("request failed", exc_info=error, extra={"path": request.url.path})
    return api_error.response()


async def _handle_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    if any(problem["loc"] == ("body",) for problem in problems) and not _is_json(request):
        found = request.headers.get("content-type")
        return ApiError(400, f"Content-Type must be application/json, it is {found!r}").response()
    if problems[0]["type"] == "json_invalid" and (why := _why_encoded(request)) is not None:
        return ApiError(400, f"The body is not valid JSON: {why}").response()
    return ApiError(400, _describe(problems), param=_param(problems[0])).response()


async def _handle_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ClientGone):  # while its body was read: FastAPI makes a 400 of whatever happens then
        return await _handle_gone(request, error)
    if isinstance(error.__cause__, ApiError | InvalidRequest | EngineDead):
        return await _handle(request, error.__cause__)
    message, path = str(error.detail), shortened(request.url.path, MAX_SHOWN_PATH)
    if error.status_code == 404:
        message = f"Unknown path: {request.method} {path}"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed on {path}"
    elif isinstance(error.__cause__, ValueError | RecursionError):  # of the parser
        message = f"The body is not valid JSON: {_why_unreadable(request, error.__cause__)}"
    return ApiError(error.status_code, message, headers=error.headers).response()


def _why_encoded(request: Request) -> str | None:
    """What to say of a body that may well be JSON, but compressed; None of one that is sent as it is."""
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() in ("", "identity"):
        return None
    return f"Content-Encoding {shortened(coding)!r} is not supported, send the body as it is"


def _why_unreadable(request: Request, error: ValueError | RecursionError) -> str:
    """Of a body that the parser did not get through, rather than found a mistake in."""
    match error:
        case RecursionError():
            return "it is nested too deeply"
        case UnicodeDecodeError():
            return _why_encoded(request) or f"it is not {error.encoding.upper()} at byte {error.start}"
        case _:
            return f"a number in it has more than {sys.get_int_max_str_digits()} digits"


async def _handle_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # read by nobody but our own metrics; the number is nginx's


def _is_json(request: Request) -> bool:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


def _param(problem: Mapping[str, Any]) -> str | None:
    """The field's name, without "body" before it and without what a union calls its members behind it."""
    names = [part for part in problem["loc"] if part != "body"]
    return names[0] if names and isinstance(names[0], str) else None


def _field(problem: Mapping[str, Any]) -> str:
    """The field and its value as the client wrote it, but for objects and lists, which may be the whole body."""
    name, value = shortened(".".join(map(str, problem["loc"][1:])), 2 * MAX_SHOWN), problem.get("input")
    if isinstance(value, dict | list) or problem["type"] == "missing":
        return name
    return f"{name} is {shortened(json.dumps(value))}"


def _describe(problems: Sequence[Mapping[str, Any]]) -> str:
    if problems[0]["type"] == "json_invalid":
        what = problems[0]["ctx"]["error"].removesuffix(" at")
        return f"The body is not valid JSON: {what} at character {problems[0]['loc'][-1]}"
    if problems[0]["loc"] == ("body",):
        return "The body must be a JSON object"
    parts = [f"{_field(problem)}: {problem['msg']}" for problem in problems[:MAX_PROBLEMS]]
    more = len(problems) - MAX_PROBLEMS
    return "; ".join(parts) + (f"; and {more} more" if more > 0 else "")
