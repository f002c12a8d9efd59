"""Public reports on the edges of the service: keys, browsers, shutdown, bodies."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.app.servers import live
from tests.e2e.live import DEADLINE_S, data_lines, serving
from tests.reports.conftest import Serve

OPEN = {"/health", "/ready", "/ping", "/version", "/metrics"}
MIB = 2**20


async def test_bc_085_every_route_asks_for_the_key_but_those_documented_as_open(serve: Serve):
    """BC-085, vllm-project/vllm#58144: the key was asked for on /v1 only, and other routes led to the same handlers."""
    server = await serve(api_key=("k",))
    right = {"Authorization": "bearer k"}
    document = (await server.client.get("/openapi.json", headers=right)).json()
    routes = [(method.upper(), path) for path, operations in document["paths"].items() for method in operations]
    unlisted = [("POST", "/ping"), ("GET", "/docs"), ("GET", "/debug/kv"), ("GET", "//v1/models"), ("GET", "/v1/../x")]
    for method, path in (*routes, *unlisted):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            response = await server.client.request(method, path, headers=headers)
            if path in OPEN:
                assert 200 == response.status_code, path
            else:
                assert 401 == response.status_code, path
                assert "API key" in response.json()["error"]["message"]  # in OpenAI's shape or Anthropic's

    assert OPEN <= {path for _, path in routes} | {"/ping"}
    assert {"/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"} <= {path for _, path in routes}
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert 200 == (await server.client.get("/v1/models", headers={"Authorization": f"{scheme} k"})).status_code


async def test_bc_086_a_browsers_preflight_needs_no_key(serve: Serve):
    """BC-086, vllm-project/vllm#4862: OPTIONS came back as 401, and the browser never sent its request."""
    server = await serve(api_key=("k",))
    origin, path = {"Origin": "https://page.example"}, "/v1/chat/completions"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = await server.client.options(path, headers={**origin, **asked})
    refused = await server.client.post(path, headers=origin, json={})

    assert preflight.status_code in (200, 204)
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    assert 401 == refused.status_code
    assert "access-control-allow-origin" in refused.headers


async def test_bc_087_sigterm_lets_running_streams_end(tmp_path: Path):
    """BC-087, vllm-project/vllm#36666: at scale-down the process ended at once, and all answers in flight were lost."""
    body = {"prompt": "Once upon a time", "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stream": True}
    started = [asyncio.Event() for _ in range(5)]
    with serving(tmp_path) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S) as client:
            reading = [asyncio.create_task(data_lines(client, body, event)) for event in started]
            await asyncio.gather(*(event.wait() for event in started))
            server.terminate()
            while await _is_taken(server.url):
                pass
            streams = await asyncio.gather(*reading)
        code = await asyncio.to_thread(server.exit_code)

    for lines in streams:
        assert "data: [DONE]" == lines[-1]
        assert "length" == json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
    assert 0 == code


async def _is_taken(url: str) -> bool:
    """Whether a new client's request is answered, as before the signal has been seen to."""
    try:
        async with httpx.AsyncClient(base_url=url) as client:
            response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    except httpx.TransportError:
        return False
    assert response.status_code in (200, 503)
    return response.status_code == 200


@pytest.mark.parametrize("size_mib", [64, 192])
@pytest.mark.parametrize("declares", [True, False], ids=["content-length", "chunked"])
async def test_bc_090_a_huge_body_is_refused_before_it_is_read_whole(serve: Serve, size_mib: int, declares: bool):
    """BC-090, HKUDS/LightRAG#3544: 64 MiB stopped every answer for a minute, and the memory was not given back."""
    server = await serve()
    sent: list[int] = []
    response = await server.client.post(
        "/v1/completions",
        content=_body(size_mib, sent),
        headers={"content-length": str(size_mib * MIB)} if declares else {},
    )

    assert 413 == response.status_code
    assert len(sent) == (0 if declares else 17)  # the limit is 16 MiB, so nobody holds more
    assert 200 == (await server.client.get("/health")).status_code


async def test_bc_090_probes_are_answered_while_a_huge_body_comes():
    """BC-090, no request body limit."""
    async with live() as server:
        sent: list[int] = []
        posting = asyncio.create_task(server.client.post("/v1/completions", content=_body(192, sent)))
        num_probes = 0
        while not posting.done():
            assert 200 == (await server.client.get("/health")).status_code
            num_probes += 1
        response = await posting

    assert 413 == response.status_code
    assert num_probes >= 3


async def _body(size_mib: int, sent: list[int]) -> AsyncIterator[bytes]:
    for number in range(size_mib):
        sent.append(number)
        yield b"x" * MIB


async def test_bc_090_a_body_that_trickles_in_is_cut_by_a_timeout():
    """BC-090, no request body limit."""
    async with live(body_timeout=0.2) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        status = asyncio.create_task(reader.readline())
        while not status.done():
            writer.write(b"{")
            assert 200 == (await server.client.get("/health")).status_code
        writer.close()

    assert b"HTTP/1.1 408 " == (await status)[:13]
