"""What the routes share: names, templates, and clients that leave, streaming or not."""

import asyncio

import pytest

from app.errors import ApiError
from app.service import Service
from core import InvalidRequest
from tests.app.servers import Gate, RunningServer, live, make_engine, make_settings


async def test_the_first_name_answers_and_unknown_ones_do_not():
    service = Service(make_settings(served_model_name=("a", "b")), make_engine())

    assert ["a", "a", "b"] == [service.check_model(name) for name in (None, "", "b")]
    with pytest.raises(ApiError, match="'c' does not exist"):
        service.check_model("c")
    await service.stop()


async def test_a_model_without_a_template_says_so(monkeypatch: pytest.MonkeyPatch):
    engine = make_engine()
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    service = Service(make_settings(), engine)

    with pytest.raises(InvalidRequest, match="--chat-template"):
        service.require_chat_template()
    await service.stop()


async def leave_while_running(server: RunningServer, gate: Gate, *, stream: bool) -> None:
    """Post a long request and close the connection after its first step, while the second is under way."""
    asked = asyncio.create_task(server.complete(prompt="12345", max_tokens=50, stream=stream))
    gate.let_through(1)
    await gate.until_arrived(2)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_takes_its_request_along(stream: bool):
    gate = Gate()
    async with live(make_engine(gate)) as server, gate:
        await leave_while_running(server, gate, stream=stream)
        while server.service.loop.num_open_streams:
            await asyncio.sleep(0)
        gate.let_through(1)  # the step that was under way; there is no permit for another
        found = await server.until_idle()

    assert 2 == gate.num_arrived
    assert (1, 64) == (found["vllm:request_success_total{finished_reason=abort}"], found["octavo:kv_blocks_free"])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_the_queue_is_never_served(stream: bool):
    gate = Gate()
    async with live(make_engine(gate, max_num_seqs=1), max_num_seqs=1) as server, gate:
        first = asyncio.create_task(server.complete(prompt="123", max_tokens=4))
        await gate.until_arrived(1)
        queued = asyncio.create_task(server.complete(prompt="12345", max_tokens=4, stream=stream))
        while server.service.loop.num_in_inbox == 0:
            await asyncio.sleep(0)
        queued.cancel()
        await asyncio.gather(queued, return_exceptions=True)
        while server.service.loop.num_open_streams > 1:
            await asyncio.sleep(0)
        gate.open()
        await first
        found = await server.until_idle()

    assert 3 == found["vllm:prompt_tokens_total"]
    assert 1 == found["vllm:request_success_total{finished_reason=abort}"]
