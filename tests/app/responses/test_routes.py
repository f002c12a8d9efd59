"""POST /v1/responses, whole and streamed."""

import json
from functools import partial
from typing import Any

import pytest
from httpx import Response

from tests.app.servers import RunningServer, in_process, make_engine

CALL = ['<tool_call>{"name": "f", "arguments": {"a', '": 1}', "}</tool_call>"]
ARGUMENTS = '{"a": 1}'
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
with_room = partial(in_process, num_kv_blocks=512)


async def respond(server: RunningServer, **body: Any) -> Response:
    return await server.client.post("/v1/responses", json={"input": "Hi", **body})


def events_of(response: Response) -> list[dict[str, Any]]:
    """The events of a stream, each named by its type."""
    assert 200 == response.status_code, response.text
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert f"event: {event['type']}" == name
        events.append(event)
    return events


def plain(answer: dict[str, Any]) -> list[Any]:
    """Output items without their ids."""
    return [
        (item["status"], item["content"][0]["text"])
        if item["type"] == "message"
        else (item["status"], item["name"], item["arguments"])
        for item in answer["output"]
    ]


async def test_a_response_has_openais_shape():
    async with in_process() as server:
        body = (await respond(server, script=["Hel", "lo"], instructions="Be kind.", store=True)).json()

    assert body["id"].startswith("resp-")
    (item,) = body["output"]
    assert {
        "id": item["id"],
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
    } == item
    expected = {"object": "response", "status": "completed", "error": None, "incomplete_details": None, "store": False}
    assert expected == {name: body[name] for name in expected}
    assert ("Be kind.", [], "auto", {"format": {"type": "text"}}) == (
        body["instructions"],
        body["tools"],
        body["tool_choice"],
        body["text"],
    )
    num_prompt = len("system: Be kind.\nuser: Hi\nassistant: ")
    assert {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + 3,
    } == body["usage"]


async def test_a_stream_builds_a_message_up():
    async with in_process() as server:
        events = events_of(await respond(server, script=["Hel", "lo"], stream=True))

    assert [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ] == [event["type"] for event in events]
    assert [*range(10)] == [event["sequence_number"] for event in events]
    assert ("in_progress", []) == (events[0]["response"]["status"], events[0]["response"]["output"])
    assert "Hello" == "".join(event["delta"] for event in events if "delta" in event)
    assert "Hello" == events[6]["text"] == events[7]["part"]["text"]
    final = events[-1]["response"]
    assert [events[8]["item"]] == final["output"]
    assert {events[2]["item"]["id"]} == {event["item_id"] for event in events if "item_id" in event}
    assert final["usage"]["output_tokens"] == 3


async def test_calls_are_items_with_their_arguments_in_pieces():
    async with with_room() as server:
        asked = {"script": ["Wait.", *CALL, *CALL, "so"], "tools": [TOOL]}
        whole = (await respond(server, **asked)).json()
        events = events_of(await respond(server, **asked, stream=True))

    final = events[-1]["response"]
    expected = [("completed", "Wait."), *[("completed", "f", ARGUMENTS)] * 2, ("completed", "so")]
    assert expected == plain(whole) == plain(final)
    pieces = [e for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert [(1, '{"a'), (1, '": 1}'), (2, '{"a'), (2, '": 1}')] == [(e["output_index"], e["delta"]) for e in pieces]
    added = [e for e in events if e["type"] == "response.output_item.added"]
    assert [0, 1, 2, 3] == [e["output_index"] for e in added]
    assert ["", ""] == [e["item"]["arguments"] for e in added[1:3]]
    assert final["output"] == [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert 2 == len({item["call_id"] for item in final["output"] if "call_id" in item})


@pytest.mark.parametrize("script", [["Hello"], CALL])
async def test_what_the_limit_cuts_is_incomplete(script: list[str]):
    async with with_room() as server:
        asked = {"script": script, "tools": [TOOL], "max_output_tokens": 1}
        whole = (await respond(server, **asked)).json()
        *_, last = events_of(await respond(server, **asked, stream=True))

    assert "response.incomplete" == last["type"]
    for answer in (whole, last["response"]):
        assert ("incomplete", {"reason": "max_output_tokens"}) == (answer["status"], answer["incomplete_details"])
        assert ["incomplete"] == [item["status"] for item in answer["output"]]


async def test_an_answer_of_nothing_is_an_empty_message():
    async with in_process() as server:
        asked = {"script": ["x"], "stop": ["x"]}
        whole = (await respond(server, **asked)).json()
        *_, last = events_of(await respond(server, **asked, stream=True))

    assert [("completed", "")] == plain(whole) == plain(last["response"])


async def test_a_conversation_goes_on_with_the_items_given_back():
    async with with_room() as server:
        first = (await respond(server, script=CALL, tools=[TOOL])).json()
        call = first["output"][0]
        items = [
            {"role": "user", "content": "Hi"},
            call,
            {"type": "function_call_output", "call_id": call["call_id"], "output": "seven"},
        ]
        second = await respond(server, input=items, tools=[TOOL], script=["Seven."])

    assert [("completed", "Seven.")] == plain(second.json())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"content": "x"}]}, "input"),
        ({"input": [{"type": "function_call"}]}, "input"),
        ({"input": "x" * 5000}, "input"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"n": 2}, "n"),
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"conversation": "x"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}}, "text"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_what_cannot_be_is_refused_in_the_words_of_the_body(body: dict[str, Any], param: str):
    async with in_process() as server:
        response = await respond(server, **body)

    error = response.json()["error"]
    assert (400, "invalid_request_error", param) == (response.status_code, error["type"], error["param"])


async def test_half_a_surrogate_pair_that_only_comes_back_is_no_fault():
    async with in_process() as server:
        headers = {"content-type": "application/json"}
        content = '{"input": "Hi", "metadata": {"a": "\\ud800"}, "max_output_tokens": 1}'
        response = await server.client.post("/v1/responses", content=content, headers=headers)

    assert 200 == response.status_code
    assert "\ud800" == json.loads(response.text)["metadata"]["a"]


async def test_an_error_in_mid_stream_is_told():
    async with in_process(make_engine(), enable_fault_injection=True) as server:
        fault = {"type": "error", "after_events": 5}
        response = await respond(server, script=["Hel", "lo"], stream=True, fault=fault)

    events = events_of(response)
    numbers = [event["sequence_number"] for event in events]
    assert sorted(set(numbers)) == numbers
    assert ["error", "response.failed"] == [event["type"] for event in events[-2:]]
    assert events[-2]["message"] == events[-1]["response"]["error"]["message"]
    assert "failed" == events[-1]["response"]["status"]
