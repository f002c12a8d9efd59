"""Messages become a prompt by the model's template.

Templates come with models, that is from strangers: they run in a sandbox. What a template raises is the request's
fault (roles out of order, say), so it is 400 with the template's own words.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

from app.drafts import joined_text
from app.hermes import in_words
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
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self._knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
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
        from jinja2 import TemplateError

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
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}", "messages") from error

    def worded(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages to render: with tools and calls put into words where the template knows none."""
        return messages if self._knows_tools else in_words(messages, tools)


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter escapes for HTML, which models were not trained on. Options: transformers'."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
    # Whatever the template puts behind the last message closes it, so it goes. It is found by a mark that is nowhere
    # else: the message's own text may occur in what closes it, as "end" does in <|im_end|>.
    last, mark = plain[-1]["content"].rstrip(), uuid.uuid4().hex
    plain[-1]["content"] = last + mark
    closed = template.render(plain, tools=tools, add_generation_prompt=False, variables=variables)
    text, found, _ = closed.rpartition(mark)
    if not found or not text.endswith(last):
        raise InvalidRequest("the chat template does not keep the last message as it is", "continue_final_message")
    return text


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
    """A call as templates take it, its arguments an object: they write JSON themselves."""
    arguments: Any = call.function.arguments
    with suppress(ValueError, RecursionError):  # a call that was cut by the limit stays the text that it is
        arguments = json.loads(arguments)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}
