"""Public reports on chat templates and tool calls: what a conversation's form does to the prompt and to the answer."""

import asyncio
import json
from typing import Any

import pytest

from tests.app.test_tools import assemble
from tests.reports.conftest import Serve, scripted

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


def message(role: str, content: Any = "Hi") -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (["user", "user"], "roles must alternate"),
        (["system", "user"], "System role not supported"),
        (["robot"], "robot"),
    ],
)
async def test_bc_099_what_a_template_raises_is_a_400_with_its_words(serve: Serve, roles: list[str], said: str):
    """BC-099, ggml-org/llama.cpp#19851, template error -> 500: a strict template's complaint made agents retry."""
    server = await serve(chat_template=STRICT)
    refused = await server.chat(messages=[message(role) for role in roles])
    taken = await server.chat(messages=[message("user")], max_tokens=1)

    error = refused.json()["error"]
    assert (400, "invalid_request_error", "messages") == (refused.status_code, error["type"], error["param"])
    assert said in error["message"]
    assert 200 == taken.status_code


async def test_bc_101_parts_count_as_their_text_joined_by_newlines(serve: Serve):
    """BC-101, ml-explore/mlx-examples#1195, content given as a list of parts: it raised, or was printed as Python."""
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    server = await serve()

    async def prompt(*messages: dict[str, Any]) -> str:
        body = (await server.chat(messages=messages, **scripted("x"), return_token_ids=True)).json()
        return bytes(body["prompt_token_ids"]).decode()

    for role in ("system", "user", "tool", "assistant"):
        joined = await prompt(message("user", "Q"), message(role, "Hi\nthere"))
        assert joined == await prompt(message("user", "Q"), message(role, parts)), role
        assert "[{'type'" not in joined
    assert await prompt(message("user", "")) == await prompt(message("user", []))
    image = await server.chat(messages=[message("user", [*parts, {"type": "image_url", "image_url": {"url": "x"}}])])
    assert (400, "messages") == (image.status_code, image.json()["error"]["param"])


async def test_bc_104_parallel_calls_have_indices_ids_and_arguments_of_their_own(serve: Serve):
    """BC-104, InternLM/lmdeploy#3412, parallel tool calls all streamed with index 0: clients merged the arguments."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    calls = ['<tool_call>{"name": "f", "arg', 'uments": {"a', '": 1}}</tool_call>\n<tool_', 'call>{"name": "g",']
    script = scripted(*calls, ' "arguments": {"b": [2, ', '"}"]}}</tool_call>')
    server = await serve()
    asked = {"messages": [message("user")], "tools": tools, **script}
    whole = (await server.chat(**asked)).json()["choices"][0]["message"]["tool_calls"]
    response = await server.chat(**asked, stream=True)

    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    streamed = assemble(events)  # checks that indices count up, and that id, type and name come once and first
    assert [("f", '{"a": 1}'), ("g", '{"b": [2, "}"]}')] == streamed["calls"]
    assert streamed["calls"] == [(call["function"]["name"], call["function"]["arguments"]) for call in whole]
    assert 2 == len({call["id"] for call in whole})
    assert "tool_calls" == streamed["reason"]


def _json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def _alternatives(kind: dict[str, Any]) -> dict[str, Any]:
    """Alternatives nested 12 deep, by reference."""
    levels = {
        f"level{i}": {"oneOf": [{"type": "null"}, {**kind, "items": {"$ref": f"#/$defs/level{i + 1}"}}]}
        for i in range(12)
    }
    return {"$ref": "#/$defs/level0", "$defs": {**levels, "level12": {"type": "string"}}}


async def test_bc_108_a_schema_that_takes_too_long_is_refused_while_others_are_served(serve: Serve):
    """BC-108, vllm-project/vllm#54003, schema compilation without time limit: for minutes nothing else answered."""
    server = await serve(live=True)
    endless = _json_schema({"allOf": [{"type": "string", "pattern": f"^(a|b)*{'ab' * i}(a|b)*$"} for i in range(40)]})
    refusal = asyncio.create_task(server.complete(prompt="p", **endless))
    streamed = await server.complete(prompt="Once", stream=True)
    held = await server.complete(prompt="Once", seed=1, max_tokens=2)
    health = await server.client.get("/health")

    assert not refusal.done()
    assert [200, 200, 200] == [response.status_code for response in (streamed, held, health)]
    assert streamed.text.endswith("data: [DONE]\n\n")
    error = (await refusal).json()["error"]
    assert (400, "response_format") == ((await refusal).status_code, error["param"])
    assert "more than 2 s to compile" in error["message"]


@pytest.mark.parametrize(
    ("form", "status"),
    [
        (_json_schema(_alternatives({"type": "array"})), 200),
        (_json_schema(_alternatives({"minLength": 1})), 400),  # not seen to exclude each other
        ({"structured_outputs": {"regex": "(a+)+$"}}, 200),  # no backtracking, so nothing takes long
    ],
    ids=["exclusive", "overlapping", "regex"],
)
async def test_bc_108_a_form_is_honoured_or_refused(serve: Serve, form: dict[str, Any], status: int):
    """BC-108, vllm-project/vllm#54003: the report's own inputs."""
    server = await serve()

    assert status == (await server.complete(prompt="p", max_tokens=9, **form)).status_code
