"""Messages become a prompt by the model's template.

Templates come with models, that is from strangers: they run in a sandbox. What a template raises is the request's
fault (roles out of order, say), so it is 400 with the template's own words.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from typing import Any, NoReturn

from app.drafts import joined_text
from app.hermes import in_words, to_json
from app.schemas.chat import ChatMessage, ToolCall
from core import InvalidRequest

ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


class ChatTemplate:
    """A model's jinja2 template, with the few helpers that templates expect."""

    def __init__(self, source: str, special_token_texts: Mapping[str, str]) -> None:
        """Raises InvalidRequest when the source is no template."""
        from jinja2 import TemplateSyntaxError, meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", "app.generation_tag.GenerationTag"],
        )
        environment.filters["tojson"] = to_json  # jinja2's own escapes for HTML
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self._knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
            self._knows_developers = "developer" in source
        except TemplateSyntaxError as error:  # its text has further lines, with the source
            raise InvalidRequest(
                f"the chat template is broken: line {error.lineno}: {error.message}", "messages"
            ) from error
        self._special_token_texts = dict(special_token_texts)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; `variables` are more of the template's own.

        Raises:
            InvalidRequest: with what the template complains of, or with a variable that is not the caller's to set.
        """
        ours = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": list(tools) or None,
            **self._special_token_texts,
        }
        if taken := sorted(ours.keys() & (variables or {}).keys()):
            raise InvalidRequest(f"chat_template_kwargs may not set {taken[0]}", "chat_template_kwargs")
        try:
            return self._template.render({**(variables or {}), **ours})
        except Exception as error:  # a template is a program: it may divide by zero, or call itself for ever
            raise InvalidRequest(f"the chat template refuses the messages: {error}", "messages") from error

    def worded(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages to render: what the template does not know is said in what templates know."""
        known = messages if self._knows_developers else _without_developers(messages)
        return known if self._knows_tools else in_words(known, tools, takes_system=self._takes_system)

    @cached_property
    def _takes_system(self) -> bool:
        """Some templates refuse messages of the system; whoever sends none should not hear of that."""
        try:
            self.render([{"role": role, "content": "x"} for role in ("system", "user")], add_generation_prompt=True)
        except InvalidRequest:
            return False
        return True


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _without_developers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A developer's messages as the system's, which they are the newer name of; all that come first are one."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    renamed = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    first = list(takewhile(lambda message: message["role"] == "system", renamed))
    if len(first) < 2:
        return renamed
    # Templates that take a system message at all take one, at the beginning.
    joined = {**first[0], "content": "\n\n".join(message["content"] for message in first)}
    return [joined, *renamed[len(first) :]]


def render_prompt(
    template: ChatTemplate,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation, open for the assistant's next message or, on wish, for more of its last one."""
    plain = template.worded([_plain(message, number) for number, message in enumerate(messages)], tools)
    if not continue_final_message:
        return template.render(plain, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables)
    if add_generation_prompt or plain[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt false and a last message of the assistant",
            "continue_final_message",
        )
    if plain[-1].get("tool_calls"):
        raise InvalidRequest("a last message that has tool_calls is closed by them", "continue_final_message")
    # Whatever the template puts behind the last message closes it, so it goes. It is found by a mark that is nowhere
    # else: the message's own text may occur in what closes it, as "end" does in <|im_end|>.
    content, mark = plain[-1]["content"], uuid.uuid4().hex
    text = content.rstrip()
    blank = content[len(text) :]  # stays if the template lets it: some trim what is said
    plain[-1]["content"] = text + mark + blank
    closed = template.render(plain, tools=tools, add_generation_prompt=False, variables=variables)
    prompt, found, behind = closed.rpartition(mark)
    if not found or not prompt.endswith(text.lstrip()):
        raise InvalidRequest("the chat template does not keep the last message as it is", "continue_final_message")
    return prompt + blank if behind.startswith(blank) else prompt


def _plain(message: ChatMessage, number: int) -> dict[str, Any]:
    if message.role not in ROLES:
        raise InvalidRequest(
            f"messages[{number}].role is {message.role[:32]!r}, allowed are {sorted(ROLES)}", "messages"
        )
    extra = message.model_extra or {}
    if extra.get("function_call") is not None:
        raise InvalidRequest(f"messages[{number}].function_call is not supported, use tool_calls", "messages")
    plain = {**extra, "role": message.role, "content": joined_text(message.content, f"messages[{number}].content")}
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def _plain_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments)}
    return {"id": call.id, "type": call.type, "function": function}


def _arguments(text: str) -> Any:
    """A call's arguments as templates take them: an object, or the text of a call that was cut by the limit."""
    try:
        value = json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        return text
    if value is None:  # of a function without parameters many models write nothing
        return _Arguments({}, "{}")
    return _Arguments(value, text) if isinstance(value, dict) else value


class _Arguments(dict[str, Any]):
    """Most templates write JSON of the object themselves or walk over it; some print or add it as the text it was."""

    def __init__(self, value: Mapping[str, Any], text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text
