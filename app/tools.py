"""What a chat may call: its tools, checked, and what follows from `tool_choice` for prompt, answer and finish reason.

| tool_choice | the model is told of the tools | its answer is read as | finish reason of calls |
|---|---|---|---|
| none (the default without tools) | no | text | |
| auto (the default with tools) | yes | text with calls in the Hermes form | tool_calls |
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from app.errors import unsupported
from app.hermes import CallReader
from app.parts import ArgumentsReader, Call, PartReader, TextReader, assembled
from app.schemas import ChatFinishReason, ChatRequest, FinishReason, NamedToolChoice, Tool
from core import InvalidRequest

Choice = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request, as it wants them used.

    `definitions` are what the model is told of, in the form that templates take; `named` is the function that has to
    be called, where the choice names one.
    """

    choice: Choice = "none"
    definitions: Sequence[Mapping[str, Any]] = ()
    names: Collection[str] = field(default_factory=frozenset)
    named: str | None = None
    is_parallel: bool = True

    @property
    def must_call(self) -> bool:
        return self.choice in ("required", "named")

    def reader(self) -> PartReader:
        """Reads one choice's text as it comes."""
        return self._reader(announces_early=True)

    def read(self, text: str, reason: FinishReason) -> tuple[str, list[Call]]:
        """Text and calls of a whole choice: a call that is not there as a whole counts only where the limit cut it."""
        reader = self._reader(announces_early=reason == "length")
        return assembled([*reader.feed(text), *reader.finish()])

    def _reader(self, *, announces_early: bool) -> PartReader:
        if self.choice == "none":
            return TextReader()
        if self.named is not None:
            return ArgumentsReader(self.named)
        return CallReader(self.names, is_parallel=self.is_parallel, announces_early=announces_early)

    def reason(self, reason: FinishReason, *, has_calls: bool) -> ChatFinishReason:
        """The finish reason as clients know it: a call that was cut ends with length, one that was named with stop."""
        return "tool_calls" if has_calls and reason == "stop" and self.named is None else reason


def tool_use(body: ChatRequest) -> ToolUse:
    """The tools of a body. Raises InvalidRequest naming the field that cannot be."""
    if body.tools is None:
        if body.tool_choice not in (None, "none"):
            raise InvalidRequest("tool_choice needs tools", "tool_choice")
        return ToolUse()
    names = [tool.function.name for tool in body.tools]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise InvalidRequest(f"tools has two functions of the name {doubled!r}", "tools")
    choice, named = _choice(body, names)
    if choice == "none":  # not told of them, it has no reason to write what nobody reads
        return ToolUse()
    return ToolUse(
        choice=choice,
        definitions=definitions(body.tools),
        names=frozenset(names),
        named=named,
        is_parallel=body.parallel_tool_calls is not False,
    )


def _choice(body: ChatRequest, names: Sequence[str]) -> tuple[Choice, str | None]:
    if isinstance(body.tool_choice, NamedToolChoice):
        name = body.tool_choice.function.name
        if name not in names:
            raise InvalidRequest(f"tool_choice names {name[:64]!r}, tools has no such function", "tool_choice")
        raise unsupported("tool_choice", "with a named function is not supported by this server")
    if body.tool_choice == "required":
        raise unsupported("tool_choice", "required is not supported by this server")
    return body.tool_choice or "auto", None


def definitions(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as templates take them, with what was set and in OpenAI's order, which models were trained on."""
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]
