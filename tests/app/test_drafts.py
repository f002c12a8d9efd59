"""What clients say about drafts and are told of them, against the embedded model and against sums made by hand."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.drafts import DraftTally, joined_text
from app.factory import load
from app.settings import SettingsError, load_settings
from core import DraftOutcome, InvalidRequest
from tests.app.servers import RunningServer, in_process, make_settings
from tests.app.test_completions import chunks

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
OFF, DRAFT_MODEL = "null", json.dumps({"adaptive": False})
LOOK_UP = json.dumps({"method": "ngram", "num_speculative_tokens": 3})


@pytest.fixture(params=[None, LOOK_UP, OFF], ids=["draft model", "look-up", "off"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[RunningServer]:
    fields = {"speculative_config": request.param, "num_kv_blocks": 200, "num_threads": 1}
    async with in_process(load(make_settings(**fields)), **fields) as running:
        yield running


async def complete(server: RunningServer, **body: Any) -> Any:
    response = await server.complete(**{"prompt": PROMPT, "temperature": 0, "max_tokens": 40, **body})
    assert 200 == response.status_code, response.text
    return response.json()


def content(text: Any) -> dict[str, Any]:
    return {"type": "content", "content": text}


def details(answer: Any) -> tuple[int, int]:
    found = answer["usage"]["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


async def test_a_right_prediction_is_accepted_to_the_last_token_but_those_the_target_adds(server: RunningServer):
    """The prompt gives the first token, then steps of eight drafts and one token more: 1 + 9 + 9 + 9 + 9 + 3."""
    plain = await complete(server)
    answer = await complete(server, prediction=content(plain["choices"][0]["text"]))

    assert plain["choices"] == answer["choices"]
    assert "completion_tokens_details" not in plain["usage"]
    assert 40 == answer["usage"]["completion_tokens"]
    num_accepted, num_rejected = details(answer)
    assert (35, 0) == (num_accepted, num_rejected)


async def test_a_wrong_prediction_costs_rejected_tokens_and_changes_nothing(server: RunningServer):
    plain = await complete(server, seed=5, temperature=1, logprobs=2)
    answer = await complete(server, seed=5, temperature=1, logprobs=2, prediction=content("#" * 60))

    assert plain["choices"] == answer["choices"]
    assert (0, 8) == details(answer)  # once eight drafts, and then they have parted


async def test_an_edited_prediction_is_found_again_behind_the_edit(server: RunningServer):
    plain = await complete(server)
    text = plain["choices"][0]["text"]
    answer = await complete(server, prediction=content(text[:15] + "QQ" + text[15:]))

    assert plain["choices"] == answer["choices"]
    num_accepted, num_rejected = details(answer)
    assert num_accepted >= 25
    assert 0 < num_rejected < 20


async def test_a_prediction_can_be_turned_off_with_the_other_drafts(server: RunningServer):
    answer = await complete(server, prediction=content("abc"), speculative={"num_speculative_tokens": 0})
    assert (0, 0) == details(answer)


async def test_a_smaller_limit_holds_for_predictions_too(server: RunningServer):
    text = (await complete(server))["choices"][0]["text"]
    answer = await complete(server, prediction=content(text), speculative={"num_speculative_tokens": 1})
    assert (20, 0) == details(answer)  # each step one and one more, the last token alone


async def test_all_samples_of_a_request_count(server: RunningServer):
    body: dict[str, Any] = {"n": 3, "seed": 1, "temperature": 1, "max_tokens": 20}
    plain = await complete(server, **body)
    answer = await complete(server, **body, prediction=content(plain["choices"][1]["text"]))

    assert plain["choices"] == answer["choices"]
    assert details(answer)[0] >= 16


async def test_chat_takes_text_or_text_parts_and_streams_tell_at_the_end(server: RunningServer):
    body: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    plain = (await server.chat(**body)).json()
    text = plain["choices"][0]["message"]["content"]
    parts = [{"type": "text", "text": text}]
    answers = [(await server.chat(**body, prediction=content(value))).json() for value in (text, parts)]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = chunks(await server.chat(**body, prediction=content(text), **options))

    assert answers[0]["choices"] == answers[1]["choices"] == plain["choices"]
    assert text == "".join(c["delta"].get("content") or "" for part in streamed for c in part["choices"])
    assert details(answers[0]) == details(answers[1]) == details(streamed[-1])
    assert details(answers[0])[0] > 10


@pytest.mark.parametrize(
    "prediction",
    ["text", {}, {"type": "content"}, {"type": "image", "content": "x"}, content(1), content([{"type": "image_url"}])],
)
async def test_what_is_no_prediction_is_refused_by_its_name(prediction: Any):
    async with in_process() as server:
        for response in (
            await server.complete(prompt="x", prediction=prediction),
            await server.chat(messages=MESSAGES, prediction=prediction),
        ):
            assert (400, "prediction") == (response.status_code, response.json()["error"]["param"])
            assert "prediction" in response.json()["error"]["message"]


async def test_a_prediction_longer_than_any_output_is_refused():
    async with in_process(max_model_len=100) as server:
        response = await server.complete(prompt="x", prediction=content("y" * 9999))
        assert (400, "prediction") == (response.status_code, response.json()["error"]["param"])
        assert "prediction has 9999 bytes, limit is" in response.json()["error"]["message"]


def test_parts_are_joined_with_a_newline_and_others_named_by_their_place():
    assert "a\nb" == joined_text([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], "x")
    with pytest.raises(InvalidRequest, match=r"messages\[3\].content has a part of type 'audio'") as caught:
        joined_text([{"type": "audio"}], "messages[3].content")
    assert "messages" == caught.value.param


# vLLM's metrics.speculative_decoding

FIXED: dict[str, Any] = {"speculative_config": DRAFT_MODEL, "num_threads": 1, "num_kv_blocks": 200}


def test_metrics_add_up_the_steps():
    """Of the last step's four drafts all were accepted, and a stop string cut it behind its second token."""
    tally = DraftTally()
    for outcome in (DraftOutcome(3, 0, 1), DraftOutcome(3, 3, 4), DraftOutcome(1, 1, 2), DraftOutcome(4, 4, 2)):
        tally.add(outcome, is_kept=True)
    expected = {
        "mean_acceptance_length": 1 + 5 / 4,
        "draft_acceptance_rate": 5 / 11,
        "acceptance_histogram": [1, 2, 0, 1, 0],
        "acceptance_histogram_by_draft_length": {"1": [0, 1], "3": [1, 0, 0, 1], "4": [0, 1, 0, 0, 0]},
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 11,
        "num_spec_tokens": 3,
    }
    lists = {"per_step_accepted": [0, 3, 1, 1], "per_step_drafted": [3, 3, 1, 4]}

    summary = tally.summary(3, is_detailed=False).model_dump(exclude_unset=True)
    detailed = tally.summary(3, is_detailed=True).model_dump(exclude_unset=True)
    assert expected == summary
    assert expected | lists == detailed


def test_metrics_of_a_request_that_drafted_nothing_are_zeros():
    summary = DraftTally().summary(2, is_detailed=False)
    assert (1.0, 0.0, [0, 0, 0]) == (
        summary.mean_acceptance_length,
        summary.draft_acceptance_rate,
        summary.acceptance_histogram,
    )


def test_predicted_drafts_that_a_stop_did_not_cut_off_are_in_the_output():
    tally = DraftTally()
    tally.add(DraftOutcome(8, 5, 6, is_predicted=True), is_kept=False)  # five accepted, and the bonus token
    tally.add(DraftOutcome(8, 5, 2, is_predicted=True), is_kept=False)  # cut behind the second of them
    tally.add(DraftOutcome(3, 3, 4), is_kept=False)  # the draft model's
    found = tally.prediction_details()
    assert (7, 9) == (found.accepted_prediction_tokens, found.rejected_prediction_tokens)


async def test_responses_tell_of_their_drafts_what_the_counters_count():
    fields: dict[str, Any] = {"per_request_spec_decode_metrics": "detailed", **FIXED}
    async with in_process(load(make_settings(**fields)), **fields) as server:
        body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        whole = (await complete(server))["metrics"]["speculative_decoding"]
        chat = (await server.chat(messages=MESSAGES, temperature=0, max_tokens=30)).json()
        last = chunks(await server.complete(prompt="Lily and Tom", temperature=0, max_tokens=30, **body))[-1]
        several = await complete(server, n=2)
        counted = await server.metrics()
    found = [whole, chat["metrics"]["speculative_decoding"], last["metrics"]["speculative_decoding"]]

    assert several["metrics"] is None
    assert [] == last["choices"]
    assert all(sum(m["acceptance_histogram"]) == m["num_spec_steps"] == len(m["per_step_drafted"]) > 3 for m in found)
    num_drafts = sum(m["num_spec_steps"] for m in found)
    assert num_drafts < counted["vllm:spec_decode_num_drafts_total"]  # the two samples count there, too
    assert whole["num_accepted_draft_tokens"] == sum(whole["per_step_accepted"]) > 0


async def test_metrics_of_one_request_are_the_increase_of_the_counters():
    fields: dict[str, Any] = {"per_request_spec_decode_metrics": "summary", **FIXED}
    async with in_process(load(make_settings(**fields)), **fields) as server:
        told = (await complete(server, stop=["the"]))["metrics"]["speculative_decoding"]
        counted = await server.metrics()
    assert "per_step_drafted" not in told
    assert counted["vllm:spec_decode_num_drafts_total"] == told["num_spec_steps"] > 0
    assert counted["vllm:spec_decode_num_draft_tokens_total"] == told["num_draft_tokens"]
    assert counted["vllm:spec_decode_num_accepted_tokens_total"] == told["num_accepted_draft_tokens"]


async def test_responses_are_as_ever_unless_the_server_is_told_to_tell(server: RunningServer):
    assert "metrics" not in await complete(server)


def test_metrics_need_speculation():
    with pytest.raises(SettingsError, match="needs speculation"):
        load_settings({"per_request_spec_decode_metrics": "summary", "speculative_config": OFF})
