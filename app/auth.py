"""API keys: everything asks for one, but for the few paths that probes and scrapers need.

A plain ASGI middleware around the whole application, so that unknown paths, documentation and later routes are closed
too without being named anywhere. Behind it a key is known by its name alone (`app.keys`).
"""

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import ApiError
from app.keys import ApiKey, digest_of

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/metrics"})


class Authentication:
    """Lets through what carries one of the keys, as a bearer token or in X-Api-Key; the rest is 401."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[ApiKey], protect_metrics: bool = False) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = OPEN_PATHS - {"/metrics"} if protect_metrics else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the lifespan's: it has no headers
            return await self._app(scope, receive, send)
        name = self._name_of(sent_key(Headers(scope=scope)))
        if name is not None or path_below_root(scope) in self._open_paths:
            scope.setdefault("state", {})["key_name"] = name
            return await self._app(scope, receive, send)
        error = ApiError(
            401,
            "Incorrect or missing API key; send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        return await error.response()(scope, receive, send)

    def _name_of(self, sent: bytes | None) -> str | None:
        """The name of the key that was sent; None if it is none of ours."""
        digest = digest_of(sent or b"")
        # All of them, and digests: neither which key it is nor how much of it fits shows in the time taken.
        names = [key.name for key in self._keys if hmac.compare_digest(digest, key.digest)]
        return names[0] if names else None


def sent_key(headers: Headers) -> bytes | None:
    """The key in a request's headers, by OpenAI's custom or by Anthropic's; None if there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    # Not whatever Python takes for white space: the last byte of an "à" is among it, read as Latin-1.
    key = token.strip(" \t") if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.encode("latin-1") or None


def path_below_root(scope: Scope) -> str:
    """The path that routes see: what a proxy has put before it (`--root-path`) is taken off, by Starlette's rule."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if path == root or path.startswith(root + "/") else path
