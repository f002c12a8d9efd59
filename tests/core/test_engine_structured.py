"""Structured outputs through the whole engine: always kept to, whoever drafts and whoever is preempted."""

import json
import re
from functools import cache
from typing import Any

import pytest

from core.config import EngineConfig, SpeculativeConfig
from core.engine import Engine
from core.errors import InvalidRequest
from core.loading import load_engine
from core.request import FinishReason
from core.sampling_params import SamplingParams, StructuredOutput
from tests.builders import END, engine, new_request, run, text_of, token_ids_of

LETTERS = StructuredOutput("regex", "[abc]{3,9}x")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA = StructuredOutput("json_schema", json.dumps(PERSON))
DRAFTERS = {
    "none": None,
    "model": SpeculativeConfig(num_speculative_tokens=4),
    "token rule": SpeculativeConfig(num_speculative_tokens=4, verification="token"),
    "look-up": SpeculativeConfig(method="ngram", num_speculative_tokens=4),
}


@cache
def tiny(drafter: str, num_kv_blocks: int = 60) -> Engine:
    return load_engine(EngineConfig(num_kv_blocks=num_kv_blocks, speculative=DRAFTERS[drafter]))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("wanted", [LETTERS, SCHEMA], ids=["regex", "schema"])
def test_every_output_is_kept_to_the_grammar_and_ends_with_it(drafter: str, wanted: StructuredOutput) -> None:
    """Greedy, seeded and free requests of two samples each; ends that were put off do not keep it going."""
    made = tiny(drafter)
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 7}, {}, {"min_tokens": 50}, {"ignore_eos": True}]
    for i, params in enumerate(kinds):
        made.add(
            new_request(
                f"{i}", b"Once", 60, sibling_ids=(f"{i}.1",), structured_output=wanted, num_logprobs=2, **params
            )
        )
    outputs = run(made)

    assert 10 == len(outputs)
    assert {FinishReason.STOP} == {parts[-1].finish_reason for parts in outputs.values()}
    for parts in outputs.values():
        text = text_of(parts)
        if wanted is LETTERS:
            assert re.fullmatch("[abc]{3,9}x", text)
        else:
            assert {"name", "age"} == set(json.loads(text))
        assert END not in token_ids_of(parts)


def seeded(made: Engine) -> dict[str, tuple[str, list[int]]]:
    """What eight seeded or greedy requests say; prompts repeat the output's words so that look-up finds them."""
    prompt = b'{"name": "Luna", "age": 20} {"name": "Luna", "age": 2'
    for i in range(8):
        params: dict[str, Any] = {"seed": i, "temperature": i / 4, "presence_penalty": i / 8, "logit_bias": {65: 3.0}}
        made.add(new_request(f"{i}", prompt, 40, structured_output=SCHEMA, **params))
    return {name: (text_of(parts), token_ids_of(parts)) for name, parts in run(made).items()}


@pytest.mark.parametrize("drafter", ["model", "look-up"])
def test_drafts_do_not_show_in_seeded_outputs(drafter: str) -> None:
    made = tiny(drafter)

    assert seeded(tiny("none")) == seeded(made)
    assert made.stats.num_accepted_tokens > 0


def test_preemption_does_not_show_in_seeded_outputs() -> None:
    """Eight requests in blocks for three."""
    made = tiny("model", num_kv_blocks=18)

    assert seeded(tiny("none")) == seeded(made)
    assert made.stats.num_preemptions > 0


def test_an_end_is_said_where_the_grammar_could_go_on() -> None:
    """It counts as a token, as ever."""
    made = tiny("none")
    made.add(new_request(max_tokens=9, structured_output=StructuredOutput("regex", "a*"), logit_bias={END: 100.0}))

    assert [END] == token_ids_of(run(made)["a"])


def test_log_probabilities_are_of_the_raw_law() -> None:
    """What the mask makes certain is not certain to the model."""
    made = tiny("none")
    for name, wanted in {"a": StructuredOutput("choice", ("z",)), "b": None}.items():
        made.add(
            new_request(name, b"Once upon a", 1, structured_output=wanted, num_logprobs=20, logit_bias={122: 100.0})
        )
    one, other = (outputs[0].tokens[0].logprobs for outputs in run(made).values())

    assert one == other
    assert one is not None
    assert one.logprob < -1


def test_a_structured_output_that_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="regex cannot be honoured"):
        engine().check([1], SamplingParams(structured_output=StructuredOutput("regex", "(")))


def test_a_script_says_what_it_says_whatever_is_asked_for() -> None:
    made = engine()
    made.add(new_request(max_tokens=9, script=["no"], structured_output=StructuredOutput("choice", ("yes",))))

    assert "no" == text_of(run(made)["a"])


def test_nobody_drafts_behind_the_end_of_a_grammar() -> None:
    """There are slots for more."""
    made = tiny("model")
    num_before = made.stats.num_draft_tokens
    made.add(new_request(max_tokens=20, temperature=0.0, structured_output=StructuredOutput("choice", ("yes",))))

    assert "yes" == text_of(run(made)["a"])
    assert 0 < made.stats.num_draft_tokens - num_before <= 3
