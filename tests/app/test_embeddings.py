"""/v1/embeddings: one vector for each input, as numbers or in base64, and refusals in the words of the body."""

import asyncio
import base64
import struct
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from core import EMBEDDED_MODEL, load_engine
from tests.app.servers import RunningServer, in_process, make_engine, make_settings

TEXTS = ["Once upon a time there was a dog.", "Long ago there lived a dog.", "x = [1, 2, 3]"]


@pytest.fixture(scope="module")
def engine() -> Any:
    """The embedded model, on little memory, so that a few long inputs do not fit at once."""
    settings = make_settings(
        model=EMBEDDED_MODEL, num_kv_blocks=24, max_num_batched_tokens=32, speculative_config="null"
    )
    return load_engine(settings.engine_config())


@pytest.fixture
async def server(engine: Any) -> AsyncIterator[RunningServer]:
    async with in_process(engine) as running:
        yield running


async def embed(server: RunningServer, **body: Any) -> Any:
    response = await server.client.post("/v1/embeddings", json=body)
    assert 200 == response.status_code, response.text
    return response.json()


async def vectors(server: RunningServer, **body: Any) -> list[list[float]]:
    return [item["embedding"] for item in (await embed(server, **body))["data"]]


async def test_each_input_has_a_vector_of_length_1_and_prompts_are_counted(server: RunningServer):
    answer = await embed(server, input=TEXTS, model=EMBEDDED_MODEL)
    size = server.engine.model_config.hidden_size

    assert ("list", EMBEDDED_MODEL) == (answer["object"], answer["model"])
    assert [("embedding", i, size) for i in range(3)] == [
        (item["object"], item["index"], len(item["embedding"])) for item in answer["data"]
    ]
    assert [1.0] * 3 == pytest.approx([np.linalg.norm(item["embedding"]) for item in answer["data"]])
    num_tokens = sum(len(server.engine.tokenizer.encode(text)) for text in TEXTS)
    assert {"prompt_tokens": num_tokens, "total_tokens": num_tokens} == answer["usage"]


async def test_all_shapes_of_input_say_the_same(server: RunningServer):
    ids = [list(server.engine.tokenizer.encode(text)) for text in TEXTS]
    expected = await vectors(server, input=TEXTS)

    assert expected == await vectors(server, input=ids)
    assert expected[:1] == await vectors(server, input=TEXTS[0]) == await vectors(server, input=ids[0])


async def test_base64_holds_the_same_numbers(server: RunningServer):
    (numbers,) = await vectors(server, input=TEXTS[0], encoding_format="float")
    ((packed),) = await vectors(server, input=TEXTS[0], encoding_format="base64")

    assert numbers == list(struct.unpack(f"<{len(numbers)}f", base64.b64decode(packed)))  # type: ignore[arg-type]


async def test_the_mean_itself_is_to_be_had_too(server: RunningServer):
    (unit,) = await vectors(server, input=TEXTS[0])
    (mean,) = await vectors(server, input=TEXTS[0], normalize=False)

    assert abs(np.linalg.norm(mean) - 1) > 0.1
    assert unit == pytest.approx(np.array(mean) / np.linalg.norm(mean), abs=1e-6)


async def test_texts_that_are_near_are_nearer(server: RunningServer):
    dog, other_dog, code = map(np.array, await vectors(server, input=TEXTS))

    assert dog @ other_dog > dog @ code


async def test_many_long_inputs_at_once_are_those_of_each_alone_and_leave_nothing(server: RunningServer):
    texts = [f"{i} " + "a long story " * 12 for i in range(6)]
    alone = [(await vectors(server, input=text))[0] for text in texts]
    together = await vectors(server, input=texts)
    one_by_one = await asyncio.gather(*(vectors(server, input=text) for text in texts))

    assert alone == together == [found for (found,) in one_by_one]
    await server.until_idle()


async def test_the_size_that_it_has_may_be_asked_for(server: RunningServer):
    size = server.engine.model_config.hidden_size
    assert size == len((await vectors(server, input="x", dimensions=size))[0])


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", ""),
        ({"input": None}, "input", ""),
        ({"input": []}, "input", ""),
        ({"input": ["a", 1]}, "input", ""),
        ({"input": ["a", ""]}, "input", "input 1: input has 0 tokens"),
        ({"input": [300]}, "input", "300"),
        ({"input": "x" * 300}, "input", "maximum context length is 256 tokens"),
        ({"input": "x", "dimensions": 3}, "dimensions", "cannot be 3"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", ""),
        ({"input": "x", "normalize": 1}, "normalize", ""),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ""),
        ({"input": "x", "cache_salt": "a\nb"}, "cache_salt", ""),
    ],
)
async def test_what_cannot_be_embedded_is_refused_by_name(body: Any, param: str, said: str):
    async with in_process(make_engine()) as server:
        response = await server.client.post("/v1/embeddings", json=body)
        error = response.json()["error"]

        assert (400, param) == (response.status_code, error["param"]), error
        assert said in error["message"]
        assert 0 == server.engine.stats.num_prompt_tokens


async def test_the_end_of_a_long_input_may_be_kept(server: RunningServer):
    ids = list(server.engine.tokenizer.encode(TEXTS[0]))
    assert await vectors(server, input=ids[-5:]) == await vectors(server, input=ids, truncate_prompt_tokens=5)


async def test_callers_do_not_share_what_an_embedding_has_left_in_the_cache():
    async with in_process(api_key=("alice:a", "bob:b")) as server:
        prompt, cached = "a prompt of some blocks", []
        await server.client.post("/v1/embeddings", json={"input": prompt}, headers={"X-Api-Key": "a"})
        for key in ("b", "a"):
            body = {"prompt": prompt, "max_tokens": 1}
            answer = await server.client.post("/v1/completions", json=body, headers={"X-Api-Key": key})
            cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [0, 20] == cached
