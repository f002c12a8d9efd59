"""Speculation as clients see it: it shows in the metrics, and in no answer."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live import LiveServer, serving

# As vLLM's documentation spells it; that there are drafts at all is not left to the texts.
LOOK_UP = json.dumps(
    {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 2,
        "adaptive": False,
    }
)
COUNTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
# Each begins in its own way, so that none finds another's blocks and usage depends on nothing but the request.
WHO = ("Tom", "Lily", "A little dog", "The old king", "My friend Sue", "Ben and Mia", "One day a bird", "Grandma")
DOES = (" went to the park. ", " saw a big red ball. ", " said: the cat is here, the cat is there, the cat", " was sad")
PROMPTS = [f"{i}. {who}{does}" for i, (does, who) in enumerate((d, w) for d in DOES for w in WHO)][: 8 * 3]
BODIES: tuple[dict[str, Any], ...] = (
    {"max_tokens": 40},
    {"max_tokens": 40, "ignore_eos": True, "repetition_penalty": 1.2, "logit_bias": {"101": -2}},
    {"max_tokens": 40, "min_tokens": 10, "stop": [".", "the"], "frequency_penalty": 0.3},
)


@pytest.fixture(scope="module")
def servers(logs: Path, tiny: LiveServer) -> Iterator[Mapping[str, LiveServer]]:
    """The embedded model with its draft model, with look-up and without speculation."""
    with ExitStack() as stack:
        looking_up, plain = (
            stack.enter_context(serving(logs, "--speculative-config", config)) for config in (LOOK_UP, "null")
        )
        yield {"draft model": tiny, "look-up": looking_up, "off": plain}


@pytest.fixture(scope="module")
def fixed(logs: Path) -> Iterator[LiveServer]:
    """Three drafts whenever there are any, whatever they cost."""
    with serving(logs, "--speculative-config", '{"adaptive": false}') as server:
        yield server


def drafted_and_accepted(server: LiveServer) -> tuple[float, float]:
    scrape = server.wait_until_idle()
    return scrape.total(COUNTED[0]), scrape.total(COUNTED[1])


def gain(server: LiveServer, **body: Any) -> tuple[Any, float, float]:
    """The answer, and how many tokens were drafted and accepted for it."""
    before = drafted_and_accepted(server)
    answer = server.complete(**body)
    after = drafted_and_accepted(server)
    return answer, after[0] - before[0], after[1] - before[1]


def facts(answer: Any) -> tuple[Any, ...]:
    """What a client gets, but for names and times."""
    return answer["choices"], answer["usage"]


@pytest.mark.parametrize("part", range(len(BODIES)))
@pytest.mark.parametrize("temperature", [0, 1])
def test_answers_are_the_same_with_either_drafter_and_without(
    servers: Mapping[str, LiveServer], part: int, temperature: float
):
    """Texts, ends, usage, log-probabilities of 24 prompts, greedy and seeded; eight at once, for more do not draft."""
    prompts = PROMPTS[8 * part : 8 * part + 8]
    body = {"prompt": prompts, "temperature": temperature, "seed": 7, "logprobs": 2, **BODIES[part]}
    plain = servers["off"].complete(**body)

    assert 8 == len(plain["choices"])
    assert len({choice["text"] for choice in plain["choices"]}) > 2
    assert all(choice["logprobs"]["token_logprobs"] for choice in plain["choices"])
    for drafter in ("draft model", "look-up"):
        answer, num_drafted, num_accepted = gain(servers[drafter], **body)
        assert facts(plain) == facts(answer)
        assert 0 < num_accepted < num_drafted


def test_streams_say_the_same_text(servers: Mapping[str, LiveServer]):
    body = {"prompt": PROMPTS[20], "temperature": 0, "max_tokens": 40, "stop": ["cat."]}
    streamed = {
        name: [chunk["choices"][0] for chunk in server.events("/v1/completions", body)]
        for name, server in servers.items()
    }
    texts = {name: "".join(choice["text"] for choice in choices) for name, choices in streamed.items()}
    assert {texts["off"]} == set(texts.values())
    assert 1 == len({choices[-1]["finish_reason"] for choices in streamed.values()})
    assert len(streamed["draft model"]) < len(streamed["off"])


@pytest.mark.parametrize("drafter", ["draft model", "look-up"])
def test_one_request_can_go_without_drafts(servers: Mapping[str, LiveServer], drafter: str):
    body = {"prompt": PROMPTS[17], "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    drafting, num_drafted, _ = gain(servers[drafter], **body)
    without, num_drafted_without, _ = gain(servers[drafter], **body, speculative={"num_speculative_tokens": 0})

    assert num_drafted > 0 == num_drafted_without
    assert drafting["choices"] == without["choices"]


def test_one_request_can_ask_for_fewer_drafts_and_not_for_more(fixed: LiveServer):
    """A draft a token at most: twenty tokens take at most nineteen drafts; the server's own limit is three."""
    body = {"prompt": PROMPTS[3], "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    _, few, _ = gain(fixed, **body, speculative={"num_speculative_tokens": 1})
    _, many, _ = gain(fixed, **body, speculative={"num_speculative_tokens": 9})
    _, default, _ = gain(fixed, **body)

    assert 0 < few <= 19
    assert few < default == many


def test_chat_can_go_without_drafts_too(tiny: LiveServer):
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0, "max_tokens": 20}
    before = drafted_and_accepted(tiny)
    without = tiny.post("/v1/chat/completions", {**body, "speculative": {"num_speculative_tokens": 0}})
    assert before == drafted_and_accepted(tiny)
    assert without["choices"] == tiny.post("/v1/chat/completions", body)["choices"]
    assert before < drafted_and_accepted(tiny)


def test_config_spelled_as_vllms_is_what_counts_positions(servers: Mapping[str, LiveServer]):
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    scrape = servers["look-up"].scrape()
    positions = {dict(labels)["position"] for found, labels in scrape.samples if found == name}
    assert {"0", "1", "2", "3"} == positions


def test_many_at_once_go_without_drafts_where_the_number_is_fixed(fixed: LiveServer):
    """With more than eight requests in a step nobody drafts; the first few steps may have fewer."""
    body = {"prompt": PROMPTS[:20], "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    _, num_drafted, _ = gain(fixed, **body)
    _, alone, _ = gain(fixed, **{**body, "prompt": PROMPTS[:1]})
    assert num_drafted < 20 * alone / 4


def test_the_metrics_say_how_many_drafts_were_chosen_and_why(tiny: LiveServer):
    """Several requests alone and several together, so that there are steps to learn from and steps to choose in."""
    for prompt in PROMPTS[:4]:
        tiny.complete(prompt=prompt, temperature=0, max_tokens=60, ignore_eos=True)
    tiny.complete(prompt=PROMPTS, temperature=1, max_tokens=40, ignore_eos=True)
    scrape = tiny.wait_until_idle()

    name = "octavo:spec_decode_chosen_draft_tokens"
    assert scrape.total(f"{name}_count") > 100
    assert scrape.total("vllm:spec_decode_num_draft_tokens_total") == scrape.total(f"{name}_sum")
    assert scrape.total(f"{name}_bucket", le="3.0") == scrape.total(f"{name}_count")
    reasons = {
        reason: scrape.total("octavo:spec_decode_steps_total", reason=reason)
        for reason in ("measuring", "pays", "exploring", "fixed")
    }
    assert reasons["measuring"] > 0
    assert reasons["pays"] > reasons["exploring"] > 0 == reasons["fixed"]
    assert 0 < scrape.total("octavo:spec_decode_draft_cost") < 1
    assert scrape.total("octavo:spec_decode_expected_gain") >= 1
    lengths = "octavo:spec_decode_acceptance_length"
    num_drafts = scrape.total("vllm:spec_decode_num_drafts_total")
    assert num_drafts == scrape.total(f"{lengths}_count")
    assert num_drafts + scrape.total("vllm:spec_decode_num_accepted_tokens_total") == scrape.total(f"{lengths}_sum")
    # Not seed and not greedy: those drafts have laws, and a bound that holds on average.
    assert 0 < scrape.total("octavo:spec_decode_mean_accepted")
    assert scrape.total("octavo:spec_decode_mean_accepted") < 1.1 * scrape.total(
        "octavo:spec_decode_mean_accepted_bound"
    )


def test_a_real_model_says_the_same_with_look_up(logs: Path, smollm2: LiveServer, smollm2_path: Path):
    prompts = [
        "Copy this list twice: apple, pear, plum, fig.\napple, pear, plum, fig.\napple,",
        "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a,",
        "The capital of France is",
    ]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 16, "logprobs": 1}
    flags = "smollm2", "--cache-dir", str(smollm2_path.parent), "--speculative-config", LOOK_UP
    with serving(logs, *flags) as looking_up:
        answer, num_drafted, num_accepted = gain(looking_up, **body)
    assert facts(smollm2.complete(**body)) == facts(answer)
    assert 0 < num_accepted < num_drafted
