"""Clients that leave at any moment leave nothing behind: no request, no block, no connection's task."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.e2e.live import LiveServer

NUM_STREAMS = 300
NUM_AT_ONCE = 30
SHORT, LONG = "Once upon a time", "word " * 250

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Drop = Callable[[Connection, bytes, random.Random], Awaitable[None]]


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> LiveServer:
    """So small that most who come have to wait, long prompts take many steps and some are preempted."""
    flags = {"--max-num-seqs": 6, "--max-num-batched-tokens": 64, "--num-kv-blocks": 200}
    return serve_module(*(str(part) for pair in flags.items() for part in pair))


def request(url: httpx.URL, **body: Any) -> bytes:
    content = json.dumps({"stream": True, "max_tokens": 1500, "ignore_eos": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content


async def in_mid_request(connection: Connection, data: bytes, rng: random.Random) -> None:
    await send(connection, data[: rng.randrange(1, len(data))])


async def before_the_first_byte(connection: Connection, data: bytes, rng: random.Random) -> None:
    """Waiting, or in the middle of its prompt, or just about to be answered: wherever it is by then."""
    await send(connection, data)
    for _ in range(rng.randrange(200)):
        await asyncio.sleep(0)


async def in_mid_stream(connection: Connection, data: bytes, rng: random.Random) -> None:
    await send(connection, data)
    for _ in range(rng.randrange(1, 25)):
        await connection[0].readuntil(b"\n\n")


async def without_reading(connection: Connection, data: bytes, rng: random.Random) -> None:
    """It gets its first bytes and closes with the rest unread, which resets the connection."""
    await send(connection, data)
    await connection[0].readexactly(1)


async def send(connection: Connection, data: bytes) -> None:
    connection[1].write(data)
    await connection[1].drain()


DROPS: tuple[Drop, ...] = (in_mid_request, before_the_first_byte, in_mid_stream, without_reading)


async def open_and_drop(server: LiveServer, drop: Drop, number: int, limit: asyncio.Semaphore) -> None:
    rng, url = random.Random(number), httpx.URL(server.url)
    data = request(url, prompt=f"{number} {rng.choice([SHORT, LONG])}", n=rng.choice([1, 1, 1, 3]))
    async with limit:
        connection = await asyncio.open_connection(url.host, url.port)
        await drop(connection, data, rng)
        connection[1].transport.abort()


def test_300_streams_dropped_at_random_points_leave_nothing(server: LiveServer):
    before = server.wait_until_idle()
    drops = random.Random(3).choices(DROPS, k=NUM_STREAMS)

    async def drop_all() -> None:
        limit = asyncio.Semaphore(NUM_AT_ONCE)
        await asyncio.gather(*(open_and_drop(server, drop, number, limit) for number, drop in enumerate(drops)))

    asyncio.run(drop_all())
    after = server.wait_until_idle()

    assert 0 == after.total("octavo:kv_blocks_used")
    assert after.total("octavo:kv_blocks") == after.total("octavo:kv_blocks_free")
    assert {"server_load": 0} == server.http.get("/load").json()
    num_aborted = _moved(before, after, "vllm:request_success_total", finished_reason="abort")
    counts = Counter(drops)
    # Whoever got a byte was running, and all of them left before their end.
    assert num_aborted >= counts[in_mid_stream] + counts[without_reading]


def test_after_that_it_answers_as_ever(server: LiveServer):
    answer = server.complete(prompt=SHORT, max_tokens=5, temperature=0, ignore_eos=True)

    assert (5, "length") == (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"])


def _moved(before: Any, after: Any, name: str, **labels: str) -> float:
    return float(after.total(name, **labels) - before.total(name, **labels))
