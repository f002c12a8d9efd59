"""Every request is one line in the log when it ends, with what its route has found out."""

import asyncio
import logging
from typing import Any

import pytest

from app.access import note
from tests.app.servers import Gate, in_process, live, make_engine

KEYS = {"api_key": ("alice:secret one", "bob:secret two")}


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.msg == "request finished"]


async def test_a_completion_is_one_line_with_its_tokens_and_its_caller(caplog: pytest.LogCaptureFixture):
    headers = {"X-Request-Id": "mine", "Authorization": "Bearer secret two"}
    with caplog.at_level(logging.INFO):
        async with in_process(**KEYS) as server:
            body = {"prompt": "abc", "max_tokens": 2, "n": 2}
            answer = await server.client.post("/v1/completions", json=body, headers=headers)

    expected = {
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "request_id": answer.json()["id"],
        "trace_id": "mine",
        "key": "bob",
        "reason": "length",
        "num_choices": 2,
        "num_prompt_tokens": 3,
        "num_output_tokens": 4,
    }
    (line,) = lines(caplog)
    assert expected == {name: line[name] for name in expected}
    assert line["duration_s"] >= 0
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models", 200),
        ("GET", "/nowhere", 404),
        ("PUT", "/v1/models", 405),
        ("POST", "/v1/completions", 400),
    ],
)
async def test_whatever_becomes_of_a_request_it_is_one_line(
    method: str, path: str, status: int, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.INFO):
        async with in_process() as server:
            await server.client.request(method, path, headers={"X-Request-Id": "mine"})

    found = [{name: line[name] for name in ("method", "path", "status", "trace_id")} for line in lines(caplog)]
    assert [{"method": method, "path": path, "status": status, "trace_id": "mine"}] == found


async def test_a_refused_caller_has_no_name_and_what_it_chose_is_cut_short(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        async with in_process(**KEYS) as server:
            headers = {"Authorization": "Bearer wrong", "X-Request-Id": "x" * 5000}
            await server.client.get("/" + "y" * 5000, headers=headers)

    (line,) = lines(caplog)
    assert (401, False) == (line["status"], "key" in line)
    assert 256 == len(line["path"]) == len(line["trace_id"])
    assert "wrong" not in caplog.text


async def test_a_client_that_left_is_499_and_its_request_an_abort(caplog: pytest.LogCaptureFixture):
    gate = Gate()
    with caplog.at_level(logging.INFO):
        async with live(make_engine(gate)) as server, gate:
            asked = asyncio.create_task(server.complete(prompt="p", max_tokens=5))
            await gate.until_arrived(1)
            asked.cancel()
            while not lines(caplog):
                await asyncio.sleep(0)

    (line,) = lines(caplog)
    assert (499, "abort", 0) == (line["status"], line["reason"], line["num_output_tokens"])


@pytest.mark.parametrize("path", ["/health", "/metrics", "/load"])
async def test_probes_are_lines_for_those_alone_who_want_to_see_everything(path: str, caplog: pytest.LogCaptureFixture):
    for level, number in ((logging.INFO, 0), (logging.DEBUG, 1)):
        with caplog.at_level(level):
            async with in_process() as server:
                await server.client.get(path)
        assert number == len(lines(caplog))


def test_outside_of_a_request_there_is_nothing_to_add_to():
    note(request_id="r")
