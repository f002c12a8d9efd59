"""Templates that turn messages into prompts."""

import json
from typing import Any

import pytest

from app.chat_template import ChatTemplate, render_prompt
from app.schemas.chat import ChatMessage
from core import InvalidRequest
from tests.app.servers import CHAT_TEMPLATE

PROMPT = "user: Hi\nassistant: "


def render_messages(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return render_prompt(template, [ChatMessage(**message) for message in messages], **options)


def render(source: str, *messages: tuple[str, Any], **options: Any) -> str:
    return render_messages(source, [{"role": role, "content": content} for role, content in messages], **options)


def test_messages_become_a_prompt_open_for_the_answer():
    assert PROMPT == render(CHAT_TEMPLATE, ("user", "Hi"))
    assert "user: Hi\n" == render(CHAT_TEMPLATE, ("user", "Hi"), add_generation_prompt=False)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Hi", "Hi"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
    ],
)
def test_parts_are_joined_with_a_newline(content: Any, text: str):
    assert f"user: {text}\n" == render(CHAT_TEMPLATE, ("user", content), add_generation_prompt=False)


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, {"text": "a"}])
def test_parts_that_are_no_text_are_refused(part: dict[str, Any]):
    with pytest.raises(InvalidRequest, match="text parts"):
        render(CHAT_TEMPLATE, ("user", [part]))


def test_the_last_message_can_be_continued():
    text = render(
        CHAT_TEMPLATE,
        ("user", "Hi"),
        ("assistant", "Hello th"),
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert "user: Hi\nassistant: Hello th" == text
    with pytest.raises(InvalidRequest, match="last message of the assistant"):
        render(CHAT_TEMPLATE, ("user", "Hi"), add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("content", ["d", "end", "im_end|>", "a", ""])
def test_a_message_to_continue_is_cut_behind_its_text_whatever_the_text_is(content: str):
    chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    options = {"add_generation_prompt": False, "continue_final_message": True}

    assert f"<|im_start|>assistant\n{content}" == render(chatml, ("assistant", f"{content} "), **options)


@pytest.mark.parametrize(
    ("content", "kept", "trimmed"),
    [("Hello ", "Hello ", "Hello"), ("```\n", "```\n", "```"), (" \nHello", " \nHello", "Hello"), (" ", " ", "")],
)
def test_white_space_around_a_message_to_continue_is_the_templates_affair(content: str, kept: str, trimmed: str):
    options = {"add_generation_prompt": False, "continue_final_message": True}

    assert f"assistant: {kept}" == render(CHAT_TEMPLATE, ("assistant", content), **options)
    trimming = "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}<|eot|>{% endfor %}"
    assert f"assistant: {trimmed}" == render(trimming, ("assistant", content), **options)


def test_a_message_that_calls_is_not_continued_before_its_calls():
    source = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}{{ tools }}"
    with pytest.raises(InvalidRequest, match="tool_calls"):
        render_messages(source, [CALLED], add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("source", ["{{ messages[0].content | upper }}", "{{ messages[0].role }}"])
def test_a_message_that_the_template_changes_cannot_be_continued(source: str):
    with pytest.raises(InvalidRequest, match="does not keep the last message"):
        render(source, ("assistant", "x"), add_generation_prompt=False, continue_final_message=True)


def test_templates_have_the_helpers_they_expect():
    assert '<s>["é<"]' == render("{{ bos_token }}{{ ['é<'] | tojson }}", ("user", "x"))
    assert 4 == len(render("{{ strftime_now('%Y') }}", ("user", "x")))
    assert "ab" == render(
        "{% for c in 'abc' %}{% if c == 'c' %}{% break %}{% endif %}{{ c }}{% endfor %}", ("user", "")
    )
    assert "a" == render("  {% if true %}\na{% endif %}", ("user", ""))


def test_what_the_assistant_says_may_be_marked_as_its_own():
    """{% generation %} is for training: what stands in it is rendered, and what is set in it stays in it."""
    source = (
        "{% set x = 1 %}{% for m in messages %}{% if m.role == 'assistant' %}{%- generation -%} {{ m.content }}"
        "{% set x = 2 %}{% endgeneration %}{{ x }}{% else %}({{ m.content }}){% endif %}{% endfor %}"
    )
    assert "(Hi)Yes1" == render(source, ("user", "Hi"), ("assistant", "Yes"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("ensure_ascii=False", '{"é": 1, "a": [2]}'),
        ("ensure_ascii=True", '{"\\u00e9": 1, "a": [2]}'),
        ("separators=(',', ':'), sort_keys=True", '{"a":[2],"é":1}'),
        ("indent=1", '{\n "é": 1,\n "a": [\n  2\n ]\n}'),
    ],
)
def test_templates_write_json_with_the_options_of_transformers(options: str, text: str):
    assert text == render(f"{{{{ {{'é': 1, 'a': [2]}} | tojson({options}) }}}}", ("user", ""))


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ 1 + 'a' }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / (messages | length - 1) }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_a_template_refuses_is_the_requests_fault(source: str):
    with pytest.raises(InvalidRequest, match="chat template refuses"):
        render(source, ("user", "Hi"))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "7"}]}


def test_a_template_that_knows_tools_is_given_them_and_the_calls_as_objects():
    source = (
        "{% if tools %}{{ tools | tojson }}\n{% endif %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_call_id }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    )
    messages = [{"role": "user", "content": "Hi"}, CALLED, RESULT]

    assert f'[{json.dumps(TOOL)}]\nuser:Hi;assistant:f{{"a": 1}};tool:7c;' == render_messages(
        source, messages, tools=[TOOL]
    )
    assert "user:Hi;" == render_messages(source, messages[:1])


def test_for_a_template_that_does_not_they_are_put_into_words():
    text = render_messages(CHAT_TEMPLATE, [{"role": "user", "content": "Hi"}, CALLED, RESULT], tools=[TOOL])
    system, _, rest = text.partition("user: Hi\n")

    assert system.startswith("system: # Tools")
    assert json.dumps(TOOL) in system
    assert 'assistant: <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n' in rest
    assert rest.endswith("user: <tool_response>\n7\n</tool_response>\nassistant: ")


def test_a_call_that_was_cut_goes_back_as_the_text_that_it_is():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    source = "{{ tools }}{{ messages[0].tool_calls[0].function.arguments }}"

    assert 'None{"a": ' == render_messages(source, [{"role": "assistant", "tool_calls": [call]}])


def test_where_a_template_takes_no_system_the_user_tells_of_the_tools():
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT_TEMPLATE
    text = render_messages(source, [{"role": "user", "content": "Hi"}], tools=[TOOL])

    assert text.startswith("user: # Tools")
    assert json.dumps(TOOL) in text
    assert text.endswith("\n\nHi\nassistant: ")
    with pytest.raises(InvalidRequest, match="no system"):
        render_messages(source, [{"role": "system", "content": "Hi"}], tools=[TOOL])


@pytest.mark.parametrize(
    ("written", "as_text", "as_object"),
    [
        ('{"a":1}', '{"a":1}', '{"a": 1}a'),
        ("", "{}", "{}"),
        (" \n", "{}", "{}"),
        ("null", "{}", "{}"),
        ('{"é": "\\ud800"}', '{"é": "\\ud800"}', '{"é": "\\ud800"}é'),
    ],
)
def test_arguments_are_what_the_template_takes_them_for(written: str, as_text: str, as_object: str):
    """JSON where they are printed or added, never Python; an object where they are written or walked over."""
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": written}}]}
    given = "{% set a = messages[0].tool_calls[0].function.arguments %}{% if tools %}{% endif %}"

    for text in ("{{ a }}", "{{ '' + a }}", "{{ a + '' }}", "{{ '' ~ a }}"):
        assert as_text == render_messages(given + text, [called])
    assert as_object == render_messages(
        given + "{{ a | tojson }}{% for k, v in a.items() %}{{ k }}{% endfor %}", [called]
    )


SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}"
    "{% elif m.role not in ('system', 'user') %}{{ raise_exception('Unexpected role') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)


@pytest.mark.parametrize(
    ("roles", "text"),
    [
        (["developer", "user"], "system:0;user:1;"),
        (["system", "developer", "user"], "system:0\n\n1;user:2;"),
        (["developer", "system", "developer", "user"], "system:0\n\n1\n\n2;user:3;"),
    ],
)
def test_where_a_template_knows_no_developer_it_is_the_system(roles: list[str], text: str):
    messages = [(role, str(number)) for number, role in enumerate(roles)]

    assert text == render(SYSTEM_FIRST, *messages)
    knowing = "{% for m in messages %}{{ m.role }}{% if m.role == 'developer' %}!{% endif %}{% endfor %}"
    assert "".join(f"{role}!" if role == "developer" else role for role in roles) == render(knowing, *messages)


def test_several_messages_of_the_system_are_left_to_the_template():
    with pytest.raises(InvalidRequest, match="system first"):
        render(SYSTEM_FIRST, ("system", "a"), ("system", "b"))


def test_the_legacy_form_of_calls_is_refused():
    with pytest.raises(InvalidRequest, match=r"messages\[0\].function_call is not supported"):
        render_messages("", [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}])
