"""A client that costs next to nothing, since it runs on the cores it measures: bytes are counted, not parsed.

All streams are one asyncio protocol each over a plain socket. A stream notes when its first event came and keeps the
tail of what it read; when it has ended, its tokens are those that the usage in the tail says.
"""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

TAIL_BYTES = 4096
DEADLINE_S = 600.0
_USAGE = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')


@dataclass(frozen=True)
class Work:
    """What is asked for: all prompts at once, so many new tokens each, greedy, the end of sequence ignored."""

    prompts: Sequence[Sequence[int]]
    num_new_tokens: int


@dataclass(frozen=True)
class Outcome:
    """Seconds from the first request until all are answered, and until each one's first token; tokens of all."""

    seconds: float
    first_token_s: Sequence[float]
    num_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class EngineFailed(Exception):
    """An engine did not do the work."""


def request_bytes(host: str, model: str, prompt: Sequence[int], num_new_tokens: int) -> bytes:
    """One streaming completion, in the words that OpenAI's, vLLM's and llama.cpp's servers share."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body, separators=(",", ":")).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + data


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self._head = b""
        self.first_s: float | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.first_s is None:
            self._head += data
            if b"data: {" in self._head:
                self.first_s = time.perf_counter()
        self._tail = (self._tail + data)[-TAIL_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def num_tokens(self) -> int:
        """Raises EngineFailed when the answer did not end as it should."""
        found = _USAGE.findall(self._tail)
        if self.first_s is None or not found or b"[DONE]" not in self._tail:
            raise EngineFailed((self._head[:500] + b" ... " + self._tail[-500:]).decode("utf-8", "replace"))
        return int(found[-1])


async def _run(host: str, port: int, requests: Sequence[bytes]) -> Outcome:
    loop = asyncio.get_running_loop()
    started_s = time.perf_counter()
    made = await asyncio.gather(
        *(loop.create_connection(lambda r=request: _Stream(r), host, port) for request in requests)  # type: ignore[misc]
    )
    streams = [stream for _, stream in made]
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(stream.ended for stream in streams))
    seconds = time.perf_counter() - started_s
    num_tokens = sum(stream.num_tokens() for stream in streams)
    first_token_s = [stream.first_s - started_s for stream in streams if stream.first_s is not None]
    return Outcome(seconds, first_token_s, num_tokens)


def run_over_http(host: str, port: int, model: str, work: Work) -> Outcome:
    """Send all of the work at once. Raises EngineFailed."""
    requests = [request_bytes(host, model, prompt, work.num_new_tokens) for prompt in work.prompts]
    return asyncio.run(_run(host, port, requests))
