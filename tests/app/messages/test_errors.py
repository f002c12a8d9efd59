"""Errors on Anthropic's paths have Anthropic's shape, wherever they come from; on all others they have OpenAI's."""

import json
from typing import Any

import pytest

from tests.app.servers import in_process

BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}


@pytest.mark.parametrize(
    ("status", "kind", "settings", "asked"),
    [
        (400, "invalid_request_error", {}, {"content": b"{", "headers": {"content-type": "application/json"}}),
        (401, "authentication_error", {"api_key": ("secret",)}, {"json": BODY}),
        (404, "not_found_error", {}, {"json": {**BODY, "model": "other"}}),
        (404, "not_found_error", {}, {"json": BODY, "url": "/v1/messages/batches"}),
        (405, "invalid_request_error", {}, {"method": "GET"}),
        (413, "request_too_large", {"max_body_bytes": 10}, {"json": BODY}),
    ],
)
async def test_every_refusal_has_anthropics_shape(status: int, kind: str, settings: Any, asked: dict[str, Any]):
    async with in_process(**settings) as server:
        response = await server.client.request(**{"method": "POST", "url": "/v1/messages", **asked})

    body = response.json()
    assert (status, "error", kind) == (response.status_code, body["type"], body["error"]["type"])
    assert body["error"]["message"]
    assert len(response.content) == int(response.headers["content-length"])


async def test_a_server_that_takes_no_more_is_overloaded():
    async with in_process() as server:
        server.service.loop.is_draining = True
        response = await server.client.post("/v1/messages", json=BODY)

    assert (503, "overloaded_error") == (response.status_code, response.json()["error"]["type"])
    assert "retry-after" in response.headers


async def test_a_key_is_taken_as_clients_of_either_api_send_it():
    async with in_process(api_key=("secret",)) as server:
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert 200 == (await server.client.post("/v1/messages", json=BODY, headers=headers)).status_code


async def test_other_paths_keep_openais_shape():
    async with in_process() as server:
        for path in ("/v1/responses", "/v1/messagesx"):
            error = json.loads((await server.client.post(path, json={})).text)["error"]
            assert {"message", "type", "param", "code"} == set(error)
