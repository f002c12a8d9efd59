"""The answer of /v1/messages: content blocks, and the events by which a client builds them up.

Parts come one after the other, so one block is open at a time: text, or a tool's use while there are arguments.
"""

import json
from typing import Any

from app.errors import as_api_error
from app.generation import Job
from app.messages.errors import error_body
from app.parts import CallArguments, CallStart, Part, Text
from app.run import shown_reason
from app.schemas.generation import Usage
from app.translation import Event
from core import RequestOutput


class MessageWriter:
    def __init__(self, job: Job) -> None:
        self._head = {"id": job.id, "type": "message", "role": "assistant", "model": job.model}
        self._blocks: list[dict[str, Any]] = []
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._usage: dict[str, Any] = {}
        self._is_open = False
        self._pieces: list[str] = []  # of the open block

    @property
    def answer(self) -> dict[str, Any]:
        return {**self._head, "content": [*self._blocks], **self._end, "usage": self._usage}

    def start(self, usage: Usage) -> list[Event]:
        self._usage = _usage(usage)
        return [{"type": "message_start", "message": self.answer}]

    def part(self, part: Part) -> list[Event]:
        match part:
            case Text(text):
                is_open = self._is_open and self._blocks[-1]["type"] == "text"
                begun = [] if is_open else self._begin({"type": "text", "text": ""})
                return [*begun, self._delta(text, {"type": "text_delta", "text": text})]
            case CallStart(_, id_, name):
                return self._begin({"type": "tool_use", "id": id_, "name": name, "input": {}})
            case CallArguments(_, piece):
                return [self._delta(piece, {"type": "input_json_delta", "partial_json": piece})]

    def end(self, output: RequestOutput, usage: Usage) -> list[Event]:
        events = self._close()
        self._end = _stop(output, has_calls=any(block["type"] == "tool_use" for block in self._blocks))
        self._usage = _usage(usage)
        return [
            *events,
            {"type": "message_delta", "delta": self._end, "usage": self._usage},
            {"type": "message_stop"},
        ]

    def failure(self, error: Exception) -> list[Event]:
        return [error_body(as_api_error(error))]

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        events = self._close()
        self._blocks.append(block)
        self._is_open, self._pieces = True, []
        return [*events, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}]

    def _delta(self, piece: str, delta: dict[str, Any]) -> Event:
        self._pieces.append(piece)
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[Event]:
        """End the open block, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        self._blocks[-1] = _filled(self._blocks[-1], "".join(self._pieces))
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _filled(block: dict[str, Any], text: str) -> dict[str, Any]:
    if block["type"] == "text":
        return {**block, "text": text}
    try:
        return {**block, "input": json.loads(text)}
    except ValueError:  # cut by the limit: the shape has no place for half an object, stop_reason tells
        return block


def _stop(output: RequestOutput, *, has_calls: bool) -> dict[str, Any]:
    if shown_reason(output) == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(output.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Here cached tokens are no input tokens; the sum of all is the prompt."""
    num_cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage.completion_tokens,
    }
