"""The answer of /v1/responses: output items, and the events by which a client builds them up.

Parts come one after the other, so one item is open at a time: a message while there is text, a function call while
there are arguments. Whatever the answer, it has at least one item.
"""

import uuid
from typing import Any

from app.errors import as_api_error
from app.generation import Job
from app.parts import CallArguments, CallStart, Part, Text
from app.responses.schemas import ResponsesRequest
from app.run import shown_reason
from app.schemas.generation import Usage
from app.translation import Event
from core import RequestOutput


class ResponseWriter:
    def __init__(self, job: Job, body: ResponsesRequest) -> None:
        self._head = _head(job, body)
        self._items: list[dict[str, Any]] = []
        self._tail: dict[str, Any] = {"status": "in_progress", "usage": None}
        self._open: _Message | _FunctionCall | None = None
        self._num_events = 0

    @property
    def answer(self) -> dict[str, Any]:
        return {**self._head, "output": [*self._items], **self._tail}

    def start(self, usage: Usage) -> list[Event]:
        return [self._event(f"response.{name}", response=self.answer) for name in ("created", "in_progress")]

    def part(self, part: Part) -> list[Event]:
        match part:
            case Text(text):
                return [*self._into_message(), *self._add(text)]
            case CallStart(_, id_, name):
                return [*self._close("completed"), *self._begin(_FunctionCall(id_, name))]
            case CallArguments(_, piece):
                return self._add(piece)

    def end(self, output: RequestOutput, usage: Usage) -> list[Event]:
        is_cut = shown_reason(output) == "length"
        status = "incomplete" if is_cut else "completed"
        events = [] if self._items or self._open else self._into_message()
        events += self._close(status)
        self._tail = {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": _usage(usage),
        }
        return [*events, self._event(f"response.{status}", response=self.answer)]

    def failure(self, error: Exception) -> list[Event]:
        """An error, which is how clients that know no more of responses see it, and the response that failed."""
        told = as_api_error(error)
        self._tail = {"status": "failed", "error": {"code": "server_error", "message": told.message}, "usage": None}
        return [
            self._event("error", code=told.code, message=told.message, param=told.param),
            self._event("response.failed", response=self.answer),
        ]

    def _into_message(self) -> list[Event]:
        if isinstance(self._open, _Message):
            return []
        return [*self._close("completed"), *self._begin(_Message())]

    def _begin(self, item: "_Message | _FunctionCall") -> list[Event]:
        self._open = item
        return [self._item_event(type_, **fields) for type_, fields in item.begun()]

    def _add(self, piece: str) -> list[Event]:
        assert self._open is not None
        return [self._item_event(type_, **fields) for type_, fields in self._open.added(piece)]

    def _close(self, status: str) -> list[Event]:
        """End the open item, if there is one."""
        if self._open is None:
            return []
        events = [self._item_event(type_, **fields) for type_, fields in self._open.ended(status)]
        self._items.append(self._open.item(status))
        self._open = None
        return events

    def _item_event(self, type_: str, **fields: Any) -> Event:
        assert self._open is not None
        where = {} if "item" in fields else {"item_id": self._open.id}
        return self._event(type_, output_index=len(self._items), **where, **fields)

    def _event(self, type_: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": type_, "sequence_number": self._num_events - 1, **fields}


_Events = list[tuple[str, dict[str, Any]]]


class _Message:
    """A message in the making, of one part of text."""

    def __init__(self) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._text = ""

    def item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [_output_text(self._text)]
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def begun(self) -> _Events:
        return [
            ("response.output_item.added", {"item": self.item("in_progress")}),
            ("response.content_part.added", {"content_index": 0, "part": _output_text("")}),
        ]

    def added(self, piece: str) -> _Events:
        self._text += piece
        return [("response.output_text.delta", {"content_index": 0, "delta": piece, "logprobs": []})]

    def ended(self, status: str) -> _Events:
        return [
            ("response.output_text.done", {"content_index": 0, "text": self._text, "logprobs": []}),
            ("response.content_part.done", {"content_index": 0, "part": _output_text(self._text)}),
            ("response.output_item.done", {"item": self.item(status)}),
        ]


class _FunctionCall:
    """A call in the making."""

    def __init__(self, call_id: str, name: str) -> None:
        self.id = f"fc_{uuid.uuid4().hex}"
        self._call_id = call_id
        self._name = name
        self._arguments = ""

    def item(self, status: str) -> dict[str, Any]:
        head = {"id": self.id, "type": "function_call", "status": status, "call_id": self._call_id}
        return {**head, "name": self._name, "arguments": self._arguments}

    def begun(self) -> _Events:
        return [("response.output_item.added", {"item": self.item("in_progress")})]

    def added(self, piece: str) -> _Events:
        self._arguments += piece
        return [("response.function_call_arguments.delta", {"delta": piece})]

    def ended(self, status: str) -> _Events:
        return [
            ("response.function_call_arguments.done", {"name": self._name, "arguments": self._arguments}),
            ("response.output_item.done", {"item": self.item(status)}),
        ]


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _head(job: Job, body: ResponsesRequest) -> dict[str, Any]:
    """What was asked, as it was understood."""
    plain = body.model_dump(exclude_none=True, include={"tools", "tool_choice", "text"})
    return {
        "id": job.id,
        "object": "response",
        "created_at": job.created,
        "model": job.model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}, **plain.get("text", {})},
        "tool_choice": plain.get("tool_choice", "auto"),
        "tools": plain.get("tools", []),
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }
