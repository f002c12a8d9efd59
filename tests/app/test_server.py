"""The server's end: by a signal, with streams open, and when the engine dies."""

import asyncio
import json
import math
import signal
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.engine_loop import EngineLoop
from app.factory import create_app
from app.listening import bind
from app.server import EXIT_CANNOT_LISTEN, EXIT_ENGINE_DEAD, Server
from core import Engine, InvariantViolation
from core.step import ModelRunnerOutput, SchedulerOutput
from tests.app.servers import Gate, make_engine, make_settings

BODY = {"prompt": "p", "max_tokens": 5, "stream": True}


@asynccontextmanager
async def listening(engine: Engine, **fields: Any) -> AsyncIterator[tuple[Server, int, "asyncio.Task[None]"]]:
    """A server, its port and its task; whoever enters has to end it."""
    settings = make_settings(**fields)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Server(create_app(settings, engine), settings)
        task = asyncio.create_task(server.serve([listener]))
        yield server, listener.getsockname()[1], task
        await task


@asynccontextmanager
async def serving(
    engine: Engine, **fields: Any
) -> AsyncIterator[tuple[Server, httpx.AsyncClient, "asyncio.Task[None]"]]:
    async with (
        listening(engine, **fields) as (server, port, task),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        (await client.get("/health")).raise_for_status()
        yield server, client, task
        await task


def app_loop(server: Server) -> EngineLoop:
    loop = server.config.app.state.service.loop
    assert isinstance(loop, EngineLoop)
    return loop


async def read(client: httpx.AsyncClient) -> str:
    async with client.stream("POST", "/v1/completions", json=BODY) as response:
        return (await response.aread()).decode()


async def test_of_two_servers_bound_to_a_port_the_second_to_listen_ends(caplog: pytest.LogCaptureFixture):
    """Two that start at once: neither listens while the other binds."""
    settings = make_settings()
    [first] = await asyncio.to_thread(bind, "127.0.0.1", 0)
    [second] = await asyncio.to_thread(bind, "127.0.0.1", first.getsockname()[1])
    with first, second:
        first.listen()
        server = Server(create_app(settings, make_engine()), settings)
        with pytest.raises(SystemExit) as ended:
            await server.serve([second])

    assert EXIT_CANNOT_LISTEN == ended.value.code
    assert "cannot listen" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_open_streams_end_and_the_exit_is_clean(number: signal.Signals):
    gate = Gate()
    async with serving(make_engine(gate), shutdown_timeout=30) as (server, client, task), gate:
        streams = [asyncio.create_task(read(client)) for _ in range(3)]
        while app_loop(server).num_open_streams < 3:
            await asyncio.sleep(0)

        signal.raise_signal(number)
        await asyncio.to_thread(_until_refused, client)
        gate.open()
        texts = await asyncio.gather(*streams)
        await task

    assert [True] * 3 == [text.endswith("data: [DONE]\n\n") for text in texts]
    assert [True] * 3 == ['"finish_reason":"length"' in text for text in texts]
    assert 0 == server.exit_code


def _until_refused(client: httpx.AsyncClient) -> None:
    """Until the server accepts no connection any more."""
    while True:
        try:
            socket.create_connection((client.base_url.host, client.base_url.port)).close()
        except ConnectionRefusedError:
            return


async def test_streams_may_be_given_all_the_time_there_is():
    gate = Gate()
    gate.let_through(1)
    async with serving(make_engine(gate), shutdown_timeout=math.inf) as (server, client, task), gate:
        stream = asyncio.create_task(read(client))
        await gate.until_arrived(2)
        server.should_exit = True
        gate.open()
        text = await stream
        await task

    assert text.endswith("data: [DONE]\n\n")
    assert "error" not in text
    assert 0 == server.exit_code


async def test_streams_that_do_not_end_in_time_are_told():
    gate = Gate()
    gate.let_through(1)
    async with serving(make_engine(gate), shutdown_timeout=0) as (server, client, task), gate:
        stream = asyncio.create_task(read(client))
        await gate.until_arrived(2)
        server.should_exit = True
        text = await stream
        gate.open()
        await task

    *_, error, done, _ = text.split("\n\n")
    assert "shutting_down" == json.loads(error.removeprefix("data: "))["error"]["code"]
    assert "data: [DONE]" == done
    assert 0 == server.exit_code


class DiesAtStep:
    """An `execute` that finds its books out of order at a certain step."""

    def __init__(self, step: int, gate: Gate) -> None:
        self._step = step
        self._gate = gate

    def __call__(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        result = self._gate(plan)
        if self._gate.num_arrived == self._step:
            raise InvariantViolation("a book does not balance")
        return result


async def test_when_the_engine_dies_the_stream_is_told_and_the_exit_code_is_not_zero():
    gate = Gate()
    gate.open()
    async with serving(make_engine(DiesAtStep(3, gate))) as (server, client, task), gate:
        text = await read(client)
        await task

    *_, error, done, _ = text.split("\n\n")
    assert "engine_dead" == json.loads(error.removeprefix("data: "))["error"]["code"]
    assert "data: [DONE]" == done
    assert 'finish_reason":"' not in text
    assert EXIT_ENGINE_DEAD == server.exit_code != 0


@pytest.mark.parametrize("stream", [True, False])
async def test_the_connection_of_a_client_that_reads_nothing_is_cut(stream: bool):
    """Far more is sent than sockets hold; a connection that was merely closed would wait for its reader."""
    content = json.dumps({"prompt": "p", "script": ["x" * 500_000] * 24, "max_tokens": 24, "stream": stream}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    async with serving(make_engine(), enable_scripts=True, send_timeout=0) as (server, client, _):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head.encode() + b"\r\n\r\n" + content)
        await writer.drain()
        while 'handler="/v1/completions"' not in (await client.get("/metrics")).text:
            pass
        while len(server.server_state.connections) > 1:  # the other is the one that asks for metrics
            await asyncio.sleep(0)
        writer.close()
        server.should_exit = True


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for the loopback interface that vouches for itself, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    files = directory / "certificate.pem", directory / "key.pem"
    names = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(files[1])]
    command = ["openssl", "req", "-x509", "-days", "1", *key, *names, "-out", str(files[0])]
    subprocess.run(command, check=True, capture_output=True)
    return files


def tls_client(certificate: tuple[Path, Path], *, shows_its_own: bool = False) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=certificate[0])
    if shows_its_own:
        context.load_cert_chain(*certificate)
    return httpx.AsyncClient(verify=context, timeout=30)


async def test_with_a_certificate_the_server_speaks_https(
    certificate: tuple[Path, Path], caplog: pytest.LogCaptureFixture
):
    fields = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1]}
    with caplog.at_level("INFO"):
        async with listening(make_engine(), **fields) as (server, port, _):
            async with tls_client(certificate) as client:
                answer = await client.post(f"https://127.0.0.1:{port}/v1/completions", json={"prompt": "p"})
                with pytest.raises(httpx.RemoteProtocolError):
                    await client.get(f"http://127.0.0.1:{port}/health")
            server.should_exit = True

    assert 200 == answer.status_code
    assert f"listening on https://0.0.0.0:{port}" in caplog.text


async def test_an_address_of_ipv6_is_told_as_urls_have_it(caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO"):
        async with listening(make_engine(), host="::1") as (server, port, _):
            server.should_exit = True

    assert f"listening on http://[::1]:{port}" in caplog.text


async def test_an_idle_client_does_not_hold_up_the_end(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    """It says no farewell; TLS would wait 30 s for it."""
    monkeypatch.setattr("app.server._LAST_WORDS_S", 0.0)
    fields = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1]}
    async with tls_client(certificate) as client, listening(make_engine(), **fields) as (server, port, task):
        await client.get(f"https://127.0.0.1:{port}/health")
        server.should_exit = True
        async with asyncio.timeout(20):
            await task

    assert 0 == server.exit_code


async def test_a_request_that_is_still_to_come_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch):
    """It would be waited for as long as open streams are, to be refused."""
    monkeypatch.setattr("app.server._LAST_WORDS_S", 0.0)
    async with listening(make_engine(), shutdown_timeout=100) as (server, port, task):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        while not any(protocol.cycle for protocol in server.server_state.connections):
            await asyncio.sleep(0)
        server.should_exit = True
        async with asyncio.timeout(20):
            await task
        writer.close()

    assert 0 == server.exit_code


async def test_clients_may_have_to_show_a_certificate_too(certificate: tuple[Path, Path]):
    fields = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1]}
    fields |= {"ssl_ca_certs": certificate[0], "ssl_cert_reqs": 2}
    async with listening(make_engine(), **fields) as (server, port, _):
        url = f"https://127.0.0.1:{port}/health"
        async with tls_client(certificate, shows_its_own=True) as client:
            assert 200 == (await client.get(url)).status_code
        async with tls_client(certificate) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(url)
        server.should_exit = True
