"""The HTTP request under way: what its route and its run find out is gathered here, and written down once at its end.

One line in the log, one count in the metrics and, if asked for, one trace, for every request: the middleware makes the
record, whatever serves the request adds to it with `note` and `trace`, without being handed it from one to the other.
"""

import logging
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.metrics import SILENT_HANDLERS, handler_of
from app.tracing import TracedSequence

if TYPE_CHECKING:
    from app.service import Service

logger = logging.getLogger(__name__)

MAX_SHOWN_CHARACTERS = 256  # of what clients choose
CLIENT_GONE = 499  # it left before its answer began; the number is nginx's


@dataclass(slots=True)
class Access:
    """What is known of one HTTP request so far."""

    scope: Scope
    fields: dict[str, object] = field(default_factory=dict)  # of its line in the log
    status: int = CLIENT_GONE
    num_bytes_in: int = 0
    num_bytes_out: int = 0
    started_s: float = field(default_factory=time.monotonic)
    sequences: list[TracedSequence] = field(default_factory=list)  # of its trace

    @property
    def key_name(self) -> str | None:
        name: str | None = self.scope.get("state", {}).get("key_name")
        return name


_current: ContextVar[Access | None] = ContextVar("access", default=None)


def note(**fields: object) -> None:
    """Add fields to the line that the request under way will be in the log."""
    if (access := _current.get()) is not None:
        access.fields.update(fields)


def trace(sequences: Iterable[TracedSequence]) -> None:
    """Add sequences to the trace of the request under way."""
    if (access := _current.get()) is not None:
        access.sequences.extend(sequences)


def key_name() -> str | None:
    """The name of the API key that the request under way came with."""
    access = _current.get()
    return None if access is None else access.key_name


class RecordRequests:
    """The middleware around all that may answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        access = Access(scope)

        async def counting_receive() -> Message:
            message = await receive()
            access.num_bytes_in += len(message.get("body", b""))
            return message

        async def counting_send(message: Message) -> None:
            access.status = message.get("status", access.status)
            access.num_bytes_out += len(message.get("body", b""))
            await send(message)

        token = _current.set(access)
        try:
            await self._app(scope, counting_receive, counting_send)
        except Exception:
            access.status = 500  # its answer had begun, and is cut off
            raise
        finally:
            _current.reset(token)
            _write_down(scope, access)


def _write_down(scope: Scope, access: Access) -> None:
    service: Service = scope["app"].state.service
    seconds = time.monotonic() - access.started_s
    service.metrics.http.observe(
        scope, access.status, num_in=access.num_bytes_in, num_out=access.num_bytes_out, seconds=seconds
    )
    line, handler = _line(scope, access, seconds), handler_of(scope)
    logger.log(logging.DEBUG if handler in SILENT_HANDLERS else logging.INFO, "request finished", extra=line)
    if service.tracing is not None and handler not in SILENT_HANDLERS:
        service.tracing.record(line, handler, Headers(scope=scope), access.sequences, access.started_s)


def _line(scope: Scope, access: Access, seconds: float) -> dict[str, object]:
    about_client = {
        "trace_id": Headers(scope=scope).get("x-request-id", "")[:MAX_SHOWN_CHARACTERS],
        "key": access.key_name,
    }
    return {
        "method": scope["method"],
        "path": scope["path"][:MAX_SHOWN_CHARACTERS],
        "status": access.status,
        "duration_s": round(seconds, 4),
        **{name: value for name, value in about_client.items() if value},
        **access.fields,
    }
