"""Many at once: everybody finishes, every block comes back, and a pool that is far too small changes no text."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.testing import clean_environment
from tests.e2e.conftest import Serve
from tests.e2e.live import DEADLINE_S, ROOT, LiveServer

NUM_REQUESTS, INPUT_LEN, OUTPUT_LEN, BLOCK_SIZE = 64, 64, 32, 16
# What the load asks for at its end; its last token needs no slot.
NUM_BLOCKS = NUM_REQUESTS * -(-(INPUT_LEN + OUTPUT_LEN - 1) // BLOCK_SIZE)
STORY = (
    "Once upon a time there was a little girl who lived in a house by the sea. Every day she walked along the beach"
    " with her dog and looked for shells, and in the evening her mother told her a story about the fish and the moon. "
)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 1, "ignore_eos": True}


def bench(server: LiveServer, result: Path, *options: str) -> Any:
    """Runs `octavo bench` and gives what it saved."""
    command = [sys.executable, "-m", "app", "bench", "--base-url", server.url, "--seed", "1", "--max-error-rate", "0"]
    command += [
        "--disable-tqdm",
        "--save-detailed",
        "--result-dir",
        str(result.parent),
        "--result-filename",
        result.name,
    ]
    done = subprocess.run([*command, *options], cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert 0 == done.returncode, done.stdout + done.stderr
    return json.loads(result.read_text())


def test_64_concurrent_streams_of_smollm2_finish_and_give_back_every_block(smollm2: LiveServer, tmp_path: Path):
    before = smollm2.scrape()
    load = ["--max-concurrency", str(NUM_REQUESTS), "--num-prompts", str(NUM_REQUESTS), "--num-warmups", "0"]
    lengths = ["--random-input-len", str(INPUT_LEN), "--random-output-len", str(OUTPUT_LEN), "--ignore-eos"]
    result = bench(smollm2, tmp_path / "result.json", *load, *lengths)
    after = smollm2.wait_until_idle()

    assert (NUM_REQUESTS, 0) == (result["completed"], result["failed"])
    assert NUM_REQUESTS * INPUT_LEN == _moved(before, after, "vllm:prompt_tokens_total")
    assert NUM_REQUESTS * OUTPUT_LEN == _moved(before, after, "vllm:generation_tokens_total")
    assert after.total("octavo:kv_blocks") == after.total("octavo:kv_blocks_free")


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_tenth_of_the_pool_changes_no_text_with_speculation_or_without(serve: Serve, sampling: dict[str, Any]):
    texts = {}
    for speculation in ("", "null"):
        for num_blocks in (NUM_BLOCKS, NUM_BLOCKS // 10):
            flags = ["--speculative-config", speculation] if speculation else []
            server = serve("--num-kv-blocks", str(num_blocks), *flags)
            texts[speculation, num_blocks] = asyncio.run(_all_at_once(server, sampling))
            after = server.wait_until_idle()

            assert (num_blocks < NUM_BLOCKS) == (after.total("vllm:num_preemptions_total") > 0)
            assert num_blocks == after.total("octavo:kv_blocks_free")

    expected = texts["null", NUM_BLOCKS]
    assert NUM_REQUESTS == len(expected)
    for found in texts.values():
        assert expected == found


def test_smollm2_on_a_tenth_of_the_pool_says_the_same(serve: Serve, smollm2: LiveServer, smollm2_path: Path):
    """30 tokens in and 8 out are two blocks at first and three in the end."""
    story = smollm2.post("/tokenize", {"prompt": STORY})["tokens"] * 2
    prompts = [story[number : number + 30] for number in range(16)]
    num_blocks = 16 * 3 // 10
    server = serve("smollm2", "--cache-dir", str(smollm2_path.parent), "--num-kv-blocks", str(num_blocks))
    expected = asyncio.run(_texts(smollm2, prompts, max_tokens=8, **GREEDY))

    assert expected == asyncio.run(_texts(server, prompts, max_tokens=8, **GREEDY))
    after = server.wait_until_idle()
    assert after.total("vllm:num_preemptions_total") > 0
    assert num_blocks == after.total("octavo:kv_blocks_free")


def _story(number: int) -> str:
    """`INPUT_LEN` bytes, so as many tokens of the embedded model; no two are alike."""
    return (STORY[number:] + STORY)[:INPUT_LEN]


async def _all_at_once(server: LiveServer, sampling: dict[str, Any]) -> list[str]:
    prompts = [_story(number) for number in range(NUM_REQUESTS)]
    return await _texts(server, prompts, max_tokens=OUTPUT_LEN, **sampling)


async def _texts(server: LiveServer, prompts: Sequence[str | list[int]], **body: Any) -> list[str]:
    """One request per prompt, all at the same time; where it is drawn, each has its own seed."""
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=server.url, timeout=DEADLINE_S, limits=limits) as client:
        posts = [
            client.post("/v1/completions", json={"prompt": prompt, "seed": number, **body})
            for number, prompt in enumerate(prompts)
        ]
        answers = [response.raise_for_status().json() for response in await asyncio.gather(*posts)]
    assert {body["max_tokens"]} == {answer["usage"]["completion_tokens"] for answer in answers}
    return [answer["choices"][0]["text"] for answer in answers]


def _moved(before: Any, after: Any, name: str) -> float:
    return after.total(name) - before.total(name)
