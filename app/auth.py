"""API keys: everything asks for one, but for the few paths that probes and scrapers need.

A plain ASGI middleware around the whole application, so that unknown paths, documentation and later routes are closed
too without being named anywhere.
"""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/metrics"})


class Authentication:
    """Lets through what carries one of the keys as a bearer token; the rest is 401."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], protect_metrics: bool = False) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = OPEN_PATHS - {"/metrics"} if protect_metrics else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the lifespan's: it has no headers
            return await self._app(scope, receive, send)
        if scope["path"] in self._open_paths or self._has_key(scope):
            # Not the key itself: whoever logs the state must not log a secret.
            scope.setdefault("state", {})["api_key"] = _sent_digest(scope).hex()
            return await self._app(scope, receive, send)
        error = ApiError(
            401,
            "Incorrect or missing API key; send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        return await error.response()(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme = Headers(scope=scope).get("authorization", "").partition(" ")[0]
        digest = _sent_digest(scope)
        # All of them, and digests: neither which key it is nor how much of it fits shows in the time taken.
        return bool(sum(hmac.compare_digest(digest, known) for known in self._digests)) and scheme.lower() == "bearer"


def _sent_digest(scope: Scope) -> bytes:
    key = Headers(scope=scope).get("authorization", "").partition(" ")[2]
    return _digest(key.strip().encode("latin-1"))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
