"""What a chat may call: its tools, checked, and what follows from `tool_choice` for prompt, output and finish reason.

| tool_choice | the model is told of the tools | its output is held to | and read as | finish reason of calls |
|---|---|---|---|---|
| none (the default without tools) | no | nothing | text | |
| auto (the default with tools) | yes | nothing; calls to schemas if one is strict | text and calls | tool_calls |
| required | yes | calls in the form, their arguments to the schemas | calls | tool_calls |
| a function by name | yes | the schema of its parameters | its arguments | stop |

The form of calls is that of `app.hermes`. Where the output has a form of its own too (`response_format`), a model left
to itself answers in that form or calls.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.hermes import TEXT, CallReader, grammar
from app.parts import ArgumentsReader, Part, PartReader, TextReader
from app.schemas.chat import ChatFinishReason, ChatRequest, FunctionDefinition, NamedToolChoice, Tool
from app.schemas.generation import FinishReason
from core import Engine, InvalidRequest, StructuredOutput, lark_json

Choice = Literal["none", "auto", "required", "named"]
ANY_OBJECT = {"type": "object"}
MAX_SEARCH_S = 2.0  # for the function whose schema cannot be enforced
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request, as it wants them used: none that the model is not to know of.

    `named` is the function that has to be called, where the choice names one.
    """

    choice: Choice = "none"
    tools: Sequence[Tool] = ()
    named: str | None = None
    is_parallel: bool = True

    @property
    def definitions(self) -> list[dict[str, Any]]:
        return definitions(self.tools)

    @property
    def must_call(self) -> bool:
        return self.choice in ("required", "named")

    def structured_output(self, form: StructuredOutput | None) -> StructuredOutput | None:
        """What the output is held to, if anything: `form`, or calls, or one or the other where the model decides.

        Raises InvalidRequest for a form that is no JSON, beside tools, or beside calls that must be made.
        """
        if self.choice == "none":
            return form
        if form is not None and (self.choice != "auto" or form.kind not in ("json_schema", "json_object")):
            raise InvalidRequest(f"an output held to the form of a {form.kind} cannot be calls of tools", "tools")
        schemas = self._enforced()
        if self.named is not None:
            return StructuredOutput("json_schema", json.dumps(schemas[self.named]))
        if form is None and not schemas:
            return None
        otherwise = TEXT if self.choice == "auto" else None
        if form is not None:
            schemas, otherwise = schemas or {tool.function.name: ANY_OBJECT for tool in self.tools}, _json_of(form)
        return StructuredOutput("grammar", grammar(schemas, is_parallel=self.is_parallel, otherwise=otherwise))

    def compile(self, engine: Engine, wanted: StructuredOutput) -> None:
        """Have the output's grammar compiled. Raises InvalidRequest, naming the function if it is one's fault."""
        deadline = time.monotonic() + MAX_SEARCH_S
        try:
            engine.compile(wanted)
        except InvalidRequest:
            for name, schema in self._enforced().items():
                if time.monotonic() < deadline:  # each may take as long as all of them together
                    _try(engine, name, schema)
            raise

    def _enforced(self) -> dict[str, dict[str, Any]]:
        """Schemas that arguments are held to, by function; none where calls may look as they like."""
        functions = {tool.function.name: tool.function for tool in self.tools}
        if self.named is not None:
            return {self.named: _schema(functions[self.named])}
        if self.choice == "required":
            return {name: _schema(function) for name, function in functions.items()}
        if not any(function.strict for function in functions.values()):
            return {}
        return {name: _schema(function) if function.strict else ANY_OBJECT for name, function in functions.items()}

    def reader(self) -> PartReader:
        """Reads one choice's text as it comes."""
        return self._reader(announces_early=True)

    def parts(self, text: str, reason: FinishReason) -> list[Part]:
        """A whole choice's: a call that is not there as a whole counts only where something cut it.

        That is the limit; or, where the output was held to calls, a stop.
        """
        reader = self._reader(announces_early=reason == "length" or bool(self._enforced()))
        return [*reader.feed(text), *reader.finish()]

    def _reader(self, *, announces_early: bool) -> PartReader:
        if self.choice == "none":
            return TextReader()
        if self.named is not None:
            return ArgumentsReader(self.named)
        names = {tool.function.name for tool in self.tools}
        return CallReader(names, is_parallel=self.is_parallel, announces_early=announces_early)

    def reason(self, reason: FinishReason, *, has_calls: bool) -> ChatFinishReason:
        """The finish reason as clients know it: a call that was cut ends with length, one that was named with stop."""
        return "tool_calls" if has_calls and reason == "stop" and self.named is None else reason


def tool_use(body: ChatRequest) -> ToolUse:
    """The tools of a body. Raises InvalidRequest naming the field that cannot be."""
    if body.tools is None:
        if body.tool_choice not in (None, "none"):
            raise InvalidRequest("tool_choice needs tools", "tool_choice")
        return ToolUse()
    _check(body.tools)
    choice, named = _choice(body)
    if choice == "none":  # not told of them, it has no reason to write what nobody reads
        return ToolUse()
    return ToolUse(choice=choice, tools=body.tools, named=named, is_parallel=body.parallel_tool_calls is not False)


def _check(tools: Sequence[Tool]) -> None:
    names = [tool.function.name for tool in tools]
    for number, tool in enumerate(tools):
        if names.index(tool.function.name) != number:
            raise InvalidRequest(f"tools has two functions of the name {tool.function.name!r}", "tools")
        kind = (tool.function.parameters or ANY_OBJECT).get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise InvalidRequest(
                f"tools[{number}].function.parameters has the type {str(kind)[:32]!r}, arguments are an object", "tools"
            )


def _choice(body: ChatRequest) -> tuple[Choice, str | None]:
    if not isinstance(body.tool_choice, NamedToolChoice):
        return body.tool_choice or "auto", None
    name = body.tool_choice.function.name
    if name not in {tool.function.name for tool in body.tools or ()}:
        raise InvalidRequest(f"tool_choice names {name[:64]!r}, tools has no such function", "tool_choice")
    return "named", name


def _schema(function: FunctionDefinition) -> dict[str, Any]:
    """Of a function's arguments; without a word on parameters it has none."""
    return NO_ARGUMENTS if function.parameters is None else {**function.parameters, **ANY_OBJECT}


def _try(engine: Engine, name: str, schema: Mapping[str, Any]) -> None:
    try:
        engine.compile(StructuredOutput("json_schema", json.dumps(schema)))
    except InvalidRequest as error:
        raise InvalidRequest(f"the parameters of the function {name!r}: {error}", "tools") from error


def _json_of(form: StructuredOutput) -> str:
    """JSON of a form as a term of a grammar."""
    try:
        schema = json.loads(str(form.value)) if form.kind == "json_schema" else ANY_OBJECT
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"json_schema is no JSON: {error}", "structured_output") from error
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("json_schema must be an object", "structured_output")
    return lark_json(schema if isinstance(schema, dict) else {} if schema else {"not": {}})


def definitions(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as templates take them, with what was set and in OpenAI's order, which models were trained on."""
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]
