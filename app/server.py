"""uvicorn, taught how to leave: SIGTERM drains and the exit code says how it ended.

The order of effects on a signal: new requests get 503, the listening sockets close, open streams get
`shutdown_timeout` to end and then an error event, connections close, exit code 0. When the engine dies the same
happens without the wait, and the exit code is not zero, so that whoever supervises the process starts a new one; so it
is when the engine is stuck in a step and has to be left behind.
"""

import asyncio
import logging
import math
import os
import socket
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI
from starlette.types import Scope

from app.protocol import BoundedHeads
from app.service import Service
from app.settings import Settings

logger = logging.getLogger(__name__)

EXIT_ENGINE_DEAD = 1
EXIT_CANNOT_LISTEN = 1
_LAST_WORDS_S = 5.0  # to write error events to slow sockets


class Server(uvicorn.Server):
    """One server from `serve` to its end."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        is_endless = math.isinf(settings.shutdown_timeout)
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=BoundedHeads,
                log_config=None,
                log_level=settings.uvicorn_log_level,
                access_log=False,  # the line "request finished" says more
                lifespan="on",
                server_header=False,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                ssl_ca_certs=str(settings.ssl_ca_certs) if settings.ssl_ca_certs else None,
                ssl_cert_reqs=settings.ssl_cert_reqs,
                timeout_graceful_shutdown=None if is_endless else int(settings.shutdown_timeout + _LAST_WORDS_S),
            )
        )
        self.exit_code = 0
        self._app = app
        app.state.cut_connection = self._cut_connection
        self._shutdown_timeout_s = settings.shutdown_timeout

    @property
    def port(self) -> int:
        """The port it listens on, once started."""
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # somebody else, bound to the port as well, was the first to listen
            logger.error("cannot listen: %s", error)
            await self.lifespan.shutdown()
            sys.exit(EXIT_CANNOT_LISTEN)
        self._service.loop.on_death = self._on_death
        scheme = "https" if self.config.is_ssl else "http"
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host  # an IPv6 address
        logger.info("listening on %s://%s:%d", scheme, host, self.port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not recorded as uvicorn does: it would raise the signal again at the end, and a clean exit would look killed.
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self._drain())
        await super().shutdown(sockets)
        draining.cancel()

    async def _drain(self) -> None:
        await self._service.loop.drain(self._shutdown_timeout_s)
        await asyncio.sleep(_LAST_WORDS_S)
        for protocol in list(self.server_state.connections):
            cycle = getattr(protocol, "cycle", None)
            if cycle is None or cycle.response_complete or cycle.more_body:
                # Closed long ago; with TLS it would wait half a minute for an idle client's farewell. Or a request is
                # still to come whole, and would be refused then.
                protocol.transport.abort()

    def _cut_connection(self, scope: Scope) -> None:
        """Drop the connection of this request with whatever it has still to send."""
        for protocol in list(self.server_state.connections):
            cycle = getattr(protocol, "cycle", None)
            if cycle is not None and cycle.scope is scope:
                protocol.transport.abort()

    @property
    def is_engine_stuck(self) -> bool:
        """Whether the engine's thread is still at work although the server has ended."""
        return self._service.loop.is_stuck

    @property
    def _service(self) -> Service:
        service = self._app.state.service
        assert isinstance(service, Service)
        return service

    def _on_death(self) -> None:
        self.exit_code = EXIT_ENGINE_DEAD
        self.should_exit = True


def run(app: FastAPI, settings: Settings, sockets: list[socket.socket]) -> int:
    """Serve on these bound sockets until a signal or the engine's death; the exit code."""
    server = Server(app, settings)
    server.run(sockets)
    if server.is_engine_stuck:
        logger.critical("the engine does not come back, the process ends without it")
        logging.shutdown()
        os._exit(EXIT_ENGINE_DEAD)  # any other way out would wait for its thread
    return server.exit_code
