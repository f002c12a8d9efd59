"""A body's script: pieces as text, as bytes, with log-probabilities; and what is no script."""

from typing import Any

import pytest

from app.errors import ApiError
from app.scripts import parse_script
from core import InvalidRequest, ScriptedToken
from tests.app.servers import in_process

TOP = [{"token": "Hel", "logprob": -0.25}, {"token": "Hal", "logprob": -2.0}, {"token": "?", "bytes": [226]}]
LIKELY = {"token": "Hel", "logprob": -0.25, "top_logprobs": TOP}


@pytest.mark.parametrize(
    ("script", "entries"),
    [
        (["Hel", "lo"], ("Hel", "lo")),
        ([[226, 130], [172]], (b"\xe2\x82", b"\xac")),
        ([["a", [226, 130]], "b"], (("a", b"\xe2\x82"), "b")),
        ([{"token": "a", "logprob": -1}], (ScriptedToken("a", -1.0),)),
        ([{"token": "?", "bytes": [226, 130], "logprob": -0.5}], (ScriptedToken(b"\xe2\x82", -0.5),)),
        (
            [["a", {"token": "b", "top_logprobs": [{"token": "c", "logprob": -2}, {"token": "?", "bytes": [255]}]}]],
            (("a", ScriptedToken("b", 0.0, (("c", -2.0), (b"\xff", 0.0)))),),
        ),
    ],
)
def test_a_list_of_integers_is_one_piece_and_any_other_list_is_a_step(script: Any, entries: Any):
    assert entries == parse_script(script, is_enabled=True)


@pytest.mark.parametrize(
    "script", [[], "text", [""], {"token": "a"}, [[]], [[256]], [[-1]], [[1.5]], [True], [["a", []]], ["\ud800"]]
)
def test_a_script_that_is_none_is_refused(script: Any):
    with pytest.raises(InvalidRequest) as refusal:
        parse_script(script, is_enabled=True)
    assert "script" == refusal.value.param


@pytest.mark.parametrize(
    "piece",
    [
        {},
        {"token": ""},
        {"token": "\ud800"},
        {"token": "a", "logprob": 0.1},
        {"token": "a", "logprob": float("nan")},
        {"token": "a", "logprob": -10000},
        {"token": "a", "bytes": [256]},
        {"token": "a", "bytes": []},
        {"token": "a", "top_logprobs": [{"token": ""}]},
        {"token": "a", "top_logprobs": [{"logprob": -1}]},
        {"token": "a", "top_logprobs": [{"token": "b"}] * 1025},
    ],
)
def test_a_piece_with_logprobs_that_cannot_be_is_refused(piece: Any):
    with pytest.raises(InvalidRequest) as refusal:
        parse_script(["a", piece], is_enabled=True)
    assert "script" == refusal.value.param


def test_scripts_are_refused_unless_the_server_takes_them():
    with pytest.raises(ApiError) as refusal:
        parse_script(["a"], is_enabled=False)
    assert (400, "script") == (refusal.value.status, refusal.value.param)
    assert parse_script(None, is_enabled=False) is None


async def test_a_chat_answer_reports_the_logprobs_of_its_script():
    async with in_process() as server:
        asked = {"messages": [{"role": "user", "content": "x"}], "script": [LIKELY, "lo"], "logprobs": True}
        answer = (await server.chat(**asked, top_logprobs=3)).json()["choices"][0]

    first, second, *_ = answer["logprobs"]["content"]
    assert ("Hel", -0.25, [72, 101, 108]) == (first["token"], first["logprob"], first["bytes"])
    assert [("Hel", -0.25), ("Hal", -2.0), ("\ufffd", 0.0)] == [
        (t["token"], t["logprob"]) for t in first["top_logprobs"]
    ]
    assert [226] == first["top_logprobs"][2]["bytes"]
    assert (0.0, []) == (second["logprob"], second["top_logprobs"])


async def test_a_recorded_answer_can_be_said_again():
    async with in_process() as server:
        asked = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 3, "max_tokens": 2}
        recorded = (await server.chat(**asked, script=[LIKELY, {"token": "?", "bytes": [226, 130]}])).json()["choices"]
        again = (await server.chat(**asked, script=recorded[0]["logprobs"]["content"])).json()["choices"]

    assert recorded == again


async def test_a_completion_reports_as_many_alternatives_as_were_asked_for():
    async with in_process() as server:
        answer = (await server.complete(prompt="x", script=[LIKELY], logprobs=2)).json()["choices"][0]

    assert [{"Hel": -0.25, "Hal": -2.0}, {"<|end|>": 0.0}] == [
        answer["logprobs"]["top_logprobs"][0],
        {"<|end|>": answer["logprobs"]["token_logprobs"][1]},
    ]
    assert -0.25 == answer["logprobs"]["token_logprobs"][0]


async def test_the_best_of_scripts_is_judged_by_its_logprobs():
    """Both samples say the same, so what counts is that the mean is of the script's numbers."""
    async with in_process() as server:
        body = (await server.complete(prompt="x", script=[LIKELY], best_of=2)).json()

    assert "Hel" == body["choices"][0]["text"]
