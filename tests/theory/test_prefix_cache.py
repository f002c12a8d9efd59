"""THEORY B6, prefix caching: what is hit, what goes first, who cannot hit whose."""

import hashlib
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.prefix_sharing import make_prompts, run
from core import Engine, EngineConfig, NewRequest, SamplingParams, SpeculativeConfig, load_engine
from core.memory.block_manager import BlockManager, blocks_needed
from core.memory.prefix_ghost import PrefixGhost
from core.request import Request
from core.scheduling.scheduler import ContinuousBatchingScheduler
from core.step import ModelRunnerOutput, SchedulerOutput, count_only
from tests import builders
from tests.app.servers import RunningServer
from tests.builders import new_request
from tests.reports.conftest import Serve
from tests.theory.traces import mooncake

ALPHABET = [ord(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]


class Counted:
    """An engine without a model that says, per request, how many prompt tokens were found and how many computed."""

    def __init__(self, **config: int) -> None:
        self.num_computed = 0
        self.engine = builders.engine(self._execute, **config)

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self.num_computed += sum(max(0, min(s.end, s.request.num_prompt_tokens) - s.start) for s in plan.scheduled)
        return count_only(plan)

    def ask(self, prompt: Sequence[int], cache_salt: Mapping[str, str] | None = None) -> tuple[int, int]:
        """(cached, computed) prompt tokens of one request that runs alone."""
        before = self.num_computed
        request_id = f"request {self.engine.stats.prefix_cache_queries} {before}"
        new = NewRequest(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=1),
            cache_salt=cache_salt or {},
        )
        self.engine.add(new)
        outputs = builders.run(self.engine)[request_id]
        return outputs[-1].num_cached_tokens, self.num_computed - before


# T6.1


def test_a_prompt_that_shares_ten_tokens_hits_the_two_full_blocks_of_four():
    """T6.1: B = 4, a 14-token prompt sharing 10: 8 cached."""
    counted = Counted(block_size=4)
    counted.ask(ALPHABET[:14])

    assert (8, 6) == counted.ask(ALPHABET[:10] + ALPHABET[20:24])


def test_an_identical_prompt_of_full_blocks_is_not_hit_to_its_end():
    """T6.1: 16 tokens again: 12 cached, not 16, for the last token gives the logits."""
    counted = Counted(block_size=4)

    assert (0, 16) == counted.ask(ALPHABET[:16])
    assert (12, 4) == counted.ask(ALPHABET[:16])


@given(st.integers(1, 26), st.integers(0, 26), st.integers(1, 8))
def test_cached_tokens_of_a_repeat(num_tokens: int, num_shared: int, block_size: int):
    """T6.1: floor(min(shared, L - 1) / B) * B."""
    counted = Counted(block_size=block_size)
    shared = min(num_tokens, num_shared)
    counted.ask(ALPHABET[:num_tokens])
    expected = min(shared, num_tokens - 1) // block_size * block_size

    assert (expected, num_tokens - expected) == counted.ask(ALPHABET[:shared] + [1] * (num_tokens - shared))


# T6.2

STORY = "Once upon a time there was a little girl who lived in a house by the sea. "
SPECULATION = pytest.mark.parametrize("num_drafts", [None, 3], ids=["no speculation", "speculation"])


def tiny_engine(num_drafts: int | None, **config: object) -> Engine:
    speculative = SpeculativeConfig(num_speculative_tokens=num_drafts) if num_drafts else None
    return load_engine(EngineConfig(speculative=speculative, num_threads=1, **config))  # type: ignore[arg-type]


@SPECULATION
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1, "seed": 5}], ids=["greedy", "seeded"])
def test_a_cached_prompt_is_answered_bit_by_bit_as_a_computed_one(num_drafts: int | None, params: dict[str, float]):
    """T6.2: tokens and log-probabilities, with the cache cold, warm, and off."""
    answers, cached = [], []
    for enabled in (True, False):
        engine = tiny_engine(num_drafts, num_kv_blocks=100, enable_prefix_caching=enabled)
        for name in ("cold", "warm"):
            engine.add(new_request(name, STORY.encode(), 24, num_logprobs=5, ignore_eos=True, **params))
            outputs = builders.run(engine)[name]
            answers.append([(token.token_id, token.logprobs) for output in outputs for token in output.tokens])
            cached.append(outputs[-1].num_cached_tokens)

    assert [0, 64, 0, 0] == cached
    assert [answers[0]] * 4 == answers


# T6.3


def hit_share(name: str, num_blocks: int) -> float:
    """Blocks found over blocks asked for, the requests of a trace one after another, each whole and then freed."""
    trace = mooncake(name)
    manager = BlockManager(num_blocks, block_size=512)
    num_hits = 0
    for request, hashes in enumerate(trace.hash_ids):
        taken = manager.allocate(request, len(hashes) * 512, block_hashes=hashes)
        assert taken is not None
        num_hits += len(hashes) - len(taken)
        manager.publish(request, hashes)
        manager.free(request)
    return num_hits / trace.num_blocks


@pytest.mark.parametrize(
    ("name", "million_tokens", "expected"),
    [
        ("conversation", 3, 0.1361),
        ("conversation", 5, 0.2071),
        ("conversation", 15, 0.3243),
        ("conversation", 50, 0.3635),
        ("synthetic", 3, 0.3094),
        ("synthetic", 5, 0.4206),
        ("synthetic", 15, 0.6216),
        ("synthetic", 50, 0.6396),
    ],
)
def test_the_least_recently_used_go_first_tails_before_heads(name: str, million_tokens: int, expected: float):
    """T6.3: hit rates in blocks of pools of 3, 5, 15 and 50 million tokens, +-.002; ours to the last digit."""
    assert expected == pytest.approx(hit_share(name, million_tokens * 10**6 // 512), abs=5e-5)


@pytest.mark.parametrize(
    ("name", "in_tokens", "in_blocks"), [("conversation", 0.3736, 0.3664), ("synthetic", 0.6512, 0.6396)]
)
def test_a_pool_that_never_evicts_hits_all_that_was_there_before(name: str, in_tokens: float, in_blocks: float):
    """T6.3: infinite cache. In blocks 1 - distinct / all, through the manager; in tokens a last block counts as cut."""
    trace = mooncake(name)
    seen: set[int] = set()
    num_hit_tokens = 0
    for num_tokens, hashes in zip(trace.input_lens, trace.hash_ids, strict=True):
        num_hit_tokens += min(num_tokens, 512 * sum(h in seen for h in hashes))
        seen.update(hashes)

    assert in_tokens == pytest.approx(num_hit_tokens / sum(trace.input_lens), abs=5e-5)
    assert in_blocks == pytest.approx(1 - trace.num_distinct / trace.num_blocks, abs=5e-5)
    assert 1 - trace.num_distinct / trace.num_blocks == pytest.approx(hit_share(name, trace.num_distinct))


def ghost_of(name: str, num_blocks: int, max_entries: int) -> PrefixGhost:
    """What has followed a whole trace beside a pool of that size."""
    ghost = PrefixGhost(512, num_blocks, max_entries=max_entries)
    for hash_ids in mooncake(name).hash_ids:
        hashes = [hashlib.sha256(str(hash_id).encode()).digest() for hash_id in hash_ids]
        ghost.look_up(hashes, len(hashes) * 512)
        ghost.publish(hashes)
    return ghost


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_the_gauges_of_other_caches_are_exact_while_every_block_is_followed(name: str):
    """T6.3 for the gauges: an infinite cache, and one of twice 5M tokens."""
    num_blocks = 5_000_000 // 512
    ghost = ghost_of(name, num_blocks, max_entries=10**6)

    assert 1 - mooncake(name).num_distinct / mooncake(name).num_blocks == pytest.approx(ghost.infinite_hit_rate)
    assert hit_share(name, 2 * num_blocks) == pytest.approx(ghost.doubled_hit_rate, abs=0.002)
    assert 0 == ghost.standard_error


@pytest.mark.parametrize("max_entries", [1000, 4000, 16_000])
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_the_gauges_keep_to_their_stated_error_when_few_blocks_are_followed(name: str, max_entries: int):
    """T6.3 for the gauges: within four standard errors, although one block is in all of the requests."""
    num_blocks = 5_000_000 // 512
    ghost = ghost_of(name, num_blocks, max_entries)

    assert 0 < ghost.standard_error < 0.02
    exact = 1 - mooncake(name).num_distinct / mooncake(name).num_blocks
    assert exact == pytest.approx(ghost.infinite_hit_rate, abs=4 * ghost.standard_error)
    assert hit_share(name, 2 * num_blocks) == pytest.approx(ghost.doubled_hit_rate, abs=4 * ghost.standard_error)


# T6.4

SALTS: list[dict[str, str]] = [
    {},
    {"api_key": "A"},
    {"api_key": "B"},
    {"cache_salt": "A"},
    {"api_key": "A", "cache_salt": "B"},
    {"api_key": "B", "cache_salt": "A"},
    {"model": "A"},
]


def test_requests_of_different_salts_hit_nothing_of_each_other():
    """T6.4 as counts: 0 cached on the first use of each salt, all but the last block on its second."""
    counted = Counted(block_size=4)

    assert [(0, 26)] * len(SALTS) == [counted.ask(ALPHABET, salt) for salt in SALTS]
    assert [(24, 2)] * len(SALTS) == [counted.ask(ALPHABET, salt) for salt in SALTS]


async def cached_and_computed(server: RunningServer, key: str, cache_salt: str | None = None) -> tuple[int, float]:
    """Of one request over HTTP: what its usage says was cached, and by how much the computed prompt tokens grew."""
    name = "vllm:prompt_tokens_by_source_total{source=local_compute}"
    before = (await server.until_idle())[name]
    body = {"prompt": STORY, "max_tokens": 1} | ({} if cache_salt is None else {"cache_salt": cache_salt})
    response = await server.client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert 200 == response.status_code, response.text
    after = (await server.until_idle())[name]
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"], after - before


async def test_tenants_hit_nothing_of_each_other_nor_by_repeating_each_others_salt(serve: Serve):
    """T6.4 through the server: two keys, with salts, with each other's salts, with the other's key for a salt."""
    server = await serve(api_key=("key-a", "key-b"))
    cold, warm = (0, len(STORY)), (64, len(STORY) - 64)
    uses = [
        ("key-a", None),
        ("key-b", None),
        ("key-a", "mine"),
        ("key-b", "mine"),
        ("key-a", "key-b"),
        ("key-b", "key-a"),
    ]

    assert [cold] * 6 == [await cached_and_computed(server, *use) for use in uses]
    assert [warm] * 6 == [await cached_and_computed(server, *use) for use in uses]


# T6.6

prompts = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=24)


@given(st.lists(st.tuples(prompts, st.integers(1, 8), st.integers(1, 3)), min_size=1, max_size=8), st.integers(0, 8))
def test_every_block_is_free_or_used_at_every_moment(families: list[tuple[list[int], int, int]], spare: int):
    """T6.6: free + used = total, cached is part of free, and references equal membership in tables; in every step."""
    num_blocks = max(blocks_needed(len(prompt) + max_tokens, 4) for prompt, max_tokens, _ in families) + spare
    manager = BlockManager(num_blocks, block_size=4)
    scheduler = ContinuousBatchingScheduler(4, manager, max_num_batched_tokens=16, enable_prefix_caching=True)

    def check_balance() -> None:
        pool = manager.pool
        ids = [r.request_id for r in scheduler.unfinished_requests()]
        tables = [manager.block_table(request_id) for request_id in ids if manager.holds(request_id)]
        used = {block for table in tables for block in table}
        free = [block for block in range(num_blocks) if pool.ref_count(block) == 0]
        assert [num_blocks - len(used), len(used)] == [pool.num_free_blocks, pool.num_used_blocks]
        assert len([block for block in free if pool.hash_of(block) is not None]) == pool.num_cached_blocks
        assert sum(map(len, tables)) == sum(map(pool.ref_count, range(num_blocks)))
        assert len([block for block in used if pool.ref_count(block) > 1]) == pool.num_shared_blocks

    for i, (prompt, max_tokens, num_samples) in enumerate(families):
        params = SamplingParams(max_tokens=max_tokens)
        parent, *siblings = (Request(f"{i}-{n}", prompt, params, choice=n) for n in range(num_samples))
        parent.siblings = siblings
        scheduler.add_request(parent)
    while scheduler.has_unfinished_requests:
        scheduler.step()
        check_balance()
        scheduler.check_invariants()

    assert num_blocks == manager.num_free_blocks


# T6.7


@pytest.mark.parametrize("max_num_batched_tokens", [48, 512, 2000, None], ids=lambda limit: f"{limit} a step")
@pytest.mark.parametrize("num_priming", [0, 1], ids=["100 together", "one primes, 99 together"])
def test_hits_are_those_that_the_prompts_were_made_for(num_priming: int, max_num_batched_tokens: int | None):
    """T6.7: 100 prompts with 512 tokens in common are computed as those 512 and the suffixes, exactly.

    When all arrive together, those that could hit what a step is computing wait for it.
    """
    prompts = make_prompts(100, 512)
    outcome = run(prompts, shares=True, num_priming=num_priming, max_num_batched_tokens=max_num_batched_tokens)

    assert 512 + sum(len(prompt) - 512 for prompt in prompts) == outcome.num_computed_tokens


def test_a_common_prompt_is_held_once_by_all_who_run():
    """And its 32 blocks, of 16 tokens, are used once."""
    prompts = make_prompts(100, 512)
    without, shared = (run(prompts, shares=shares, num_priming=0) for shares in (False, True))

    assert sum(map(len, prompts)) == without.num_computed_tokens
    assert 99 * 32 == pytest.approx(without.peak_blocks - shared.peak_blocks, abs=len(prompts) / 16)
