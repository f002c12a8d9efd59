"""Messages bodies as chat requests."""

from typing import Any

import pytest

from app.messages.schemas import MessagesRequest
from app.messages.translate import to_chat
from core import InvalidRequest

HI = {"role": "user", "content": "Hi"}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = MessagesRequest(max_tokens=5, messages=list(messages), **fields)
    return to_chat(body).model_dump(exclude_unset=True, by_alias=True)


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def test_the_systems_text_is_the_first_message():
    assert [{"role": "system", "content": "Be kind."}, HI] == chat(HI, system="Be kind.")["messages"]
    assert "Be kind." == chat(HI, system=[text("Be "), text("kind.")])["messages"][0]["content"]


def test_blocks_become_text_calls_and_results():
    asked = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, text("Well"), USE]}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text("7")]}
    empty = {"type": "tool_result", "tool_use_id": "d"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}

    assert [
        HI,
        {"role": "assistant", "content": "Well", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
        {"role": "tool", "tool_call_id": "d", "content": ""},
        {"role": "user", "content": "So?"},
    ] == chat(HI, asked, {"role": "user", "content": [result, empty, text("So?")]})["messages"]


def test_results_alone_make_no_message_of_the_user():
    result = {"type": "tool_result", "tool_use_id": "c", "content": "7"}
    roles = [m["role"] for m in chat({"role": "user", "content": [result]})["messages"]]

    assert ["tool"] == roles


def test_a_last_message_of_the_assistant_is_gone_on_with():
    found = chat(HI, {"role": "assistant", "content": "It is ("})

    assert (False, True) == (found["add_generation_prompt"], found["continue_final_message"])
    assert "continue_final_message" not in chat(HI)


def test_what_has_another_name_or_place_in_chat_goes_there():
    schema = {"type": "object"}
    found = chat(
        HI,
        stop_sequences=["x"],
        temperature=0.5,
        top_k=3,
        tools=[{"name": "f", "input_schema": schema, "description": "d"}],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    del found["messages"]

    function = {"name": "f", "description": "d", "parameters": schema, "strict": None}
    assert {
        "max_tokens": 5,
        "stop": ["x"],
        "temperature": 0.5,
        "top_k": 3,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}},
    } == found


@pytest.mark.parametrize(("given", "expected"), [("auto", "auto"), ("any", "required"), ("none", "none")])
def test_tool_choices_by_name(given: str, expected: str):
    assert expected == chat(HI, tools=[{"name": "f", "input_schema": {}}], tool_choice={"type": given})["tool_choice"]


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([{"role": "user", "content": [{"type": "image", "source": {}}]}], {}, "messages"),
        ([{"role": "user", "content": [USE]}], {}, "messages"),
        ([HI, {"role": "assistant", "content": [{**USE, "input": "x"}]}], {}, "messages"),
        ([{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}], {}, "messages"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "messages"),
        ([HI], {"system": [{"type": "image"}]}, "system"),
        ([HI], {"n": 2}, "n"),
        ([HI], {"tool_choice": {"type": "tool"}}, "tool_choice"),
        ([HI], {"output_config": {"format": {"type": "yaml"}}}, "output_config"),
        ([HI], {"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
    ],
)
def test_what_has_no_meaning_in_chat_is_refused(messages: Any, fields: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as caught:
        chat(*messages, **fields)

    assert param == caught.value.param
