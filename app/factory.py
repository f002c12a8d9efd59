"""Makes the FastAPI application: routes, middlewares, and a lifespan around the engine."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from app import chat, completions, embeddings, errors, logs, models, ops
from app.access import RecordRequests
from app.auth import Authentication
from app.faults import FaultInjection
from app.messages import routes as messages
from app.messages.errors import AnthropicErrors
from app.middleware import BodyLimits, ReaderLimit, RequestIdEcho
from app.openapi import openapi
from app.responses import routes as responses
from app.service import Service, package_version
from app.settings import Settings
from core import EMBEDDED_MODEL, Engine, load_engine

logger = logging.getLogger(__name__)


def load(settings: Settings) -> Engine:
    """The engine of these settings; blocks until it can answer. Raises ModelLoadError, InvalidRequest."""
    model = settings.model
    if model != EMBEDDED_MODEL:
        from app.hub import resolve_model  # an HTTP client and a progress bar, which the embedded model does not need

        model = str(resolve_model(model, cache_dir=settings.cache_dir))
    return load_engine(settings.engine_config(model))


def create_app(settings: Settings | None = None, engine: Engine | None = None) -> FastAPI:
    """The application. The model loads when it starts, in a thread, unless an engine is handed over."""
    settings = settings or Settings()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = Service(settings, await asyncio.to_thread(load, settings) if engine is None else engine)
        app.state.service = service
        service.start()
        logs.log_start(service.engine, settings.model_names)
        try:
            yield
        finally:
            await service.stop()

    # No redirects between /x and /x/: a scraper that is sent elsewhere gives up.
    app = FastAPI(title="Octavo", version=package_version(), lifespan=lifespan, redirect_slashes=False)
    app.root_path = settings.root_path  # requests may have it before their path, or not: proxies do either
    for module in (completions, chat, responses, messages, embeddings, models, ops):
        app.include_router(module.router)
    errors.install(app)
    app.openapi = lambda: openapi(app)  # type: ignore[method-assign]
    _add_middlewares(app, settings)
    return app


def _add_middlewares(app: FastAPI, settings: Settings) -> None:
    """Innermost first. CORS is outermost: a browser's preflight has no key, and must see the headers on a 401 too."""
    app.add_middleware(FaultInjection, is_enabled=settings.enable_fault_injection)
    app.add_middleware(ReaderLimit, timeout_s=settings.send_timeout)
    if settings.api_keys:
        app.add_middleware(Authentication, keys=settings.api_keys, protect_metrics=settings.protect_metrics)
    app.add_middleware(BodyLimits, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout)
    app.add_middleware(errors.Answer500)
    app.add_middleware(AnthropicErrors)
    app.add_middleware(RecordRequests)
    app.add_middleware(RequestIdEcho)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=["x-request-id", "request-id", "retry-after"],  # what clients read besides the body
    )
