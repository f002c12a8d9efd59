"""Anthropic's official Python client against a live server of the embedded model."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.e2e.live import LiveServer

MODEL = "octavo-tiny"
HI: Any = [{"role": "user", "content": "What is the weather like?"}]
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Kyōto"]}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "weather", "description": "The weather.", "input_schema": SCHEMA}]
CALL = ["Let me see. ", '<tool_call>{"name": "weather", "arguments": {"pla', 'ce": "Rome"}}</tool_call>']
PLAIN: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "messages": HI, "extra_body": {"temperature": 0}}
SCRIPT: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "messages": HI, "extra_body": {"script": CALL}}


@pytest.fixture
def client(scripted: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=scripted.url, api_key="any", max_retries=0) as client:
        yield client


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_whole_and_streamed_is_the_same(client: anthropic.Anthropic):
    whole = client.messages.create(system="Be brief.", **PLAIN)
    with client.messages.stream(system="Be brief.", **PLAIN) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()

    assert text_of(whole)
    assert text_of(whole) == streamed == text_of(final)
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert (whole.stop_reason, whole.usage.output_tokens) == (final.stop_reason, final.usage.output_tokens)
    assert whole._request_id


def test_raw_events_come_in_order(client: anthropic.Anthropic):
    with client.messages.create(stream=True, tools=TOOLS, **SCRIPT) as stream:
        events = [event.type for event in stream]

    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    found = [kind for i, kind in enumerate(events) if i == 0 or kind != events[i - 1]]
    assert ["message_start", *block, *block, "message_delta", "message_stop"] == found


def test_a_tools_use_whole_and_by_the_clients_own_accumulation(client: anthropic.Anthropic):
    whole = client.messages.create(tools=TOOLS, **SCRIPT)
    with client.messages.stream(tools=TOOLS, **SCRIPT) as stream:
        final = stream.get_final_message()

    for message in (whole, final):
        text, use = message.content
        assert ("text", "Let me see.") == (text.type, text_of(message))
        assert "tool_use" == use.type
        assert ("weather", {"place": "Rome"}) == (use.name, use.input)
        assert "tool_use" == message.stop_reason


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_what_must_be_used_is_used_with_input_that_fits(client: anthropic.Anthropic, choice: Any):
    message = client.messages.create(
        model=MODEL,
        max_tokens=200,
        messages=HI,
        tools=TOOLS,
        extra_body={"temperature": 1},
        tool_choice={**choice, "disable_parallel_tool_use": True},
    )

    (use,) = message.content
    assert "tool_use" == use.type
    assert use.input in ({"place": "Rome"}, {"place": "Kyōto"})


def test_an_output_has_the_form_that_was_asked_for(client: anthropic.Anthropic):
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = client.messages.create(**{**PLAIN, "max_tokens": 200}, output_config=form)

    assert json.loads(text_of(message)) in ({"place": "Rome"}, {"place": "Kyōto"})


def test_a_conversation_goes_on_with_the_results(client: anthropic.Anthropic):
    first = client.messages.create(tools=TOOLS, **SCRIPT)
    use = first.content[1]
    assert "tool_use" == use.type
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
    messages: Any = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(
        model=MODEL, max_tokens=9, messages=messages, tools=TOOLS, extra_body={"script": ["Sunny."]}
    )

    assert ("Sunny.", "end_turn") == (text_of(second), second.stop_reason)


async def test_the_async_client_streams(scripted: LiveServer):
    async with anthropic.AsyncAnthropic(base_url=scripted.url, api_key="any", max_retries=0) as client:
        whole = await client.messages.create(**PLAIN)
        async with client.messages.stream(**PLAIN) as stream:
            streamed = "".join([text async for text in stream.text_stream])

    assert text_of(whole) == streamed


def test_tokens_are_counted_as_they_are_used(client: anthropic.Anthropic):
    counted = client.messages.count_tokens(model=MODEL, messages=HI, system="Be brief.", tools=TOOLS)
    usage = client.messages.create(system="Be brief.", tools=TOOLS, **SCRIPT).usage

    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_errors_are_the_clients_own(client: anthropic.Anthropic):
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**{**PLAIN, "extra_body": {"temperature": 3}})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**{**PLAIN, "messages": [{"role": "user", "content": "x" * 100_000}]})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**PLAIN, "model": "other"})


def test_a_key_is_asked_for_as_this_client_sends_it(serve: Any):
    url = serve("--api-key", "secret").url
    with (
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        client.messages.create(**PLAIN)
    with anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0) as client:
        assert text_of(client.messages.create(**PLAIN))
