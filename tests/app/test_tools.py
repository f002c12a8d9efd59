"""Tools in POST /v1/chat/completions, whole and streamed."""

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from app.factory import load
from app.hermes import TEXT, grammar
from app.schemas.chat import ChatRequest
from app.tools import ToolUse, definitions, tool_use
from core import InvalidRequest, StructuredOutput, lark_json
from tests.app.servers import RunningServer, in_process, make_settings
from tests.app.test_completions import chunks

HELLO = [{"role": "user", "content": "Hi"}]
CALL = ["<tool_", "call>", '{"name": "f", "argu', 'ments": {"a', '": 1}', "}", "</tool_call>"]
ARGUMENTS = '{"a": 1}'
FORCED = {"type": "function", "function": {"name": "f"}}


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **fields}}


TOOLS = [tool("f"), tool("g")]


with_room = partial(in_process, num_kv_blocks=512)  # tools take hundreds of tokens in words


def assemble(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """One choice's message as clients put it together from a stream."""
    content, calls, reasons = None, {}, []
    for choice in (c for event in events for c in event["choices"] if c["index"] == index):
        delta = choice["delta"]
        reasons.append(choice["finish_reason"])
        if delta.get("content") is not None:
            content = (content or "") + delta["content"]
        for piece in delta.get("tool_calls", []):
            if "id" in piece:
                assert piece["index"] == len(calls)
                assert ("function", "") == (piece["type"], piece["function"]["arguments"])
                calls[piece["index"]] = [piece["id"], piece["function"]["name"], ""]
            else:
                assert {"index", "function"} == set(piece)
                assert {"arguments"} == set(piece["function"])
                calls[piece["index"]][2] += piece["function"]["arguments"]
    assert [None] * (len(reasons) - 1) == reasons[:-1]
    assert len(calls) == len({call[0] for call in calls.values()})
    return {"content": content, "calls": [tuple(call[1:]) for call in calls.values()], "reason": reasons[-1]}


def plain(body: dict[str, Any], index: int = 0) -> dict[str, Any]:
    choice = body["choices"][index]
    message = choice["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    return {"content": message["content"], "calls": calls, "reason": choice["finish_reason"]}


async def test_a_call_has_openais_shape():
    async with with_room() as server:
        body = (await server.chat(messages=HELLO, tools=TOOLS, script=CALL)).json()

    (choice,) = body["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert {"id": call["id"], "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}} == call
    assert {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]} == choice["message"]
    assert "tool_calls" == choice["finish_reason"]


@pytest.mark.parametrize(
    ("script", "content", "calls", "reason"),
    [
        (["Hel", "lo"], "Hello", 0, "stop"),
        (["Wait. ", *CALL], "Wait.", 1, "tool_calls"),
        ([*CALL, "\n", *CALL], None, 2, "tool_calls"),
        (["<tool_call>", "oops", "</tool_call>"], "<tool_call>oops</tool_call>", 0, "stop"),
        ([["<tool_call>", '{"name": "f", "arguments": {"a": 1}}', "</tool_call>"], "!"], "!", 1, "tool_calls"),
    ],
)
async def test_a_stream_assembles_to_the_whole_answer(script: Any, content: str | None, calls: int, reason: str):
    async with with_room() as server:
        asked = {"messages": HELLO, "tools": TOOLS, "script": script}
        whole = plain((await server.chat(**asked)).json())
        events = chunks(await server.chat(**asked, stream=True))

    assert {"content": content, "calls": [("f", ARGUMENTS)] * calls, "reason": reason} == whole
    assert {**whole, "content": content or ""} == assemble(events)  # a stream's role comes with '' before all else


async def test_a_call_that_the_limit_cuts_ends_with_length():
    async with with_room() as server:
        asked = {"messages": HELLO, "tools": TOOLS, "script": CALL, "max_tokens": 4}
        whole = plain((await server.chat(**asked)).json())
        streamed = assemble(chunks(await server.chat(**asked, stream=True)))

    assert {"content": None, "calls": [("f", '{"a')], "reason": "length"} == whole
    assert {**whole, "content": ""} == streamed


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_a_call_that_a_stop_cuts_is_the_same_whole_and_streamed_where_calls_are_held_to_schemas(choice: str):
    asked = {"messages": HELLO, "tools": [tool("f", strict=True)], "tool_choice": choice, "script": CALL, "stop": ": 1"}
    async with with_room() as server:
        whole = plain((await server.chat(**asked)).json())
        streamed = assemble(chunks(await server.chat(**asked, stream=True)))

    assert (
        ([("f", '{"a"')], "tool_calls") == (whole["calls"], whole["reason"]) == (streamed["calls"], streamed["reason"])
    )


@pytest.mark.parametrize("kind", [["object", "null"], ["object"]])
async def test_parameters_that_may_be_an_object_are_one(kind: list[str]):
    asked = {"messages": HELLO, "tools": [tool("f", parameters={"type": kind})], "tool_choice": FORCED}
    async with with_room() as server:
        assert 200 == (await server.chat(**asked, script=["{}"])).status_code


@pytest.mark.parametrize("inside", ['{"name": "f", "arguments": {bad', '{"name": "f", "arguments": {"a": 1'])
async def test_a_call_that_the_model_left_unfinished_is_none_where_the_whole_is_known(inside: str):
    async with with_room() as server:
        body = (await server.chat(messages=HELLO, tools=TOOLS, script=["<tool_call>", inside])).json()

    assert {"content": f"<tool_call>{inside}", "calls": [], "reason": "stop"} == plain(body)


async def test_arguments_stream_in_pieces_and_tokens_stay_with_what_they_wrote():
    async with with_room() as server:
        asked = {"messages": HELLO, "tools": TOOLS, "script": CALL, "logprobs": True, "return_token_ids": True}
        whole = (await server.chat(**asked)).json()["choices"][0]
        events = chunks(await server.chat(**asked, stream=True))

    choices = [event["choices"][0] for event in events]
    pieces = [c["delta"]["tool_calls"][0]["function"]["arguments"] for c in choices if "tool_calls" in c["delta"]]
    assert ["", '{"a', '": 1}'] == pieces
    assert whole["token_ids"] == [id_ for choice in choices for id_ in choice.get("token_ids", [])]
    logprobs = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert whole["logprobs"]["content"] == logprobs


async def test_every_choice_has_its_own_calls():
    async with with_room() as server:
        asked = {"messages": HELLO, "tools": TOOLS, "script": CALL, "n": 2}
        whole = (await server.chat(**asked)).json()
        events = chunks(await server.chat(**asked, stream=True))

    for index in (0, 1):
        assert [("f", ARGUMENTS)] == plain(whole, index)["calls"] == assemble(events, index)["calls"]


async def test_without_parallel_calls_there_is_one():
    async with with_room() as server:
        asked = {"messages": HELLO, "tools": TOOLS, "script": [*CALL, *CALL], "parallel_tool_calls": False}
        assert [("f", ARGUMENTS)] == plain((await server.chat(**asked)).json())["calls"]


async def test_with_choice_none_the_model_is_told_nothing_and_its_text_is_text():
    async with with_room() as server:
        body = (await server.chat(messages=HELLO, tools=TOOLS, tool_choice="none", script=CALL)).json()
        without = (await server.chat(messages=HELLO, script=CALL)).json()
        told = (await server.chat(messages=HELLO, tools=TOOLS, script=CALL)).json()

    assert {"content": "".join(CALL), "calls": [], "reason": "stop"} == plain(body)
    assert body["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"] < told["usage"]["prompt_tokens"]


async def test_calls_and_results_go_back_into_the_prompt():
    made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c", "content": "seven"},
    ]
    async with with_room() as server:
        body = (await server.chat(messages=messages, script=["x"], return_token_ids=True)).json()

    prompt = bytes(body["prompt_token_ids"]).decode()
    assert '"arguments": {"a": 1}' in prompt
    assert "seven" in prompt


BAD = {"properties": {"a": {"type": "string", "pattern": "("}}}
WEATHER = {
    "type": "object",
    "properties": {"place": {"enum": ["Rom", "Kyōto"]}, "days": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["place", "days"],
    "additionalProperties": False,
}


def assert_fits(arguments: str) -> None:
    found = json.loads(arguments)
    assert {"place", "days"} == set(found)
    assert found["place"] in ("Rom", "Kyōto")
    assert found["days"] in (1, 2, 3)


@pytest.fixture
async def embedded() -> AsyncIterator[RunningServer]:
    """The embedded model, which calls nothing of its own accord."""
    async with in_process(load(make_settings())) as server:
        yield server


@pytest.mark.parametrize("temperature", [0, 1, 2])
@pytest.mark.parametrize(("choice", "reason"), [(FORCED, "stop"), ("required", "tool_calls")])
async def test_what_must_be_called_is_called_with_arguments_that_fit(
    embedded: RunningServer, choice: Any, reason: str, temperature: float
):
    asked = {"messages": HELLO, "tools": [tool("f", parameters=WEATHER)], "tool_choice": choice}
    asked |= {"temperature": temperature, "seed": 1, "parallel_tool_calls": False}
    whole = plain((await embedded.chat(**asked)).json())
    events = chunks(await embedded.chat(**asked, stream=True))

    assert whole == assemble(events)
    ((name, arguments),) = whole["calls"]
    assert ("f", None, reason) == (name, whole["content"], whole["reason"])
    assert_fits(arguments)
    assert len(events) > 5


async def test_required_calls_may_be_many_and_of_any_function(embedded: RunningServer):
    tools = [tool("f", parameters=WEATHER), tool("now", parameters=None)]
    asked = {"messages": HELLO, "tools": tools, "tool_choice": "required", "temperature": 1, "n": 8, "seed": 3}
    body = (await embedded.chat(**asked, max_tokens=300)).json()

    found = [plain(body, index) for index in range(8)]
    assert {"f", "now"} == {name for answer in found for name, _ in answer["calls"]}
    assert any(len(answer["calls"]) > 1 for answer in found)
    for answer in found:
        for name, arguments in answer["calls"][:-1] if answer["reason"] == "length" else answer["calls"]:
            if name == "f":
                assert_fits(arguments)
            else:
                assert "{}" == arguments


@pytest.mark.parametrize("is_parallel", [True, False])
def test_left_to_itself_a_model_is_held_to_the_schemas_of_strict_functions_once_it_calls(is_parallel: bool):
    strict = tool("f", parameters=WEATHER, strict=True)
    loose, mixed = (
        tool_use(ChatRequest(messages=[{"role": "user"}], tools=tools, parallel_tool_calls=is_parallel))
        for tools in (TOOLS, [strict, tool("g", parameters=WEATHER)])
    )
    held = StructuredOutput(
        "grammar", grammar({"f": WEATHER, "g": {"type": "object"}}, is_parallel=is_parallel, otherwise=TEXT)
    )

    assert loose.structured_output(None) is None
    assert held == mixed.structured_output(None)


async def test_with_a_form_beside_tools_the_answer_is_calls_or_in_the_form(embedded: RunningServer):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    tools = [tool("f", parameters=WEATHER, strict=True)]
    asked = {"messages": HELLO, "tools": tools, "response_format": form, "n": 8, "seed": 1}
    body = (await embedded.chat(**asked, temperature=2, parallel_tool_calls=False)).json()

    for index in range(8):
        answer = plain(body, index)
        if answer["calls"]:
            assert_fits(answer["calls"][0][1])
        else:
            assert json.loads(answer["content"]) in ({"n": 1}, {"n": 2})


async def test_a_form_that_cannot_be_is_told_by_its_own_name():
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": BAD}}
    async with with_room() as server:
        for extra in ({}, {"tools": TOOLS}):
            response = await server.chat(messages=HELLO, response_format=form, **extra)
            assert (400, "response_format") == (response.status_code, response.json()["error"]["param"])


def use(choice: Any = "auto", **fields: Any) -> ToolUse:
    return tool_use(ChatRequest(messages=[{"role": "user"}], tools=[tool(**fields)], tool_choice=choice))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("form", "term"),
    [
        (StructuredOutput("json_schema", '{"type": "integer"}'), lark_json({"type": "integer"})),
        (StructuredOutput("json_schema", "true"), lark_json({})),
        (StructuredOutput("json_object"), lark_json({"type": "object"})),
    ],
)
def test_left_to_itself_a_model_calls_or_answers_in_the_form(form: StructuredOutput, term: str, strict: bool):
    arguments = WEATHER if strict else {"type": "object"}
    held = use(parameters=WEATHER, strict=strict).structured_output(form)

    assert StructuredOutput("grammar", grammar({"f": arguments}, is_parallel=True, otherwise=term)) == held
    assert form == use("none").structured_output(form)


@pytest.mark.parametrize(
    ("choice", "form"),
    [
        ("required", StructuredOutput("json_object")),
        (FORCED, StructuredOutput("json_object")),
        ("auto", StructuredOutput("regex", "a")),
        ("auto", StructuredOutput("json_schema", "{")),
        ("auto", StructuredOutput("json_schema", "7")),
    ],
)
def test_a_form_and_calls_that_exclude_each_other_are_refused(choice: Any, form: StructuredOutput):
    with pytest.raises(InvalidRequest):
        use(choice).structured_output(form)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [tool("")]}, "tools"),
        ({"tools": [tool("with space")]}, "tools"),
        ({"tools": [tool("x" * 129)]}, "tools"),
        ({"tools": [tool(parameters=[])]}, "tools"),
        ({"tools": [tool(), tool()]}, "tools"),
        ({"tools": [tool(str(i)) for i in range(129)]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": FORCED}, "tool_choice"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools"),
        ({"tools": [tool(), tool("g", parameters=BAD, strict=True)]}, "tools"),
        ({"tools": [tool(parameters=BAD)], "tool_choice": "required"}, "tools"),
        ({"tools": [tool(parameters=BAD)], "tool_choice": FORCED}, "tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "function"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]}, "messages"),
    ],
)
async def test_tools_that_cannot_be_are_refused_by_name(body: dict[str, Any], param: str):
    async with with_room() as server:
        response = await server.chat(**{"messages": HELLO, **body})

    error = response.json()["error"]
    assert (400, "invalid_request_error", param) == (response.status_code, error["type"], error["param"])
    assert error["message"]


async def test_tokenize_counts_the_tools_too():
    async with with_room() as server:
        counted = (await server.client.post("/tokenize", json={"messages": HELLO, "tools": TOOLS})).json()["count"]
        body = (await server.chat(messages=HELLO, tools=TOOLS, script=["x"])).json()

    assert body["usage"]["prompt_tokens"] == counted


def test_templates_get_definitions_in_the_order_that_models_were_trained_on():
    written = {"strict": True, "parameters": {"b": 1, "a": 2}, "description": "d", "name": "f"}
    body = ChatRequest(messages=[{"role": "user"}], tools=[{"function": written, "type": "function"}])

    expected = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"b": 1, "a": 2}},
    }
    assert json.dumps([expected]) == json.dumps(definitions(body.tools or []))
    assert [expected] == tool_use(body).definitions
