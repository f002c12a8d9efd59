"""How things end: a client that leaves, a server that is told to leave, an engine that cannot go on."""

import asyncio
import json
from typing import Any

import httpx

from tests.e2e.conftest import Serve
from tests.e2e.live import DEADLINE_S, LiveServer, data_lines

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}


def test_a_client_that_leaves_a_stream_frees_its_blocks(tiny: LiveServer):
    before = tiny.wait_until_idle()
    with tiny.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        assert "data: " == next(response.iter_lines())[:6]
        assert tiny.scrape().total("octavo:kv_blocks_used") > 0
    after = tiny.wait_until_idle()

    assert after.total("octavo:kv_blocks") == after.total("octavo:kv_blocks_free")
    assert 1 == _moved(before, after, "vllm:request_success_total", finished_reason="abort")
    assert LONG["max_tokens"] > _moved(before, after, "vllm:generation_tokens_total")


def test_a_client_that_leaves_without_waiting_for_its_answer_frees_its_blocks(tiny: LiveServer):
    before = tiny.wait_until_idle()
    body = json.dumps(LONG).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    asyncio.run(_ask_and_leave(tiny, head + b"content-length: %d\r\n\r\n" % len(body) + body))
    after = tiny.wait_until_idle()

    assert after.total("octavo:kv_blocks") == after.total("octavo:kv_blocks_free")
    assert 1 == _moved(before, after, "vllm:request_success_total", finished_reason="abort")


async def _ask_and_leave(server: LiveServer, request: bytes) -> None:
    url = httpx.URL(server.url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(request)
    await writer.drain()
    await asyncio.to_thread(server.wait_for, lambda scrape: 1 == scrape.total("vllm:num_requests_running"))
    writer.close()
    await writer.wait_closed()


async def test_sigterm_lets_five_open_streams_end_and_exits_with_0(serve: Serve):
    server = serve()
    body = {**LONG, "max_tokens": 120, "stream": True}
    started = [asyncio.Event() for _ in range(5)]
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as client:
        reading = [asyncio.create_task(data_lines(client, body, event)) for event in started]
        await asyncio.gather(*(event.wait() for event in started))
        server.terminate()
        streams = await asyncio.gather(*reading)

    for lines in streams:
        assert "data: [DONE]" == lines[-1]
        assert "length" == json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
    assert 0 == await asyncio.to_thread(server.exit_code)


async def test_streams_that_outlast_the_shutdown_timeout_end_with_an_error(serve: Serve):
    server = serve("--shutdown-timeout", "0")
    started = asyncio.Event()
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as client:
        reading = asyncio.create_task(data_lines(client, {**LONG, "stream": True}, started))
        await started.wait()
        server.terminate()
        lines = await reading

    assert "data: [DONE]" == lines[-1]
    assert "shutting_down" == json.loads(lines[-2].removeprefix("data: "))["error"]["code"]
    assert 0 == await asyncio.to_thread(server.exit_code)


async def test_an_engine_that_is_stuck_does_not_keep_the_process(serve: Serve):
    server = serve("--shutdown-timeout", "0", "--enable-fault-injection")
    server.complete(prompt="so that the engine has made its first step", max_tokens=1)
    fault = {"type": "stall_engine", "seconds": 30, "after_events": 1}
    started = asyncio.Event()
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as client:
        reading = asyncio.create_task(data_lines(client, {**LONG, "stream": True, "fault": fault}, started))
        await started.wait()
        await asyncio.to_thread(_wait_for_health, server, 503)
        server.terminate()
        lines = await reading

    assert "data: [DONE]" == lines[-1]
    assert "shutting_down" == json.loads(lines[-2].removeprefix("data: "))["error"]["code"]
    assert 1 == await asyncio.to_thread(server.exit_code)
    assert "no sign of life" in server.log


def _wait_for_health(server: LiveServer, status: int) -> None:
    while status != server.http.get("/health").status_code:
        pass


async def test_an_engine_that_dies_tells_its_streams_and_ends_the_process(serve: Serve):
    server = serve("--speculative-config", "null", module="tests.e2e.dying_server")
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as client:
        lines = await data_lines(client, {**LONG, "stream": True}, asyncio.Event())

    assert "data: [DONE]" == lines[-1]
    assert "engine_dead" == json.loads(lines[-2].removeprefix("data: "))["error"]["code"]
    assert 1 == await asyncio.to_thread(server.exit_code)
    assert "no memory left" in server.log


def test_an_engine_killed_on_purpose_ends_the_process_as_one_that_died(serve: Serve):
    server = serve("--enable-fault-injection")
    fault = {"type": "kill_engine", "after_events": 1}
    *_, last = server.events("/v1/completions", {**LONG, "max_tokens": 50, "fault": fault})

    assert "engine_dead" == last["error"]["code"]
    assert 1 == server.exit_code()


def _moved(before: Any, after: Any, name: str, **labels: str) -> float:
    return after.total(name, **labels) - before.total(name, **labels)
