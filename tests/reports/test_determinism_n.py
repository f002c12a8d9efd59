"""Public reports on what a cache or several samples change: no text, and no count but the one of cached tokens."""

from typing import Any

import pytest

from tests.app.servers import RunningServer
from tests.reports.answers import WAYS, ask_choices
from tests.reports.conftest import Serve

STORY = "Once upon a time there was a girl who lived by the sea. Every day she walked along the beach with her dog. "
SPECULATION = pytest.mark.parametrize("speculation", [None, "null"], ids=["speculation", "no speculation"])


async def five_times(server: RunningServer) -> tuple[set[str], list[int]]:
    """Texts and cached tokens of one greedy request, asked five times of a fresh server."""
    texts, cached = set(), []
    for _ in range(5):
        body: dict[str, Any] = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
        response = await server.complete(prompt=STORY[:56], **body)
        answer = response.raise_for_status().json()
        texts.add(answer["choices"][0]["text"])
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    return texts, cached


@SPECULATION
async def test_bc_051_the_first_answer_cold_and_all_later_ones_cached_are_the_same(
    serve: Serve, speculation: str | None
):
    """BC-051, vllm-project/vllm#40896: the first greedy answer after the start differed from all later ones."""
    caching = await serve(block_size=16, speculative_config=speculation)
    plain = await serve(block_size=16, speculative_config=speculation, enable_prefix_caching=False)
    texts, cached = await five_times(caching)
    plain_texts, plain_cached = await five_times(plain)

    assert 1 == len(texts | plain_texts)
    assert [0, 48, 48, 48, 48] == cached
    assert [0, 0, 0, 0, 0] == plain_cached


@SPECULATION
async def test_bc_053_a_prompt_of_several_samples_is_counted_and_computed_once(serve: Serve, speculation: str | None):
    """BC-053, vllm-project/vllm#56923: counters mixed prompt length, computed tokens and hits. Samples are forked."""
    server = await serve(block_size=16, speculative_config=speculation)
    asked = {"A" + STORY[:58]: 2, "B" + STORY[:57]: 4, "C" + STORY[:58]: 8}
    usages = []
    for prompt, n in asked.items():
        answer = (await server.complete(prompt=prompt, n=n, max_tokens=5, ignore_eos=True, seed=1)).json()
        usages.append(answer["usage"])
        assert n == len(answer["choices"])
    found = await server.until_idle()

    assert [59, 58, 59] == [usage["prompt_tokens"] for usage in usages]
    assert [10, 20, 40] == [usage["completion_tokens"] for usage in usages]
    assert [0, 0, 0] == [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert 59 + 58 + 59 == found["vllm:prompt_tokens_total"]
    assert 59 + 58 + 59 == found["vllm:prompt_tokens_by_source_total{source=local_compute}"]
    assert 59 + 58 + 59 == found["vllm:prefix_cache_queries_total"]
    assert 0 == found["vllm:prefix_cache_hits_total"]
    assert 70 == found["vllm:generation_tokens_total"]


async def test_bc_053_warm_samples_share_what_the_prompt_hits(serve: Serve):
    """BC-053: computed and hit make up the prompt once, not n times."""
    server = await serve(block_size=16)
    for _ in range(2):
        answer = (await server.complete(prompt=STORY[:59], n=4, max_tokens=2, ignore_eos=True)).json()
    found = await server.until_idle()

    assert (59, 48) == (
        answer["usage"]["prompt_tokens"],
        answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )
    sources = "vllm:prompt_tokens_by_source_total{source=%s}"
    assert [59 + 11, 48] == [found[sources % "local_compute"], found[sources % "local_cache_hit"]]
    assert [118, 48] == [found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]]


@pytest.mark.parametrize("n", [2, 4])
async def test_bc_048_a_sample_is_what_it_would_be_among_more_samples_and_with_its_prompt_cached(serve: Serve, n: int):
    """BC-048: the seed decides each choice, not how many there are nor whether the prompt was computed for them."""
    server = await serve(block_size=16)
    body: dict[str, Any] = {"prompt": STORY[:59], "seed": 3, "temperature": 1, "max_tokens": 24, "ignore_eos": True}
    cold = [choice["text"] for choice in (await server.complete(**body, n=n)).json()["choices"]]
    warm = [choice["text"] for choice in (await server.complete(**body, n=8)).json()["choices"]]

    assert cold == warm[:n]
    assert 8 == len(set(warm))


@pytest.mark.parametrize("way", WAYS)
async def test_more_samples_than_places_are_what_they_are_with_a_place_for_each(serve: Serve, way: str):
    """Kin of BC-048 and BC-053: OpenAI's n goes to 128, whatever runs at once here."""
    texts = []
    for places in (8, 2, 1):
        server = await serve(max_num_seqs=places)
        answers = await ask_choices(server, way, prompt=STORY[:40], n=5, seed=3, max_tokens=16)
        texts.append([answer.text for answer in answers])

    assert [texts[0]] * 2 == texts[1:]
    assert 5 == len(set(texts[0]))
