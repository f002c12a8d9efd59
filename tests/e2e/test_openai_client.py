"""The official Python client: everything it offers that we serve, against a live server of the embedded model."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.live import LiveServer

MODEL = "octavo-tiny"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}
PROMPT = "Once upon a time"
MESSAGES: Any = [{"role": "user", "content": "Tell me a story about a cat and a ball."}]


@pytest.fixture
def client(tiny: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_a_completion_has_text_reason_and_usage(client: openai.OpenAI):
    answer = client.completions.create(prompt=PROMPT, extra_body={"ignore_eos": True}, **GREEDY)

    assert ("text_completion", MODEL) == (answer.object, answer.model)
    assert ["length"] == [choice.finish_reason for choice in answer.choices]
    assert answer.choices[0].text
    assert answer.usage is not None
    assert (16, 24, 40) == (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)


def test_a_streamed_completion_joins_to_the_whole_one(client: openai.OpenAI):
    whole = client.completions.create(prompt=PROMPT, **GREEDY).choices[0]
    with client.completions.create(prompt=PROMPT, stream=True, **GREEDY) as stream:
        chunks = list(stream)

    assert whole.text == "".join(chunk.choices[0].text for chunk in chunks)
    assert len(chunks) > 1
    assert [None] * (len(chunks) - 1) + [whole.finish_reason] == [chunk.choices[0].finish_reason for chunk in chunks]
    assert 1 == len({(chunk.id, chunk.created) for chunk in chunks})
    assert [None] * len(chunks) == [chunk.usage for chunk in chunks]


def test_prompts_as_text_texts_ids_and_lists_of_ids_give_the_same_answers(client: openai.OpenAI):
    ids = list(PROMPT.encode())
    answers = [client.completions.create(prompt=prompt, **GREEDY) for prompt in (PROMPT, [PROMPT], ids, [ids])]

    assert 1 == len({answer.choices[0].text for answer in answers})


def test_a_chat_answers_as_the_assistant(client: openai.OpenAI):
    answer = client.chat.completions.create(messages=MESSAGES, **GREEDY)

    assert "chat.completion" == answer.object
    assert "assistant" == answer.choices[0].message.role
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 24


def test_a_streamed_chat_names_the_role_first_and_ends_with_an_empty_delta(client: openai.OpenAI):
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0]
    with client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY) as stream:
        choices = [chunk.choices[0] for chunk in stream]

    assert ["assistant"] + [None] * (len(choices) - 1) == [choice.delta.role for choice in choices]
    assert whole.message.content == "".join(choice.delta.content or "" for choice in choices)
    assert (None, whole.finish_reason) == (choices[-1].delta.content, choices[-1].finish_reason)


def test_include_usage_adds_one_chunk_with_the_totals(client: openai.OpenAI):
    options: Any = {"include_usage": True}
    whole = client.completions.create(prompt=PROMPT, **GREEDY)
    with client.completions.create(prompt=PROMPT, stream=True, stream_options=options, **GREEDY) as stream:
        *chunks, last = stream

    assert [None] * len(chunks) == [chunk.usage for chunk in chunks]
    assert ([], whole.usage) == (last.choices, last.usage)


def test_n_gives_samples_that_differ_and_that_one_stream_tells_apart(client: openai.OpenAI):
    sampling: dict[str, Any] = {**GREEDY, "temperature": 1, "seed": 7, "n": 3}
    whole = client.completions.create(prompt=PROMPT, **sampling)
    texts = {choice.index: choice.text for choice in whole.choices}
    with client.completions.create(prompt=PROMPT, stream=True, **sampling) as stream:
        streamed = dict.fromkeys(texts, "")
        for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.text

    assert [0, 1, 2] == sorted(texts)
    assert 3 == len(set(texts.values()))
    assert texts == streamed
    assert whole.usage is not None
    assert 16 == whole.usage.prompt_tokens


def test_the_same_seed_gives_the_same_text_and_another_seed_another(client: openai.OpenAI):
    def text(seed: int) -> str:
        return client.completions.create(prompt=PROMPT, seed=seed, **{**GREEDY, "temperature": 1}).choices[0].text

    assert text(5) == text(5)
    assert text(5) != text(6)
    assert text(-1) == text(-1)


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI):
    whole = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    stop = whole[10:13]
    stopped = client.completions.create(prompt=PROMPT, stop=[stop], **GREEDY).choices[0]

    assert (whole[: whole.index(stop)], "stop") == (stopped.text, stopped.finish_reason)


def test_logprobs_of_a_completion_line_up_with_its_text(client: openai.OpenAI):
    choice = client.completions.create(prompt=PROMPT, logprobs=3, **GREEDY).choices[0]

    assert choice.logprobs is not None
    tokens, values = choice.logprobs.tokens, choice.logprobs.token_logprobs
    tops, offsets = choice.logprobs.top_logprobs, choice.logprobs.text_offset
    assert tokens is not None
    assert values is not None
    assert tops is not None
    assert choice.text == "".join(tokens)
    assert [sum(map(len, tokens[:i])) for i in range(len(tokens))] == offsets
    # Greedy: the chosen token is the likeliest.
    assert values == [max(top.values()) for top in tops]
    assert all(value <= 0 for value in values)


def test_logprobs_of_a_chat_carry_bytes_and_alternatives(client: openai.OpenAI):
    choice = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY).choices[0]

    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    tokens = choice.logprobs.content
    text = b"".join(bytes(token.bytes or []) for token in tokens).decode()
    assert choice.message.content == text
    assert all(2 == len(token.top_logprobs) for token in tokens)
    assert all(token.logprob == token.top_logprobs[0].logprob for token in tokens)


def test_embeddings_are_the_same_in_base64_which_the_client_asks_for_by_itself(client: openai.OpenAI):
    """The client decodes base64 unless told what it wants."""
    packed = client.embeddings.create(model=MODEL, input=[PROMPT, "x"])
    numbers = client.embeddings.create(model=MODEL, input=[PROMPT, "x"], encoding_format="float")

    assert [0, 1] == [item.index for item in packed.data]
    assert [item.embedding for item in packed.data] == [item.embedding for item in numbers.data]
    assert (17, 17) == (packed.usage.prompt_tokens, packed.usage.total_tokens)
    with pytest.raises(openai.BadRequestError) as refusal:
        client.embeddings.create(model=MODEL, input="x", dimensions=3)
    assert "dimensions" == refusal.value.param


def test_models_are_listed_and_retrieved(client: openai.OpenAI):
    assert [MODEL] == [model.id for model in client.models.list()]
    assert MODEL == client.models.retrieve(MODEL).id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_an_unknown_model_is_not_found(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt=PROMPT)

    assert ("model_not_found", "model") == (caught.value.code, caught.value.param)


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", 3), ("top_p", 0), ("n", 0), ("stop", [""]), ("max_tokens", -1)]
)
def test_a_value_out_of_range_is_a_bad_request_that_names_it(client: openai.OpenAI, field: str, value: Any):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt=PROMPT, **{**GREEDY, field: value})

    assert field == caught.value.param
    assert "invalid_request_error" == caught.value.type


def test_a_prompt_too_long_says_so_in_the_words_that_libraries_know(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt="x" * 100_000, **GREEDY)

    assert "context_length_exceeded" == caught.value.code
    assert "maximum context length is" in str(caught.value)
    assert "prompt is too long" in str(caught.value)


def test_a_wrong_key_is_an_authentication_error(serve: Any):
    url = serve("--api-key", "secret").url
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()
    assert "invalid_api_key" == caught.value.code
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
        assert [MODEL] == [model.id for model in client.models.list()]


async def test_the_async_client_completes_chats_and_streams(tiny: LiveServer, client: openai.OpenAI):
    expected = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="any", max_retries=0) as asynchronous:
        whole = await asynchronous.completions.create(prompt=PROMPT, **GREEDY)
        async with await asynchronous.completions.create(prompt=PROMPT, stream=True, **GREEDY) as stream:
            streamed = "".join([chunk.choices[0].text async for chunk in stream])
        chat = await asynchronous.chat.completions.create(messages=MESSAGES, **GREEDY)
        names = [model.id async for model in asynchronous.models.list()]
        with pytest.raises(openai.BadRequestError):
            await asynchronous.completions.create(prompt=PROMPT, **{**GREEDY, "temperature": 3})

    assert [expected, expected] == [whole.choices[0].text, streamed]
    assert chat.choices[0].message.content
    assert [MODEL] == names


def test_smollm2_knows_the_capital_of_france(smollm2: LiveServer):
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="any", max_retries=0) as client:
        answer = client.completions.create(
            model="smollm2", prompt="The capital of France is", temperature=0, max_tokens=8
        )

        assert answer.choices[0].text.startswith(" Paris")


def test_smollm2_chats_whole_and_streamed(smollm2: LiveServer):
    asked: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 16,
    }
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="any", max_retries=0) as client:
        whole = client.chat.completions.create(**asked).choices[0].message.content
        with client.chat.completions.create(stream=True, **asked) as stream:
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert whole is not None
    assert "Paris" in whole
    assert whole == streamed
