"""Pairs of runs: what is measured, how often, and in which order."""

import random
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from benchmarks.peers.client import Outcome, Work
from benchmarks.peers.processes import Engine

PROMPT_LEN = 128
NEW_TOKENS = 128
FIRST_TOKEN_PROMPT_LEN = 512
VOCABULARY = 49_000  # below every special id of SmolLM2's that would be at its end; its first 17 ids are special too
FIRST_ID = 100
Lock = Callable[[], AbstractContextManager[None]]


@dataclass
class Figures:
    """One engine's values, a list entry a run: tokens/s by number of streams, and the rest."""

    name: str
    versions: str = ""
    command: str = ""
    start_s: float = 0.0
    tokens_per_s: dict[int, list[float]] = field(default_factory=dict)
    first_token_s: list[float] = field(default_factory=list)
    memory_bytes: int = 0


@dataclass
class Comparison:
    """Ours first, where there are two. `loads` is the machine's load, before and after."""

    engines: Sequence[Figures]


class Prompts:
    """Random prompts, no two alike, so that no cache has seen one; the engines of a pair are given the same."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def work(self, num_streams: int, prompt_len: int, num_new_tokens: int) -> Work:
        ids = range(FIRST_ID, VOCABULARY)
        return Work([self._rng.choices(ids, k=prompt_len) for _ in range(num_streams)], num_new_tokens)


def measure_pair(ours: Engine, peer: Engine, options: Namespace, lock: Lock) -> Comparison:
    """Start both, and let them do the same work in turn."""
    return _measure([ours, peer], options, lock)


def measure_alone(engine: Engine, options: Namespace, lock: Lock) -> Comparison:
    return _measure([engine], options, lock)


def _measure(engines: Sequence[Engine], options: Namespace, lock: Lock) -> Comparison:
    figures = [Figures(engine.name) for engine in engines]
    is_start_alone = not options.streams and options.no_first_token
    try:
        with lock() if is_start_alone else nullcontext():
            _start(engines, figures)
        with lock():
            _run_all(engines, figures, options)
    finally:
        for engine in engines:
            engine.stop()
    return Comparison(figures)


def _start(engines: Sequence[Engine], figures: Sequence[Figures]) -> None:
    for engine, figure in zip(engines, figures, strict=True):
        engine.start()
        engine.pause()
        figure.versions, figure.start_s, figure.command = engine.versions, engine.start_s, engine.command.shown()


def _run_all(engines: Sequence[Engine], figures: Sequence[Figures], options: Namespace) -> None:
    prompts = Prompts()
    _in_turn(engines, prompts.work(max(options.streams, default=1), PROMPT_LEN, 8))  # warm-up
    for _ in range(0 if options.no_first_token else max(3, options.repeats)):
        outcomes = _in_turn(engines, prompts.work(1, FIRST_TOKEN_PROMPT_LEN, 1))
        for figure, outcome in zip(figures, outcomes, strict=True):
            figure.first_token_s.append(outcome.first_token_s[0])
    for num_streams in options.streams:
        for _ in range(options.repeats):
            outcomes = _in_turn(engines, prompts.work(num_streams, PROMPT_LEN, NEW_TOKENS))
            for figure, outcome in zip(figures, outcomes, strict=True):
                figure.tokens_per_s.setdefault(num_streams, []).append(outcome.tokens_per_s)
    for engine, figure in zip(engines, figures, strict=True):
        figure.memory_bytes = engine.memory_bytes()


def _in_turn(engines: Sequence[Engine], work: Work) -> list[Outcome]:
    outcomes = []
    for engine in engines:
        engine.resume()
        outcomes.append(engine.run(work))
        engine.pause()
    return outcomes
