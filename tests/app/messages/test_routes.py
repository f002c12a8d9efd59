"""POST /v1/messages, whole and streamed."""

import json
from functools import partial
from typing import Any

import pytest
from httpx import Response

from tests.app.servers import RunningServer, in_process, make_engine

CALL = ['<tool_call>{"name": "f", "arguments": {"a', '": 1}', "}</tool_call>"]
TOOL = {"name": "f", "input_schema": {"type": "object"}}
HI = [{"role": "user", "content": "Hi"}]
with_room = partial(in_process, num_kv_blocks=512)


async def create(server: RunningServer, **body: Any) -> Response:
    return await server.client.post("/v1/messages", json={"messages": HI, "max_tokens": 50, **body})


def events_of(response: Response) -> list[dict[str, Any]]:
    """The events of a stream, each named by its type."""
    assert 200 == response.status_code, response.text
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert f"event: {events[-1]['type']}" == name
    return events


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds from a stream."""
    message: dict[str, Any] = {}
    pieces: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                pieces[event["index"]] = ""
            case "content_block_delta":
                delta = event["delta"]
                pieces[event["index"]] += delta["text"] if delta["type"] == "text_delta" else delta["partial_json"]
            case "content_block_stop":
                block = message["content"][event["index"]]
                text = pieces[event["index"]]
                block |= {"text": text} if block["type"] == "text" else {"input": json.loads(text)}
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": None, "content": blocks}


async def test_a_message_has_anthropics_shape():
    async with in_process() as server:
        response = await create(server, script=["Hel", "lo"], system="Be kind.")
        again = (await create(server, script=["Hel", "lo"], system="Be kind.")).json()

    body = response.json()
    num_prompt = len("system: Be kind.\nuser: Hi\nassistant: ")
    assert body["id"].startswith("msg-")
    assert {
        "id": body["id"],
        "type": "message",
        "role": "assistant",
        "model": "octavo-tiny",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
        },
    } == body
    assert response.headers["request-id"] == body["id"]
    usage = again["usage"]  # cached tokens are no input tokens here
    assert usage["cache_read_input_tokens"] > 0
    assert num_prompt == usage["input_tokens"] + usage["cache_read_input_tokens"]


async def test_a_stream_builds_a_message_up():
    async with with_room() as server:
        asked = {"script": ["Wait", ".", *CALL, *CALL, "so"], "tools": [TOOL]}
        await create(server, **asked)  # so that both find the prompt cached
        whole = (await create(server, **asked)).json()
        events = events_of(await create(server, **asked, stream=True))

    types = [event["type"] for event in events]
    assert ["message_start", "content_block_start", "content_block_delta"] == types[:3]
    assert ["content_block_stop", "message_delta", "message_stop"] == types[-3:]
    assert ("tool_use", None) == (whole["stop_reason"], events[0]["message"]["stop_reason"])
    use = {"type": "tool_use", "name": "f", "input": {"a": 1}}
    expected = [{"type": "text", "text": "Wait."}, use, use, {"type": "text", "text": "so"}]
    assert expected == without_ids(whole)["content"]
    assert without_ids(whole) == without_ids(assembled(events))
    assert 2 == len({block["id"] for block in whole["content"] if "id" in block})


@pytest.mark.parametrize(
    ("body", "reason", "sequence"),
    [
        ({"script": ["a", "b"]}, "end_turn", None),
        ({"script": ["a", "b"], "max_tokens": 1}, "max_tokens", None),
        ({"script": ["a", "b"], "stop_sequences": ["x", "b"]}, "stop_sequence", "b"),
        ({"script": CALL, "tools": [TOOL]}, "tool_use", None),
        ({"script": ['{"a":', "1}"], "tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_use", None),
    ],
)
async def test_why_it_ended(body: dict[str, Any], reason: str, sequence: str | None):
    async with with_room() as server:
        whole = (await create(server, **body)).json()
        streamed = assembled(events_of(await create(server, **body, stream=True)))

    assert (reason, sequence) == (whole["stop_reason"], whole["stop_sequence"])
    assert (reason, sequence) == (streamed["stop_reason"], streamed["stop_sequence"])


async def test_a_use_that_the_limit_cut_has_no_input():
    async with with_room() as server:
        body = (await create(server, script=CALL, tools=[TOOL], max_tokens=1)).json()

    assert [{"type": "tool_use", "name": "f", "input": {}}] == without_ids(body)["content"]
    assert "max_tokens" == body["stop_reason"]


async def test_the_answer_goes_on_from_the_assistants_words():
    async with in_process() as server:
        messages = [*HI, {"role": "assistant", "content": "It is"}]
        body = (await create(server, messages=messages, script=[" so"])).json()

    assert [{"type": "text", "text": " so"}] == body["content"]
    assert len("user: Hi\nassistant: It is") == body["usage"]["input_tokens"]


async def test_tokens_are_counted_as_they_will_be_used():
    asked = {"messages": HI, "system": "Be kind.", "tools": [TOOL]}
    async with with_room() as server:
        counted = (await server.client.post("/v1/messages/count_tokens", json=asked)).json()
        used = (await create(server, **asked, script=["x"])).json()["usage"]["input_tokens"]

    assert {"input_tokens": used} == counted


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "prompt is too long"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop"),
        ({"temperature": 3}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ],
)
async def test_what_cannot_be_is_refused_in_anthropics_shape(body: dict[str, Any], said: str):
    async with in_process() as server:
        response = await create(server, **body)

    found = response.json()
    assert (400, "error", "invalid_request_error") == (response.status_code, found["type"], found["error"]["type"])
    assert said in found["error"]["message"]
    assert {"type", "message"} == set(found["error"])


async def test_disabled_thinking_asks_for_nothing():
    async with in_process() as server:
        assert 200 == (await create(server, script=["x"], thinking={"type": "disabled"})).status_code


async def test_an_error_in_mid_stream_is_told():
    async with in_process(make_engine(), enable_fault_injection=True) as server:
        fault = {"type": "error", "after_events": 1}
        events = events_of(await create(server, script=["Hel", "lo"], stream=True, fault=fault))

    assert ("error", "api_error") == (events[-1]["type"], events[-1]["error"]["type"])
