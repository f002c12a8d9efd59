"""From a body to the engine's requests: shapes of prompts, limits; and back to usage."""

from typing import Any

import pytest

from app.generation import (
    Ask,
    build,
    sampling_params,
    stream_options,
)
from app.prompts import Prompt, encode, encode_bad_words, prompt_items, with_pieces
from app.schemas.completions import CompletionRequest
from app.schemas.generation import StreamOptions
from core import (
    ContextLengthExceeded,
    InvalidRequest,
    SamplingParams,
)
from tests.app.servers import make_engine
from tests.core.test_tokenizer_gguf import spm


def make_ask(prompt: Any, **changes: Any) -> Ask:
    fields: dict[str, Any] = {
        "kind": "cmpl",
        "model": "m",
        "prompt": prompt,
        "params": SamplingParams(max_tokens=4),
        "n": 1,
        "script": None,
        "add_special_tokens": True,
        "trace_id": None,
        "arrival_s": 0.0,
    }
    return Ask(**{**fields, **changes})


@pytest.mark.parametrize(
    ("value", "items"),
    [
        ("text", ["text"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_are_told_apart_by_their_shape(value: Any, items: list[Any]):
    assert items == prompt_items(value)


@pytest.mark.parametrize("value", [None, [], 7, {"a": 1}, [1.5], [True], ["a", 1], [[1], "a"], [[1], [1.5]], [None]])
def test_any_other_shape_is_refused_under_the_fields_name(value: Any):
    with pytest.raises(InvalidRequest) as refusal:
        prompt_items(value)
    assert "prompt" == refusal.value.param


def test_a_list_of_prompts_is_bounded():
    with pytest.raises(InvalidRequest, match="limit is 1024"):
        prompt_items(["a"] * 1025)


def test_sampling_fields_go_over_and_null_means_the_default():
    body = CompletionRequest(
        temperature=0.5, top_p=None, seed=-1, stop="x", stop_token_ids=[3], logit_bias={"7": -2}, ignore_eos=True
    )
    expected = SamplingParams(
        max_tokens=9,
        num_logprobs=2,
        temperature=0.5,
        seed=-1,
        stop=("x",),
        stop_token_ids=(3,),
        logit_bias={7: -2.0},
        ignore_eos=True,
    )

    assert expected == sampling_params(body, max_tokens=9, num_logprobs=2)


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop_may_be_said_in_three_ways(stop: Any):
    without = sampling_params(CompletionRequest(), max_tokens=1, num_logprobs=None)

    assert without == sampling_params(CompletionRequest(stop=stop), max_tokens=1, num_logprobs=None)


@pytest.mark.parametrize("key", ["abc", "-1", "1.0", "", " 1", "9" * 30])
def test_a_bias_is_for_a_token_id(key: str):
    with pytest.raises(InvalidRequest) as refusal:
        sampling_params(CompletionRequest(logit_bias={key: 1.0}), max_tokens=1, num_logprobs=None)
    assert "logit_bias" == refusal.value.param


@pytest.mark.parametrize(
    "body",
    [
        {"stream_options": {"include_usage": False}},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    ],
)
def test_stream_options_that_make_no_sense_are_refused(body: Any):
    with pytest.raises(InvalidRequest) as refusal:
        stream_options(CompletionRequest(**body))
    assert "stream_options" == refusal.value.param


def test_stream_options_that_say_nothing_need_no_stream():
    assert StreamOptions() == stream_options(CompletionRequest(stream_options=StreamOptions()))


def test_a_text_too_long_in_bytes_is_refused_before_it_is_cut_into_tokens(monkeypatch: pytest.MonkeyPatch):
    engine = make_engine(max_model_len=16)
    cut: list[str] = []
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text, **_: cut.append(text) or [1])
    limit = 16 * engine.tokenizer.max_token_bytes

    assert (1,) == encode(engine, "x" * limit).token_ids
    with pytest.raises(ContextLengthExceeded, match=f"{limit + 1} bytes"):
        encode(engine, "x" * (limit + 1))
    assert 1 == len(cut)


def test_choices_are_numbered_by_prompt_and_sample_and_ids_are_never_the_same():
    engine = make_engine()
    job, again = build(engine, make_ask(["ab", "abc"], n=2)), build(engine, make_ask("ab"))

    assert [(2, 0, 1), (3, 0, 1)] == [(len(r.prompt_token_ids), r.choice, len(r.sibling_ids)) for r in job.requests]
    assert [f"{job.id}-{i}" for i in range(4)] == job.request_ids
    assert ["ab", "abc"] == [job.prompt_of(1).text, job.prompt_of(2).text]
    assert job.prompt_of(0) is job.prompt_of(1)
    assert job.id != again.id


def test_one_bad_prompt_is_named_by_its_number():
    with pytest.raises(InvalidRequest, match="prompt 1: prompt has 0 tokens"):
        build(make_engine(), make_ask(["ok", "", "ok too"]))


def test_a_bad_word_is_meant_behind_a_space_too():
    """Where that is no longer: one token instead of another, not one more."""

    class Words:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return {"cat": [1], " cat": [2], "dog": [3], " dog": [9, 3], "the": [4], " the": [4]}[text]

    assert ((1,), (2,), (3,), (4,)) == encode_bad_words(Words(), [" cat", "dog", "the"])


SPECIAL = ["a</s>b", "hello</s> wor", "<s>hello", "</s>", "<s></s>a", " a</s>  b </s>\n", "hello<|tool|>a", "é<unk>😀"]


@pytest.mark.parametrize("text", ["hello", "  hello", " ", "a😀b", *SPECIAL])
def test_a_prompts_pieces_join_to_what_was_written(text: str):
    """Special tokens in it, and the spaces that SentencePiece adds behind them, included."""
    tokenizer = spm()
    prompt = with_pieces(tokenizer, Prompt(tuple(tokenizer.encode(text)), text))

    assert text == "".join(prompt.pieces)
    assert len(prompt.token_ids) == len(prompt.pieces)
    assert ("<s>" if text.startswith("<s>") else "") == prompt.pieces[0]


def test_a_prompt_that_its_tokenizer_changes_is_shown_as_it_was_read():
    tokenizer = spm()  # takes U+2581 for a space
    prompt = with_pieces(tokenizer, Prompt(tuple(tokenizer.encode("a▁b")), "a▁b"))

    assert "a b" == "".join(prompt.pieces)


def test_a_context_overflow_is_said_in_the_words_that_client_libraries_look_for():
    with pytest.raises(ContextLengthExceeded) as refusal:
        build(make_engine(max_model_len=16), make_ask("x" * 1000))

    assert "this model's maximum context length is 16 tokens" in str(refusal.value).lower()
    assert "prompt is too long" in str(refusal.value).lower()


def test_more_samples_than_run_at_once_are_requests_one_after_the_other():
    job = build(make_engine(max_num_seqs=2), make_ask(["a", "b"], n=5))

    assert [(0, 2), (2, 2), (4, 1)] * 2 == [(new.choice, 1 + len(new.sibling_ids)) for new in job.requests]
    assert [f"{job.id}-{i}" for i in range(10)] == job.request_ids


def test_best_of_makes_more_sequences_than_choices():
    job = build(make_engine(), make_ask(["a", "b"], n=1, best_of=3))

    assert (2, 6, 3) == (job.num_choices, len(job.request_ids), job.num_samples)
    assert "b" == job.prompt_of(1).text
