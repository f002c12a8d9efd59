"""API keys: closed unless named open, for whatever way of writing the path or the scheme."""

from typing import Any

import pytest

from tests.app.servers import in_process

KEYS = {"api_key": ("key one", "kéyà")}
RIGHT = {"Authorization": "Bearer key one"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/x"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/load"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/nowhere"),
        ("GET", "//v1/models"),
        ("GET", "/health/../v1/models"),
        ("OPTIONS", "/v1/models"),
    ],
)
@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic key one"}, {"Authorization": "key one"}]
)
async def test_everything_else_asks_for_a_key(method: str, path: str, headers: dict[str, str]):
    async with in_process(**KEYS) as server:
        response = await server.client.request(method, path, headers=headers)

    assert (401, "invalid_api_key") == (response.status_code, response.json()["error"]["code"])
    assert "Bearer" == response.headers["www-authenticate"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version", "/metrics"])
async def test_probes_and_scrapers_need_none(path: str):
    async with in_process(**KEYS) as server:
        assert 200 == (await server.client.get(path)).status_code


@pytest.mark.parametrize("value", ["Bearer key one", "bearer key one", "BEARER  key one", "Bearer kéyà".encode()])
async def test_each_key_opens_whatever_the_case_of_the_scheme(value: Any):
    async with in_process(**KEYS) as server:
        response = await server.client.get("/v1/models", headers={"Authorization": value})

    assert 200 == response.status_code


@pytest.mark.parametrize("key", ["key one", "kéyà".encode()])
async def test_a_key_may_come_in_a_header_of_its_own(key: Any):
    async with in_process(**KEYS) as server:
        assert 200 == (await server.client.get("/v1/models", headers={"X-Api-Key": key})).status_code
        assert 401 == (await server.client.get("/v1/models", headers={"X-Api-Key": "key two"})).status_code


async def test_callers_share_a_prefix_with_their_other_keys_and_with_nobody_else():
    """The name is what separates: an old key and a new one of the same name are one caller."""
    prompt = "a prompt of some blocks"
    keys = ("alice:old", "alice:new", "bob:other", "nameless")
    async with in_process(api_key=keys) as server:
        cached = []
        for key in ("old", "new", "other", "nameless", "nameless"):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": prompt, "max_tokens": 1}
            answer = (await server.client.post("/v1/completions", json=body, headers=headers)).json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [0, 20, 0, 0, 20] == cached


async def test_metrics_can_be_closed_too():
    async with in_process(**KEYS, protect_metrics=True) as server:
        assert 401 == (await server.client.get("/metrics")).status_code
        assert 200 == (await server.client.get("/metrics", headers=RIGHT)).status_code


async def test_without_keys_everything_is_open():
    async with in_process() as server:
        assert 200 == (await server.client.get("/v1/models")).status_code


async def test_a_browsers_preflight_passes_and_a_refusal_carries_its_headers():
    origin = {"Origin": "http://a.example"}
    asked = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with in_process(**KEYS) as server:
        preflight = await server.client.options("/v1/chat/completions", headers=asked)
        refusal = await server.client.post("/v1/chat/completions", headers=origin, json={})

    assert 200 == preflight.status_code
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    assert (401, "*") == (refusal.status_code, refusal.headers["access-control-allow-origin"])
