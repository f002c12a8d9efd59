"""Responses bodies as chat requests."""

from typing import Any

import pytest

from app.errors import ApiError
from app.responses.schemas import ResponsesRequest
from app.responses.translate import to_chat
from core import InvalidRequest

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "7"}


def messages(input: Any, **fields: Any) -> list[dict[str, Any]]:
    return to_chat(ResponsesRequest(input=input, **fields)).model_dump(exclude_unset=True)["messages"]


def test_text_is_a_message_of_the_user_behind_the_instructions():
    assert [{"role": "user", "content": "Hi"}] == messages("Hi")
    assert {"role": "system", "content": "Be kind."} == messages("Hi", instructions="Be kind.")[0]


def test_items_are_messages_and_calls_belong_to_the_assistants():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "Well"}]},
        CALL,
        {**CALL, "call_id": "d"},
        OUTPUT,
        CALL,
    ]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}

    assert [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Well"}],
            "tool_calls": [call, {**call, "id": "d"}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "7"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ] == messages(items)


def test_what_has_another_name_or_place_in_chat_goes_there():
    schema = {"type": "object"}
    chat = to_chat(
        ResponsesRequest(
            input="Hi",
            max_output_tokens=7,
            temperature=0.5,
            seed=3,
            parallel_tool_calls=False,
            tools=[{"type": "function", "name": "f", "parameters": schema, "strict": True}],
            tool_choice={"type": "function", "name": "f"},
            text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
        )
    )
    found = chat.model_dump(exclude_unset=True, exclude={"messages"}, by_alias=True)

    assert {
        "max_tokens": 7,
        "temperature": 0.5,
        "seed": 3,
        "parallel_tool_calls": False,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
    } == found


def test_no_tools_and_the_choice_of_none_of_them_is_what_clients_send_by_default():
    chat = to_chat(ResponsesRequest(input="Hi", tools=[], tool_choice="auto", text={"format": {"type": "text"}}))

    assert {"messages"} == chat.model_fields_set


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": "Hi", "n": 2}, "n"),
        ({"input": "Hi", "max_tokens": 5}, "max_tokens"),
        ({"input": "Hi", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text"),
    ],
)
def test_what_has_no_meaning_in_chat_is_refused(fields: dict[str, Any], param: str):
    with pytest.raises((InvalidRequest, ApiError)) as caught:
        to_chat(ResponsesRequest(**fields))

    assert param == caught.value.param
