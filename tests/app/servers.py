"""Servers for tests: in this process, with the real application and the real engine.

`make_engine` runs no model: scripted requests say what they are told, others get token 0 at every step. Scheduling,
blocks, stops and streams are the real ones.
"""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from app.factory import create_app, load
from app.server import Server
from app.service import Service
from app.settings import Settings
from core import ByteTokenizer, Engine
from core.model.config import ModelConfig
from core.step import Execute, ModelRunnerOutput, SchedulerOutput, count_only

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
MODEL = ModelConfig(
    vocab_size=257,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=4096,
)


def make_settings(**fields: Any) -> Settings:
    """Settings that no variable of the person running the tests can change."""
    return Settings(_env_prefix="NO_SUCH_VARIABLE_", **fields)  # type: ignore[call-arg]


def make_engine(execute: Execute = count_only, *, clock: Callable[[], float] = time.monotonic, **fields: Any) -> Engine:
    """The real engine on a byte tokenizer, 64 blocks of 4, unless told otherwise; scripts are taken."""
    config = make_settings(**{"num_kv_blocks": 64, "block_size": 4, "enable_scripts": True, **fields}).engine_config()
    return Engine(replace(config, speculative=None), MODEL, ByteTokenizer(CHAT_TEMPLATE), execute, clock=clock)


@cache
def tiny_engine() -> Engine:
    """The embedded pair, loaded once: its requests do not hear of each other. It drafts unless one says otherwise."""
    return load(make_settings())


class Gate:
    """An `execute` that computes nothing and waits before each step until it is let through.

    Enter it inside whatever runs the engine: leaving opens it, so that the engine can end also when a test has failed.
    """

    def __init__(self) -> None:
        self.num_arrived = 0
        self._permits = threading.Semaphore(0)
        self._is_open = False

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.num_arrived += 1
        if not self._is_open:
            self._permits.acquire()
        return count_only(plan)

    def let_through(self, num_steps: int) -> None:
        self._permits.release(num_steps)

    def open(self) -> None:
        self._is_open = True
        self._permits.release()

    async def until_arrived(self, num_steps: int) -> None:
        """Until so many steps in all have come to the gate."""
        while self.num_arrived < num_steps:
            await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.open()


@dataclass(frozen=True)
class RunningServer:
    """A server that runs, a client for it, and what is behind it."""

    client: httpx.AsyncClient
    service: Service
    port: int | None = None

    @property
    def engine(self) -> Engine:
        return self.service.engine

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json=body)

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=body)

    async def metrics(self) -> dict[str, float]:
        """Samples by name, and by name{label=value} for each label that is not the server's own."""
        await asyncio.sleep(0)  # a scrape in process waits for nothing, and who asks in a loop waits for others
        response = await self.client.get("/metrics")
        return dict(_samples(response.raise_for_status().text))

    async def until_idle(self) -> dict[str, float]:
        """The first scrape that finds nothing running, nothing waiting and no block in use; for the test's timeout."""
        while True:
            found = await self.metrics()
            if not any(found[name] for name in IDLE_GAUGES):
                return found


IDLE_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "octavo:kv_blocks_used")


def _samples(text: str) -> Any:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            shown = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
            yield sample.name + (f"{{{shown}}}" if shown else ""), sample.value


@asynccontextmanager
async def in_process(engine: Engine | None = None, **fields: Any) -> AsyncIterator[RunningServer]:
    """The application without a socket. Streams arrive whole: httpx's transport keeps them until their end."""
    engine = engine or make_engine(**fields)
    app = create_app(make_settings(**{"enable_scripts": True, **fields}), engine)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield RunningServer(client, app.state.service)


@asynccontextmanager
async def live(engine: Engine | None = None, **fields: Any) -> AsyncIterator[RunningServer]:
    """A server on a port of the loopback interface; leaving shuts it down as SIGTERM would."""
    engine = engine or make_engine(**fields)
    settings = make_settings(**{"shutdown_timeout": 5, "enable_scripts": True, **fields})
    app = create_app(settings, engine)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # listens at once: whoever connects early waits there
        server = Server(app, settings)
        port = listener.getsockname()[1]
        task = asyncio.create_task(server.serve([listener]))
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
                (await client.get("/health")).raise_for_status()
                yield RunningServer(client, app.state.service, port)
        finally:
            server.should_exit = True
            await task
