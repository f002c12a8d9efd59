"""One request asked in every way that a client can ask it: completions or chat, whole or streamed.

Most reports about text are about one of these ways differing from the others, so their tests ask all four.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.app.servers import RunningServer

WAYS = ("completion", "streamed completion", "chat", "streamed chat")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Answer:
    """One choice: its text, the pieces it came in (one if it came whole), why it ended, and tokens of the request."""

    text: str
    pieces: tuple[str, ...]
    finish_reason: str
    stop_reason: str | int | None
    num_tokens: int


async def ask(server: RunningServer, way: str, **body: Any) -> Answer:
    """The only choice of an answer."""
    (answer,) = await ask_choices(server, way, **body)
    return answer


async def ask_choices(server: RunningServer, way: str, **body: Any) -> list[Answer]:
    """All choices, in order. Fails unless the answer is 200 and valid UTF-8."""
    prompt = body.pop("prompt", "x")
    is_streamed, is_chat = way.startswith("streamed"), way.endswith("chat")
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if is_chat:
        response = await server.chat(messages=[{"role": "user", "content": prompt}], **body)
    else:
        response = await server.complete(prompt=prompt, **body)
    assert 200 == response.status_code, response.text
    parts = _chunks(response) if is_streamed else [json.loads(response.content.decode("utf-8", "strict"))]
    num_choices = 1 + max(choice["index"] for part in parts for choice in part["choices"])
    return [_choice(parts, index) for index in range(num_choices)]


def _chunks(response: httpx.Response) -> list[Any]:
    """The chunks of a stream that ends as it should."""
    events = response.content.decode("utf-8", "strict").removesuffix("\n\n").split("\n\n")
    assert "data: [DONE]" == events[-1]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1] if event.startswith("data: ")]


def _choice(parts: Sequence[Any], index: int) -> Answer:
    choices = [choice for part in parts for choice in part["choices"] if choice["index"] == index]
    pieces = tuple(filter(None, map(_text, choices)))
    reasons = [choice["finish_reason"] for choice in choices]
    assert [None] * (len(reasons) - 1) == reasons[:-1], "only the last chunk of a choice has a reason"
    num_tokens = parts[-1]["usage"]["completion_tokens"]
    return Answer("".join(pieces), pieces, reasons[-1], choices[-1].get("stop_reason"), num_tokens)


def _text(choice: Any) -> str:
    text = choice["text"] if "text" in choice else choice.get("message", choice.get("delta")).get("content")
    return text or ""
