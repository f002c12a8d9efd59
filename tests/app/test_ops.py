"""Health, version, load, and the tokenizer by itself."""

import asyncio
import json
from typing import Any

import pytest

from tests.app.servers import CHAT_TEMPLATE, Gate, RunningServer, in_process, live, make_engine
from tests.builders import Clock


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"),
        ("HEAD", "/health"),
        ("GET", "/ping"),
        ("POST", "/ping"),
        ("GET", "/ready"),
        ("HEAD", "/ready"),
    ],
)
async def test_a_server_that_lives_says_so_with_an_empty_body(method: str, path: str):
    async with in_process() as server:
        response = await server.client.request(method, path)

    assert (200, b"") == (response.status_code, response.content)


async def test_a_draining_server_is_healthy_but_not_ready():
    async with in_process() as server:
        server.service.loop.is_draining = True

        assert 200 == (await server.client.get("/health")).status_code
        assert 503 == (await server.client.get("/ready")).status_code


async def test_a_dead_engine_is_unhealthy():
    async with in_process() as server:
        server.service.loop.is_dead = True
        response = await server.client.get("/health")

    assert (503, "engine_dead") == (response.status_code, response.json()["error"]["code"])
    assert "retry-after" in response.headers


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
async def test_an_engine_that_says_nothing_is_unhealthy_until_it_does(path: str):
    gate, clock = Gate(), Clock()
    engine = make_engine(gate, clock=clock)
    async with live(engine) as server, gate:
        asked = asyncio.create_task(server.complete(prompt="p", max_tokens=3))
        gate.let_through(1)
        await gate.until_arrived(2)
        clock.now_s += 1.4
        busy = await server.client.get(path)
        clock.now_s += 0.2
        stalled = await server.client.get(path)
        gate.let_through(1)
        await gate.until_arrived(3)
        recovered = await server.client.get(path)
        gate.open()
        await asked
        clock.now_s += 1000
        idle = await server.client.get(path)

    assert [200, 503, 200, 200] == [response.status_code for response in (busy, stalled, recovered, idle)]
    assert "engine_stalled" == stalled.json()["error"]["code"]
    assert "no sign of life for 1.6 s" in stalled.json()["error"]["message"]


async def test_a_long_step_where_steps_are_long_is_no_stall():
    gate, clock = Gate(), Clock()
    engine = make_engine(gate, clock=clock)
    async with live(engine) as server, gate:
        asked = asyncio.create_task(server.complete(prompt="p", max_tokens=9))
        await gate.until_arrived(1)
        clock.now_s += 50  # nobody knows yet how long a step takes
        first = await server.client.get("/health")
        gate.let_through(1)
        await gate.until_arrived(2)
        clock.now_s += 400
        second = await server.client.get("/health")
        clock.now_s += 101
        third = await server.client.get("/health")
        gate.open()
        await asked

    assert [200, 200, 503] == [response.status_code for response in (first, second, third)]


async def test_when_the_engine_loop_has_ended_the_server_says_so():
    async with in_process() as server:
        (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "engine loop"]
        task.cancel()
        await asyncio.wait([task])
        health = await server.client.get("/health")
        answer = await server.complete(prompt="p")

    assert [(503, "engine_dead")] * 2 == [(r.status_code, r.json()["error"]["code"]) for r in (health, answer)]


async def test_requests_are_ended_by_either_of_their_ids_and_their_readers_told():
    gate, started = Gate(), [asyncio.Event() for _ in range(3)]
    async with live(make_engine(gate)) as server, gate:
        names = ("one", "two", "three")
        streams = [asyncio.create_task(streamed(server, *pair)) for pair in zip(names, started, strict=True)]
        while server.service.loop.num_open_streams < 3:
            await asyncio.sleep(0)
        gate.let_through(2)  # the second step has all three
        await asyncio.gather(*(event.wait() for event in started))
        by_name = await server.client.post("/abort_requests", json={"request_ids": ["two", "nobody"]})
        again = await server.client.post("/abort_requests", json={"request_ids": ["two"]})
        gate.open()
        texts = await asyncio.gather(*streams)

    ids = [json.loads(text.split("\n")[0].removeprefix("data: "))["id"] for text in texts]
    assert ([ids[1]], []) == (by_name.json()["aborted"], again.json()["aborted"])
    assert [False, True, False] == ["request_aborted" in text for text in texts]
    assert [True] * 3 == [text.endswith("data: [DONE]\n\n") for text in texts]


async def test_who_waits_for_a_whole_answer_is_told_by_the_status():
    gate = Gate()
    async with live(make_engine(gate)) as server, gate:
        asked = asyncio.create_task(server.complete(prompt="p", max_tokens=9))
        await gate.until_arrived(1)
        await server.client.post("/abort_requests", json={"all": True})
        answer = await asked
        gate.open()
        await server.until_idle()

    assert (410, "request_aborted") == (answer.status_code, answer.json()["error"]["code"])


@pytest.mark.parametrize(("key", "ended"), [("a", ["alice"]), ("b", ["bob"]), ("root", ["alice", "bob"])])
async def test_a_caller_may_end_its_own_requests_and_admin_everybodys(key: str, ended: list[str]):
    gate, keys = Gate(), {"alice": "a", "bob": "b"}
    async with live(make_engine(gate), api_key=("alice:a", "bob:b", "admin:root")) as server, gate:
        body = {"prompt": "p", "max_tokens": 2}
        asked = {
            name: asyncio.create_task(server.client.post("/v1/completions", json=body, headers={"X-Api-Key": secret}))
            for name, secret in keys.items()
        }
        while server.service.loop.num_open_streams < 2:
            await asyncio.sleep(0)
        await server.client.post("/abort_requests", json={"all": True}, headers={"X-Api-Key": key})
        gate.open()
        statuses = {name: (await task).status_code for name, task in asked.items()}

    assert ended == [name for name, status in statuses.items() if status == 410]


@pytest.mark.parametrize("body", [{}, {"all": False}, {"all": True, "request_ids": []}, {"request_ids": "x"}])
async def test_what_to_end_must_be_said(body: dict[str, Any]):
    async with in_process() as server:
        response = await server.client.post("/abort_requests", json=body)

    assert (400, "request_ids") == (response.status_code, response.json()["error"]["param"])


async def test_server_info_tells_the_settings_and_no_secret():
    async with in_process(api_key=("alice:secret",), num_kv_blocks=7) as server:
        response = await server.client.get("/server_info", headers={"X-Api-Key": "secret"})

    info = response.json()
    assert (7, 7, 28, 4) == (
        info["settings"]["num_kv_blocks"],
        info["num_kv_blocks"],
        info["max_model_len"],
        info["block_size"],
    )
    assert "secret" not in response.text


async def streamed(server: RunningServer, name: str, started: asyncio.Event) -> str:
    body, headers = {"prompt": "p", "max_tokens": 4, "stream": True}, {"X-Request-Id": name}
    text = ""
    async with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        async for piece in response.aiter_text():
            text += piece
            started.set()
    return text


async def test_version_and_documentation_are_there():
    async with in_process() as server:
        version = (await server.client.get("/version")).json()
        schema = (await server.client.get("/openapi.json")).json()
        docs = await server.client.get("/docs")

    assert version["version"] == schema["info"]["version"]
    assert "prompt" in schema["components"]["schemas"]["CompletionRequest"]["properties"]
    assert 200 == docs.status_code
    answers = [set(o["responses"]) for path in schema["paths"].values() for o in path.values()]
    assert not any("422" in codes for codes in answers)
    assert "400" in schema["paths"]["/v1/completions"]["post"]["responses"]


async def test_load_counts_open_requests():
    gate = Gate()
    gate.let_through(1)
    async with live(make_engine(gate)) as server, gate:
        assert {"server_load": 0} == (await server.client.get("/load")).json()
        async with server.client.stream("POST", "/v1/completions", json={"prompt": "p", "n": 2, "stream": True}):
            assert {"server_load": 1} == (await server.client.get("/load")).json()
        gate.open()


async def test_tokens_of_a_text_and_back():
    async with in_process(max_model_len=64) as server:
        body = {"prompt": "hé", "return_token_strs": True}
        tokens = (await server.client.post("/tokenize", json=body)).json()
        text = (await server.client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()

    assert {
        "count": 3,
        "max_model_len": 64,
        "tokens": [104, 195, 169],
        "token_strs": ["h", "\ufffd", "\ufffd"],
    } == tokens
    assert {"prompt": "hé"} == text


async def test_tokens_of_a_conversation_are_those_of_its_prompt():
    messages = [{"role": "user", "content": "Hi"}]
    async with in_process() as server:
        tokens = (await server.client.post("/tokenize", json={"messages": messages})).json()
        chat = (await server.chat(messages=messages, script=["x"])).json()

    assert list(b"user: Hi\nassistant: ") == tokens["tokens"]
    assert chat["usage"]["prompt_tokens"] == tokens["count"]


async def test_tokens_of_a_conversation_may_end_with_a_message_that_is_to_go_on():
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Oh"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    async with in_process() as server:
        tokens = (await server.client.post("/tokenize", json=body)).json()
        chat = (await server.chat(**body, script=["x"])).json()

    assert list(b"user: Hi\nassistant: Oh") == tokens["tokens"]
    assert chat["usage"]["prompt_tokens"] == tokens["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, "model"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused_by_name(path: str, body: dict[str, Any], param: str):
    async with in_process() as server:
        response = await server.client.post(path, json=body)

    assert response.status_code in (400, 404)
    assert param == response.json()["error"]["param"]


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
async def test_probes_may_ask_for_the_head_alone(path: str):
    async with in_process() as server:
        alive = await server.client.head(path)
        server.service.loop.is_dead = True
        dead = await server.client.head(path)

    assert (200, b"", 503) == (alive.status_code, alive.content, dead.status_code)


async def test_a_client_without_a_tokenizer_is_told_what_it_needs():
    async with in_process() as server, in_process(chat_template="{{ messages }}") as other:
        info = (await server.client.get("/tokenizer_info")).json()
        template = (await other.client.get("/tokenizer_info")).json()["chat_template"]

    assert ("<|end|>", None, 257) == (info["eos_token"], info["bos_token"], info["vocab_size"])
    assert (CHAT_TEMPLATE, "{{ messages }}") == (info["chat_template"], template)
