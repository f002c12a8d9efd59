"""Health, version, load, and the tokenizer by itself."""

from typing import Any

import pytest

from tests.app.servers import CHAT_TEMPLATE, Gate, in_process, live, make_engine


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"), ("GET", "/ready")]
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
