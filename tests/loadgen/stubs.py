"""Servers that say exactly what a test wants, over real sockets; and clocks that pass only when told.

`ScriptedServer` answers completions from a script of frames. With a `SteppedClock` shared with the client, each
frame has the arrival time that the script gives it, however slow the machine is. `VirtualTimeLoop` is an event loop
whose time jumps to the next timer, for tests of scheduling without a network.
"""

import asyncio
import json
import selectors
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn


class SteppedClock:
    """Stands still until the server sends at a time, and moves on only after the client has read it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._was_read = asyncio.Event()

    def __call__(self) -> float:
        self._was_read.set()
        return self.now

    async def send_at(self, time_s: float, send: Callable[[], Awaitable[None]]) -> None:
        self.now = time_s
        self._was_read.clear()
        await send()
        await self._was_read.wait()


@dataclass(frozen=True)
class Frame:
    """Bytes of the stream, and when they arrive on the stepped clock."""

    data: bytes
    time_s: float = 0.0


def event(payload: dict[str, Any] | str, time_s: float = 0.0) -> Frame:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return Frame(f"data: {text}\n\n".encode(), time_s)


def chunk(text: str, **fields: Any) -> dict[str, Any]:
    """A completion chunk; token_ids go into the choice, the rest beside it."""
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": None}
    if "token_ids" in fields:
        choice["token_ids"] = fields.pop("token_ids")
    return {"id": "cmpl-0", "object": "text_completion", "choices": [choice], **fields}


def usage(num_prompt: int, num_output: int, num_cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


DONE = event("[DONE]")


def plain_answer(num_prompt: int, num_output: int, *, tokens_per_chunk: int = 1) -> list[Frame]:
    """A whole, ordinary stream with token ids and a usage frame."""
    sizes = [min(tokens_per_chunk, num_output - at) for at in range(0, num_output, tokens_per_chunk)]
    frames = [event(chunk("x" * size, token_ids=[120] * size)) for size in sizes]
    return [*frames, event({"choices": [], "usage": usage(num_prompt, num_output)}), DONE]


Script = Callable[[dict[str, Any]], Sequence[Frame] | int]


@dataclass
class ScriptedServer:
    """An ASGI application. `script` gets a request's body and says the frames of the stream, or a status to refuse
    it with. `bodies` and `headers` keep what was asked."""

    script: Script
    clock: SteppedClock | None = None
    metrics: Iterator[str] = field(default_factory=lambda: iter(()))
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive()).get("more_body") or message.get("body"):
            body += message["body"]
            if not message.get("more_body"):
                break
        match scope["path"]:
            case "/v1/models":
                await _answer(send, 200, json.dumps({"object": "list", "data": [{"id": "stub-model"}]}))
            case "/metrics":
                text = next(self.metrics, None)
                await _answer(send, 404 if text is None else 200, text or "")
            case _:
                self.bodies.append(json.loads(body))
                self.headers.append({key.decode(): value.decode("latin-1") for key, value in scope["headers"]})
                await self._complete(self.script(self.bodies[-1]), send)

    async def _complete(self, frames: Sequence[Frame] | int, send: Any) -> None:
        if isinstance(frames, int):
            await _answer(send, frames, json.dumps({"error": {"message": "refused by the script"}}))
            return
        await send(_start(200, b"text/event-stream"))
        for frame in frames:
            await self._send_frame(frame, send)
        await send({"type": "http.response.body", "body": b""})

    async def _send_frame(self, frame: Frame, send: Any) -> None:
        async def write() -> None:
            await send({"type": "http.response.body", "body": frame.data, "more_body": True})

        if self.clock is None:
            await write()
        else:
            await self.clock.send_at(frame.time_s, write)


def _start(status: int, content_type: bytes) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type)]}


async def _answer(send: Any, status: int, text: str) -> None:
    await send(_start(status, b"text/plain"))
    await send({"type": "http.response.body", "body": text.encode()})


def _listen() -> tuple[socket.socket, str]:
    # Listening before the server runs: a client that is early waits in the backlog, so nobody has to poll.
    # The protocol is named because asyncio turns Nagle's algorithm off only where it is.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


def _uvicorn(app: Any) -> uvicorn.Server:
    return uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))


@asynccontextmanager
async def serve(app: ScriptedServer) -> AsyncIterator[str]:
    """The base URL of the app, served in this event loop."""
    listener, url = _listen()
    server = _uvicorn(app)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield url
    finally:
        server.should_exit = True
        await task


@contextmanager
def serve_in_thread(app: ScriptedServer) -> Iterator[str]:
    """The same for a client that brings its own event loop."""
    listener, url = _listen()
    server = _uvicorn(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join()


@asynccontextmanager
async def serve_bytes(answer: bytes, *, is_reset: bool) -> AsyncIterator[str]:
    """A bare socket that sends these bytes to any request and then closes, or resets, the connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        if is_reset:
            raw = writer.get_extra_info("socket")
            # Lingering for zero seconds makes close() send RST.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            writer.transport.abort()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.elapsed_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("everybody waits and no timer is set: the test would hang")
        self.elapsed_s += max(0.0, timeout)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Waiting takes no time: the clock jumps to the next timer."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.elapsed_s


def run_virtually(main: Callable[[], Any]) -> Any:
    """Run a coroutine function to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())
