"""The application from settings alone: it loads its own model, and serves while it is up."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app import factory
from app.factory import create_app
from core import ModelLoadError
from tests.app.servers import in_process, make_engine, make_settings


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_without_an_engine_the_model_of_the_settings_is_loaded(monkeypatch: pytest.MonkeyPatch):
    loaded: list[Any] = []

    def load(settings: Any) -> Any:
        loaded.append(settings.model)
        return make_engine()

    monkeypatch.setattr(factory, "load", load)
    app = create_app(make_settings(served_model_name=("x",)))
    assert [] == loaded
    async with app.router.lifespan_context(app), client_of(app) as client:
        assert "x" == (await client.get("/v1/models")).json()["data"][0]["id"]
    assert ["octavo-tiny"] == loaded


def test_a_model_that_is_not_there_is_said_so():
    with pytest.raises(ModelLoadError, match="no-such-model"):
        factory.load(make_settings(model="no-such-model"))


async def test_an_application_can_be_started_again():
    app = create_app(make_settings(), make_engine())
    for _ in range(2):
        async with app.router.lifespan_context(app), client_of(app) as client:
            assert 200 == (await client.post("/v1/completions", json={"prompt": "p"})).status_code


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_a_proxy_may_leave_the_root_path_before_a_path_or_take_it_off(prefix: str):
    async with in_process(root_path="/llm", api_key=("k",)) as server:
        headers = {"Authorization": "Bearer k"}
        closed = await server.client.get(f"{prefix}/v1/models")
        models = await server.client.get(f"{prefix}/v1/models", headers=headers)
        health = await server.client.get(f"{prefix}/health")
        document = await server.client.get(f"{prefix}/openapi.json", headers=headers)

    assert [401, 200, 200] == [response.status_code for response in (closed, models, health)]
    assert [{"url": "/llm"}] == document.json()["servers"]


@pytest.mark.parametrize("path", ["/llm/llm/health", "/llmhealth", "/other/health"])
async def test_the_root_path_opens_nothing_else(path: str):
    async with in_process(root_path="/llm", api_key=("k",)) as server:
        assert 401 == (await server.client.get(path)).status_code


@pytest.mark.parametrize(
    ("origin", "method", "header", "status"),
    [
        ("http://a", "POST", "x-good", 200),
        ("http://b", "POST", "x-good", 400),
        ("http://a", "PUT", "x-good", 400),
        ("http://a", "POST", "x-bad", 400),
    ],
)
async def test_browsers_may_do_what_the_flags_allow(origin: str, method: str, header: str, status: int):
    allowed = {"allowed_origins": ("http://a",), "allowed_methods": ("POST",), "allowed_headers": ("x-good",)}
    asked = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": header, "Origin": origin}
    async with in_process(**allowed, allow_credentials=True) as server:
        preflight = await server.client.options("/v1/chat/completions", headers=asked)
        answer = await server.client.get("/v1/models", headers={"Origin": origin})

    assert status == preflight.status_code
    assert ("http://a" if origin == "http://a" else None) == answer.headers.get("access-control-allow-origin")
    assert "true" == answer.headers["access-control-allow-credentials"]
    assert {"x-request-id", "request-id", "retry-after"} == set(
        answer.headers["access-control-expose-headers"].split(", ")
    )
