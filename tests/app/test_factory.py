"""The application from settings alone: it loads its own model, and serves while it is up."""

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app import factory
from app.factory import create_app
from core import ModelLoadError
from tests.app.servers import make_engine, make_settings


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
