"""Public reports about speculative decoding: BC-054, BC-057 and BC-058, and others of their kinds.

"Off" is a server without speculation, which must answer the same.
"""

import json
from typing import Any

import pytest

from tests.app.servers import RunningServer
from tests.app.test_completions import chunks
from tests.reports.answers import WAYS, ask
from tests.reports.conftest import Serve, scripted

OFF = "null"
DRAFT_MODEL = json.dumps({"num_speculative_tokens": 8, "adaptive": False})


def look_up(num_drafts: int) -> str:
    found = {"prompt_lookup_min": 2, "prompt_lookup_max": 5, "adaptive": False}
    return json.dumps({"method": "ngram", "num_speculative_tokens": num_drafts, **found})


SPECULATION = pytest.mark.parametrize(
    "speculation", [DRAFT_MODEL, look_up(8), OFF], ids=["draft model", "look-up", "off"]
)


async def answer_of(server: RunningServer, **body: Any) -> tuple[Any, ...]:
    """Ids, text, log-probabilities, reasons and usage."""
    response = await server.complete(**body, return_token_ids=True, logprobs=2)
    assert 200 == response.status_code, response.text
    answer = response.json()
    return answer["choices"], answer["usage"]


# BC-054: speculation changes greedy output

REPEATED = [
    "token " * 48,  # as reported
    "a" * 200,
    "1, 2, 3, 1, 2, 3, 1, 2, 3, ",
    "the cat and the dog and the cat and the dog and the ",
    "\n\n\n\n\n\n\n\n",
]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0, "seed": 42},  # as reported
    {"temperature": 0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"temperature": 0, "logit_bias": {"32": -5}, "min_tokens": 20},
    {"temperature": 1, "seed": 42},
]


@pytest.mark.parametrize("speculation", [look_up(4), look_up(1), DRAFT_MODEL], ids=["look-up", "one", "draft model"])
async def test_bc_054_repeated_prompts_are_answered_as_without_speculation(serve: Serve, speculation: str):
    """BC-054, vllm-project/vllm#41758, speculation changes greedy output: repetitive prompts and look-up."""
    drafting, plain = await serve(speculative_config=speculation), await serve(speculative_config=OFF)
    for prompt in REPEATED:
        for sampling in SAMPLING:
            body = {"prompt": prompt, "max_tokens": 32, **sampling}
            assert await answer_of(plain, **body) == await answer_of(drafting, **body), (prompt, sampling)
    assert (await drafting.metrics())["vllm:spec_decode_num_accepted_tokens_total"] > 0


# BC-057: drafts run past the context limit


@SPECULATION
@pytest.mark.parametrize("num_tokens", [4, 2, 1])
async def test_bc_057_drafts_end_where_the_context_does(serve: Serve, speculation: str, num_tokens: int):
    """BC-057, vllm-project/vllm#42533, drafts run past the context limit: repetition, and little room behind it."""
    server = await serve(speculative_config=speculation, max_model_len=64, num_kv_blocks=8, block_size=16)
    prompt = ("ab" * 32)[: 64 - num_tokens]
    for way in ("completion", "streamed completion"):
        for limit in ({"max_tokens": num_tokens}, {}):  # asked for, and cut to the room there is
            answer = await ask(server, way, prompt=prompt, ignore_eos=True, temperature=0, **limit)
            assert ("length", num_tokens) == (answer.finish_reason, answer.num_tokens)
    usage = (await answer_of(server, prompt=prompt, max_tokens=num_tokens, ignore_eos=True))[1]

    assert 64 == usage["total_tokens"]
    found = await server.until_idle()
    assert found["octavo:kv_blocks"] == found["octavo:kv_blocks_free"]


@SPECULATION
async def test_a_prediction_ends_where_the_context_does(serve: Serve, speculation: str):
    """Of the kind of BC-057: what is predicted is longer than what can be said."""
    server = await serve(speculative_config=speculation, max_model_len=64, num_kv_blocks=8, block_size=16)
    body = {"prompt": "ab" * 27, "temperature": 0, "ignore_eos": True, "max_tokens": 10}
    plain = await answer_of(server, **body)
    predicted = {"type": "content", "content": plain[0][0]["text"] + "and much more of it"}
    answer = await answer_of(server, **body, prediction=predicted)

    assert plain[0] == answer[0]
    assert (64, 10) == (answer[1]["total_tokens"], answer[1]["completion_tokens"])
    assert answer[1]["completion_tokens_details"]["accepted_prediction_tokens"] >= 8


# BC-058: acceptance metrics overcount after EOS in the draft


@pytest.mark.parametrize("way", WAYS)
async def test_bc_058_drafts_behind_an_end_are_not_counted_as_accepted(serve: Serve, way: str):
    """BC-058, vllm-project/vllm#56101, acceptance metrics overcount after EOS in the draft: the third of five."""
    server = await serve(speculative_config=look_up(5), per_request_spec_decode_metrics="detailed")
    script = scripted(["a", "b", "!", "d", "e", "f"])
    answer = await ask(server, way, **script, stop_token_ids=[ord("!")], max_tokens=20)
    counted = await server.metrics()

    assert ("ab", "stop", 3) == (answer.text, answer.finish_reason, answer.num_tokens)
    names = ("drafts", "draft_tokens", "accepted_tokens")
    assert [1, 5, 2] == [counted[f"vllm:spec_decode_num_{name}_total"] for name in names]
    assert [1, 1, 0] == [
        counted[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{position={i}}}"] for i in range(3)
    ]
    assert 3 == counted["vllm:generation_tokens_total"]


async def test_a_scripts_end_in_one_step_with_its_text_counts_as_much_with_speculation_as_without(serve: Serve):
    for speculation in (look_up(5), OFF):
        server = await serve(speculative_config=speculation)
        for way in WAYS:
            answer = await ask(server, way, **scripted(["a", "b", "!", "d"]), stop_token_ids=[ord("!")], max_tokens=20)
            assert ("ab", "stop", 3) == (answer.text, answer.finish_reason, answer.num_tokens)


async def test_a_response_never_tells_of_more_accepted_tokens_than_it_has(serve: Serve):
    """Of the kind of BC-058, with real drafts and real ends: by EOS, by a stop string, by the limit."""
    server = await serve(speculative_config=DRAFT_MODEL, per_request_spec_decode_metrics="detailed")
    usage_last = {"stream": True, "stream_options": {"include_usage": True}}
    reasons, told = set(), [0, 0, 0]
    for seed in range(24):
        body = {"prompt": f"The end {seed % 5}. ", "seed": seed, "max_tokens": 40, "logit_bias": {"256": 4}}
        body |= {"stop": ["e "]} if seed % 3 == 0 else {}
        answer = chunks(await server.complete(**body, **usage_last))
        metrics, usage = (answer[-1][name] for name in ("metrics", "usage"))
        found = metrics["speculative_decoding"]
        assert found["num_spec_steps"] + sum(found["per_step_accepted"]) <= usage["completion_tokens"]
        assert all(a <= d for a, d in zip(found["per_step_accepted"], found["per_step_drafted"], strict=True))
        reasons |= {choice["finish_reason"] for part in answer for choice in part["choices"]}
        for i, name in enumerate(("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")):
            told[i] += found[name]
    counted = await server.metrics()

    assert {None, "stop", "length"} == reasons
    names = ("drafts", "draft_tokens", "accepted_tokens")
    assert told == [counted[f"vllm:spec_decode_num_{name}_total"] for name in names]
    assert 0 < told[2] < counted["vllm:generation_tokens_total"]
