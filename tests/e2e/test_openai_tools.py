"""Tools and responses with the official Python client, against a live server of the embedded model.

What must be called is called by the model, held to the schema; what it calls of its own accord is scripted.
"""

import json
from collections.abc import Iterator
from enum import Enum
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.live import LiveServer

MODEL = "octavo-tiny"
MESSAGES: Any = [{"role": "user", "content": "What is the weather like?"}]
CALLS = ['<tool_call>\n{"name": "Weather", "arguments": {"place"', ': "Rome", ', '"days": 2}}\n</tool_call>\n']
CALLS += ['<tool_call>\n{"name": "now", "arguments": ', "{}}\n</tool_call>"]
SCRIPT: dict[str, Any] = {"model": MODEL, "extra_body": {"script": ["Let me see. ", *CALLS]}}


class Place(Enum):
    ROME = "Rome"
    KYOTO = "Kyōto"


class Weather(BaseModel):
    """The weather of the next days."""

    place: Place
    days: int = Field(ge=1, le=3)


class Now(BaseModel):
    """The time."""


TOOLS: Any = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Now, name="now")]
FLAT_TOOLS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture
def client(scripted: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_calls_whole_and_assembled_from_a_stream_are_the_same(client: openai.OpenAI):
    whole = client.chat.completions.create(messages=MESSAGES, tools=TOOLS, **SCRIPT).choices[0]
    calls: dict[int, list[str]] = {}
    reasons, content = [], ""
    with client.chat.completions.create(messages=MESSAGES, tools=TOOLS, stream=True, **SCRIPT) as stream:
        for chunk in stream:
            reasons.append(chunk.choices[0].finish_reason)
            content += chunk.choices[0].delta.content or ""
            for piece in chunk.choices[0].delta.tool_calls or []:
                assert piece.function is not None
                name, arguments = piece.function.name or "", piece.function.arguments or ""
                calls.setdefault(piece.index, []).append(name + arguments)

    assert whole.message.tool_calls is not None
    assert ("Let me see.", "tool_calls") == (whole.message.content, whole.finish_reason) == (content, reasons[-1])
    functions = [call.function for call in whole.message.tool_calls if call.type == "function"]
    assert [("Weather", {"place": "Rome", "days": 2}), ("now", {})] == [
        (function.name, json.loads(function.arguments)) for function in functions
    ]
    assert [function.name + function.arguments for function in functions] == ["".join(p) for p in calls.values()]
    assert len(calls[0]) > 2


def test_the_clients_own_accumulation_parses_the_arguments(client: openai.OpenAI):
    with client.chat.completions.stream(messages=MESSAGES, tools=TOOLS, **SCRIPT) as stream:
        done = [event.arguments for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message

    assert ['{"place": "Rome", "days": 2}', "{}"] == done
    assert message.tool_calls is not None
    assert [Weather(place=Place.ROME, days=2), Now()] == [c.function.parsed_arguments for c in message.tool_calls]


async def test_the_async_client_streams_calls(scripted: LiveServer):
    async with (
        openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="any", max_retries=0) as client,
        client.chat.completions.stream(messages=MESSAGES, tools=TOOLS, **SCRIPT) as stream,
    ):
        completion = await stream.get_final_completion()

    calls = completion.choices[0].message.tool_calls
    assert calls is not None
    assert ["Weather", "now"] == [call.function.name for call in calls]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Weather"}}])
def test_what_must_be_called_parses_into_its_model(client: openai.OpenAI, choice: Any):
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, tools=TOOLS[:1], tool_choice=choice, parallel_tool_calls=False, temperature=1
    )

    assert answer.choices[0].message.tool_calls is not None
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


def test_a_conversation_goes_on_with_the_results(client: openai.OpenAI):
    message = client.chat.completions.create(messages=MESSAGES, tools=TOOLS, **SCRIPT).choices[0].message
    assert message.tool_calls is not None
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[*MESSAGES, message.model_dump(exclude_none=True), *results],
        tools=TOOLS,
        extra_body={"script": ["Sunny."]},
    )

    assert "Sunny." == answer.choices[0].message.content


def test_tools_that_cannot_be_are_a_bad_request(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[])

    assert "tools" == caught.value.param


def test_a_response_has_text_and_usage(client: openai.OpenAI):
    asked: dict[str, Any] = {"model": MODEL, "input": "Tell me a story.", "temperature": 0, "max_output_tokens": 24}
    answer = client.responses.create(instructions="Be brief.", **asked)

    assert answer.output_text
    assert answer.usage is not None
    assert answer.usage.output_tokens <= 24
    assert answer.status in ("completed", "incomplete")
    with client.responses.create(instructions="Be brief.", stream=True, **asked) as stream:
        events = list(stream)
    assert ["response.created", "response.in_progress"] == [event.type for event in events[:2]]
    assert answer.output_text == "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert [*range(len(events))] == [getattr(event, "sequence_number", None) for event in events]


def test_a_responses_calls_whole_and_by_the_clients_own_accumulation(client: openai.OpenAI):
    whole = client.responses.create(input="Hi", tools=FLAT_TOOLS, **SCRIPT)
    with client.responses.stream(input="Hi", tools=FLAT_TOOLS, **SCRIPT) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()

    assert ["message", "function_call", "function_call"] == [item.type for item in whole.output]
    assert "Let me see." == whole.output_text == final.output_text
    found = [
        [(item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"]
        for answer in (whole, final)
    ]
    assert [("Weather", {"place": "Rome", "days": 2}), ("now", {})] == found[0] == found[1]
    assert '{"place": "Rome", "days": 2}' in snapshots


def test_a_response_parses_into_its_model(client: openai.OpenAI):
    answer = client.responses.parse(model=MODEL, input="Hi", text_format=Weather, temperature=1)

    assert isinstance(answer.output_parsed, Weather)


async def test_the_async_client_gets_responses_and_goes_on_from_their_items(scripted: LiveServer):
    async with openai.AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="any", max_retries=0) as client:
        first = await client.responses.create(input="Hi", tools=FLAT_TOOLS, **SCRIPT)
        given: Any = [item.model_dump(exclude_none=True) for item in first.output]
        results: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
            for item in first.output
            if item.type == "function_call"
        ]
        second = await client.responses.create(
            model=MODEL, input=[*given, *results], tools=FLAT_TOOLS, extra_body={"script": ["Sunny."]}
        )

    assert "Sunny." == second.output_text


def test_what_needs_a_store_is_refused(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="Hi", previous_response_id="resp-1")

    assert "previous_response_id" == caught.value.param
