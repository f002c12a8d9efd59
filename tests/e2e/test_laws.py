"""Sampling through the server has the target's law: 20,000 answers at temperature 1, four drafts a step, each rule.

Compared are the second and third token given the first, with the law that the target itself gives them; the first comes
of the prompt and knows no drafts. The server's noise is that of its seed, so the outcome is the same every time.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache, partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.model import tiny
from core.model.kv_cache import KVCache
from core.model.transformer import Transformer, flat_batch
from core.model.weights import load_model_files
from tests import oracle
from tests.e2e.live import LiveServer, serving

PROMPT = "Tom and "
NUM_SAMPLES, BATCH, NUM_DRAFTS = 20_000, 128, 4
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "temperature": 1,
    "max_tokens": 6,
    "ignore_eos": True,
    "return_token_ids": True,
}
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def serve_rule(logs: Path) -> Callable[..., Any]:
    def start(rule: str, *, module: str = "app") -> Any:
        config = {"num_speculative_tokens": NUM_DRAFTS, "adaptive": False, "disable_by_batch_size": BATCH}
        config["verification"] = rule
        flags = {"max-num-seqs": BATCH, "max-num-batched-tokens": 1024, "speculative-config": json.dumps(config)}
        return serving(logs, *(f"--{name}={value}" for name, value in flags.items()), module=module)

    return start


def choices(answer: Any) -> list[Tokens]:
    return [tuple(choice["token_ids"]) for choice in answer["choices"]]


def unseeded(server: LiveServer, num_samples: int) -> list[Tokens]:
    return [
        tokens
        for start in range(0, num_samples, BATCH)
        for tokens in choices(server.complete(**BODY, n=min(BATCH, num_samples - start)))
    ]


def seeded(server: LiveServer, num_samples: int) -> list[Tokens]:
    """Each with a seed of its own, over as many connections as are served at once."""
    with ThreadPoolExecutor(BATCH) as pool:
        shares = pool.map(partial(_seeded_by, server.url), [range(i, num_samples, BATCH) for i in range(BATCH)])
        return [tokens for share in shares for tokens in share]


def _seeded_by(url: str, seeds: range) -> list[Tokens]:
    """The plainest client there is: twenty thousand requests are a lot for a comfortable one."""
    connection, samples = HTTPConnection(url.removeprefix("http://")), []
    with closing(connection):
        for seed in seeds:
            body = json.dumps({**BODY, "seed": seed})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            samples += choices(json.load(connection.getresponse()))
    return samples


class TargetLaws:
    """The target's own laws behind the prompt and some tokens."""

    def __init__(self) -> None:
        weights = load_model_files(tiny.TARGET_DIR)
        self._model, self._config = Transformer(weights.config, weights.tensors), weights.config

    def after(self, contexts: Sequence[Tokens]) -> oracle.Doubles:
        """(N, V), one row a context."""
        runs = [([*PROMPT.encode(), *context], 0, (i,)) for i, context in enumerate(contexts)]
        batch = flat_batch(runs, 16)
        last_rows = np.array([span.row + span.num_tokens - 1 for span in batch.spans])
        cache_of_all = KVCache(self._config, len(runs), 16)
        return oracle.softmax(self._model.forward(batch, cache_of_all, last_rows).astype(np.float64))


@cache
def target_laws() -> TargetLaws:
    return TargetLaws()


def misfit(samples: Sequence[Tokens]) -> float:
    """Pearson's statistic over its limit at p = 1e-4: more than 1 is too much."""
    counts = Counter(tokens[:3] for tokens in samples)
    num_first = Counter(tokens[0] for tokens in samples)
    statistic, freedom = 0.0, 0
    for first, num in num_first.items():
        if num >= 100:
            expected, observed = _cells(first, num, counts)
            statistic += float(((observed - expected) ** 2 / expected).sum())
            freedom += len(expected) - 1
    return statistic / oracle.chi_square_limit(freedom)


def _cells(first: int, num: int, counts: Counter[Tokens]) -> tuple[oracle.Doubles, oracle.Doubles]:
    """Expected and observed numbers of the next two tokens; what is expected fewer than 5 times is one cell."""
    (second_V,) = num * target_laws().after([(first,)])
    likely = [int(token) for token in np.flatnonzero(second_V >= 5)]
    third = dict(zip(likely, target_laws().after([(first, second) for second in likely]), strict=True))
    pairs = [(s, int(t)) for s in likely for t in np.flatnonzero(second_V[s] * third[s] >= 5)]
    expected = [second_V[s] * third[s][t] for s, t in pairs]
    observed = [counts[first, s, t] for s, t in pairs]
    rest_expected, rest_observed = num - sum(expected), num - sum(observed)
    if rest_expected < 5:
        expected[-1] += rest_expected
        observed[-1] += rest_observed
    else:
        expected.append(rest_expected)
        observed.append(rest_observed)
    return np.array(expected), np.array(observed, np.float64)


def drafted_and_accepted(server: LiveServer) -> Iterator[float]:
    scrape = server.wait_until_idle()
    for what in ("draft", "accepted"):
        yield scrape.total(f"vllm:spec_decode_num_{what}_tokens_total")


SAMPLERS = {"block": unseeded, "token": unseeded, "keyed": seeded}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", SAMPLERS)
def test_answers_have_the_targets_law(serve_rule: Callable[..., Any], rule: str) -> None:
    with serve_rule("block" if rule == "keyed" else rule) as server:
        samples = SAMPLERS[rule](server, NUM_SAMPLES)
        num_drafted, num_accepted = drafted_and_accepted(server)

    assert NUM_SAMPLES == len(samples)
    assert {6} == {len(tokens) for tokens in samples}
    assert len({tokens[:3] for tokens in samples}) > 200
    assert misfit(samples) < 1
    assert 0.4 < num_accepted / num_drafted < 0.9
    assert num_drafted > NUM_SAMPLES


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", SAMPLERS)
def test_broken_rules_are_found_out(serve_rule: Callable[..., Any], rule: str) -> None:
    """With an eighth of the samples: these mistakes are not small."""
    with serve_rule("block" if rule == "keyed" else rule, module="tests.e2e.broken_server") as server:
        assert misfit(SAMPLERS[rule](server, NUM_SAMPLES // 8)) > 1
