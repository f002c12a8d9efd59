"""Answers of completions and chat: whole, or as a stream of chunks."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Protocol

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from app.run import Run
from app.schemas.base import dumped
from app.schemas.generation import Chunk, StreamOptions
from app.sse import KEEP_ALIVE, EventStream, event, while_connected
from core import RequestOutput

OBFUSCATION_BYTES = 64  # padded events are a multiple of this long


class ChunkWriter(Protocol):
    """Writes one endpoint's answer to one job."""

    def answer(self, outputs: Sequence[RequestOutput], totals: Mapping[str, Any]) -> BaseModel:
        """The whole of it, from the whole output of each choice."""

    def deltas(self, index: int, output: RequestOutput, extra: Mapping[str, Any]) -> Iterator[Chunk]:
        """What an output adds to its choice, `extra` fields on each chunk; nothing while all of it is held back."""

    def totals_chunk(self, totals: Mapping[str, Any]) -> BaseModel:
        """The chunk without choices that ends a stream whose client asked for the totals."""


async def respond(
    request: Request, run: Run, writer: ChunkWriter, options: StreamOptions, *, is_streamed: bool | None
) -> Response:
    """The answer to a request, as its body wants it."""
    headers = {"x-request-id": run.job.trace_id}
    if is_streamed:
        return EventStream(chunk_events(run, writer, options), headers)
    answer = await while_connected(request.receive, _whole(run, writer))
    return Response(answer, headers=headers, media_type="application/json")


async def _whole(run: Run, writer: ChunkWriter) -> bytes:
    with run:
        outputs = await run.collect()
    totals = run.totals()

    def write() -> bytes:
        return dumped(writer.answer(outputs, totals))

    # With log-probabilities an answer may have a hundred thousand entries, and everybody would wait for them.
    return await asyncio.to_thread(write) if run.job.wants_logprobs else write()


async def chunk_events(run: Run, writer: ChunkWriter, options: StreamOptions) -> AsyncGenerator[bytes, None]:
    """The events of a job: its chunks step by step, signs of life while there are none, the totals if asked for."""
    extra: dict[str, Any] = {"usage": None} if options.include_usage else {}
    with run:
        async for pairs in run:
            if options.continuous_usage_stats:
                extra = {"usage": run.usage()}
            chunks = [chunk for index, output in pairs for chunk in writer.deltas(index, output, extra)]
            if options.include_obfuscation:
                chunks = [obscured(chunk) for chunk in chunks]
            if chunks:
                yield b"".join(map(event, chunks))
                run.mark_shown()
            elif not pairs:
                yield KEEP_ALIVE
        if options.include_usage:
            yield event(writer.totals_chunk(run.totals()))


def obscured(chunk: Chunk) -> Chunk:
    """The chunk with random padding: its event's length, which anyone on the way can see, says little of its text."""
    chunk.obfuscation = ""
    num_missing = -len(event(chunk)) % OBFUSCATION_BYTES
    chunk.obfuscation = secrets.token_hex(OBFUSCATION_BYTES)[:num_missing]
    return chunk
