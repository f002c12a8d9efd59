"""What the APIs that are translations have in common: bodies that become chat requests, parts that become events.

A translated body is checked twice: as what it is, then as the chat request that it means. What is wrong with the latter
is told in the words of the former.
"""

import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response

from app.chat import Chat
from app.errors import ApiError, unsupported
from app.generation import in_words, renamed
from app.parts import Part
from app.run import Run, shown_reason
from app.schemas.chat import ChatRequest
from app.schemas.generation import GenerationRequest, Usage
from app.service import Service
from app.sse import KEEP_ALIVE, EventStream, one_line, while_connected
from app.tools import ToolUse
from core import InvalidRequest, RequestOutput

Event = Mapping[str, Any]
_ONLY_IN_CHAT = ("prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids")


def extensions(body: GenerationRequest) -> dict[str, Any]:
    """The fields that all our requests have in common, as they were sent.

    Raises ApiError for those that ask for what only chat's answers have a place for.
    """
    for name in _ONLY_IN_CHAT:
        if getattr(body, name) is not None and getattr(body, name) is not False:  # 0 asks for something
            raise unsupported(name, "asks for what this API's answers have no place for")
    if body.stream_options is not None and any(dict(body.stream_options).values()):
        raise unsupported("stream_options", "has nothing to choose here")
    return body.model_dump(include=set(GenerationRequest.model_fields), exclude_unset=True, by_alias=True)


def chat_request(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """The chat request of these fields. `names` are what the body calls them, where that is something else."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *_renamed_path(problem["loc"], names))} for problem in error.errors()]
        raise RequestValidationError(problems) from None


def _renamed_path(path: tuple[int | str, ...], names: Mapping[str, str]) -> tuple[int | str, ...]:
    return (names.get(str(path[0]), path[0]), *path[1:])


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """What is refused within is told with the names of the body."""
    try:
        yield
    except InvalidRequest as error:
        raise renamed(error, names) from error
    except ApiError as error:
        error.message = in_words(error.message, error.param, names)
        error.param = names.get(error.param or "", error.param)
        raise


class EventWriter(Protocol):
    """Writes one answer, as a series of events and, once it has ended, as a whole."""

    def start(self, usage: Usage) -> list[Event]:
        """Events before the first part."""

    def part(self, part: Part) -> list[Event]:
        """What one more part adds."""

    def end(self, output: RequestOutput, usage: Usage) -> list[Event]:
        """Events behind the last part; `output` is the last one."""

    @property
    def answer(self) -> Mapping[str, Any]:
        """All that was written."""

    def failure(self, error: Exception) -> list[Event]:
        """What tells the client that nothing more comes."""


async def respond(
    request: Request, service: Service, chat: Chat, writer: EventWriter, *, is_streamed: bool | None
) -> Response:
    """The answer to a request, as its body wants it."""
    headers = {"x-request-id": chat.job.trace_id, "request-id": chat.job.trace_id}
    run = service.run(chat.job)
    if is_streamed:
        events = named_events(run, writer, chat.tools)
        return EventStream(events, headers, failure=lambda error: _frames(writer.failure(error)), end=b"")
    await while_connected(request.receive, write_whole(run, writer, chat.tools))
    return Response(dump(writer.answer), headers=headers, media_type="application/json")


async def named_events(run: Run, writer: EventWriter, tools: ToolUse) -> AsyncGenerator[bytes, None]:
    """The events of an answer of one choice, part by part, and signs of life while there are none."""
    reader, is_started = tools.reader(), False
    with run:
        async for pairs in run:
            events = writer.start(run.usage()) if pairs and not is_started else []
            is_started = is_started or bool(pairs)
            for _, output in pairs:
                parts = [*reader.feed(output.text), *(reader.finish() if output.is_finished else ())]
                events += [event for part in parts for event in writer.part(part)]
                events += writer.end(output, run.usage()) if output.is_finished else []
            if events:
                yield _frames(events)
                run.mark_shown()
            elif not pairs:
                yield KEEP_ALIVE


async def write_whole(run: Run, writer: EventWriter, tools: ToolUse) -> None:
    """Has the writer write an answer of which all is known."""
    with run:
        (output,) = await run.collect()
    reason = shown_reason(output)
    assert reason is not None
    writer.start(run.usage())
    for part in tools.parts(output.text, reason):
        writer.part(part)
    writer.end(output, run.usage())


def _frames(events: Iterable[Event]) -> bytes:
    """Each event under its type as its name."""
    return b"".join(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), one_line(dump(event))) for event in events)


def dump(value: Any) -> bytes:
    # Half of a surrogate pair, which a body can carry and which we may have to give back, becomes an escape again.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
