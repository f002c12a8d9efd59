"""Speculation, ours beside vLLM's: the same prompts and settings, acceptance and tokens a second side by side.

    python -m tools.export_hf smollm2 build/smollm2
    python -m tools.export_hf octavo-tiny build/tiny
    python -m tools.export_hf octavo-tiny-draft build/tiny-draft
    python -m benchmarks.peers.speculation --vllm-python VENV/bin/python --hf-model build/smollm2 \\
        --hf-tiny build/tiny --hf-draft build/tiny-draft [--url http://host:port] [--cases ...] [--repeats 3]

Two cases: look-up on text that is to be copied and on free text (SmolLM2), and the embedded pair with its draft model
(greedy, one request after the other, our controller off, so that both draft the same number). Acceptance is scraped:
`vllm:spec_decode_*` before and after, of whichever server. Beside it stands what the closed form says for the measured
acceptance of the first draft: (1 - a^(k+1)) / (1 - a) tokens a step, as if every draft were kept with that chance.

`--url` names a vLLM server that runs already, with its own speculative settings; its model must be the case's.
"""

import argparse
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import urllib.request
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import load_line
from benchmarks.peers.__main__ import locked
from benchmarks.peers.client import EngineFailed, Outcome, Work
from benchmarks.peers.engines import octavo_server, vllm_server
from benchmarks.peers.processes import AttachedServer, HttpEngine
from core import ByteTokenizer
from core.tokenizer import load_tokenizer

NEW_TOKENS = 128
LOOK_UP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
PASSAGES = (
    "The lighthouse keeper wrote down the wind at six, the tide at seven and the ships at eight. He had done so for "
    "thirty years, and in all that time he had missed one entry, on the night his daughter was born.",
    "def total(prices, discounts):\n    result = 0\n    for price, discount in zip(prices, discounts):\n"
    "        result += price * (1 - discount)\n    return round(result, 2)\n",
    "Ingredients: 200 g flour, 100 g butter, 80 g sugar, 1 egg, a pinch of salt. Rub the butter into the flour, add "
    "sugar, egg and salt, knead quickly, rest for an hour, roll out thin, bake for twelve minutes at 180 degrees.",
    "Article 4. The members meet twice a year. Article 5. The members elect a chair for two years. Article 6. The "
    "chair calls the meetings. Article 7. The members may remove the chair by two thirds of the votes.",
)
COPY = tuple(f"{text}\n\nThe same text again, word for word:\n\n{text[:40]}" for text in PASSAGES)
FREE = (
    "Once upon a time, in a village by the sea,",
    "The three most important things to know about bread are",
    "Dear Sir or Madam, I am writing to you because",
    "The history of the bicycle begins",
)
STORIES = (
    "Once upon a time there was a little girl. One day ",
    "Tom and his dog went to the park. They saw ",
    "The old king had a big red ball. He said ",
    "It was a sunny day and Lily wanted to ",
)


@dataclass(frozen=True)
class Case:
    """A model, its drafter, and prompts by kind of text. `hf` names the option with the folder that vLLM serves."""

    model: str
    hf: str
    config: Mapping[str, Any]
    texts: Mapping[str, Sequence[str]]

    @property
    def num_drafts(self) -> int:
        return int(self.config["num_speculative_tokens"])


CASES = {
    "lookup": Case("smollm2", "hf_model", LOOK_UP, {"text to copy": COPY, "free text": FREE}),
    "pair": Case(
        "octavo-tiny", "hf_tiny", {"method": "draft_model", "num_speculative_tokens": 3}, {"stories": STORIES}
    ),
}


@dataclass(frozen=True)
class Counters:
    """vLLM's counters of speculation, of either server."""

    num_drafts: float
    num_draft_tokens: float
    num_accepted: float
    accepted_per_position: Sequence[float]

    def since(self, before: "Counters") -> "Counters":
        pairs = zip(self.accepted_per_position, before.accepted_per_position, strict=True)
        return Counters(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted - before.num_accepted,
            [after - earlier for after, earlier in pairs],
        )

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def first_acceptance(self) -> float:
        """How often the first draft of a run was kept."""
        return self.accepted_per_position[0] / self.num_drafts if self.num_drafts else 0.0

    @property
    def tokens_per_draft_step(self) -> float:
        """Tokens of a step that drafted: those kept and the bonus token."""
        return 1 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0


def read_counters(text: str, num_positions: int) -> Counters:
    """From an exposition; what a server has not counted yet is 0."""

    def total(name: str, labels: str = "") -> float:
        found = re.findall(rf"^vllm:spec_decode_{name}_total\{{[^}}]*{labels}[^}}]*\}} (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    positions = [total("num_accepted_tokens_per_pos", rf'position="{i}"') for i in range(num_positions)]
    return Counters(total("num_drafts"), total("num_draft_tokens"), total("num_accepted_tokens"), positions)


@dataclass(frozen=True)
class Result:
    """A server's figures in one case."""

    name: str
    tokens_per_s: float
    counters: Counters | None


def closed_form(acceptance: float, num_drafts: int) -> float:
    """Tokens a step when each draft is kept with this chance, (1 - a^(k+1)) / (1 - a)."""
    return sum(acceptance**i for i in range(num_drafts + 1))


def scrape(url: str, num_positions: int) -> Counters:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return read_counters(answer.read().decode(), num_positions)


def run_case(
    engine: HttpEngine | AttachedServer, works: Sequence[Work], num_positions: int | None, repeats: int
) -> Result:
    """Every prompt by itself, one after the other, `repeats` times; the median of the rounds' rates."""
    for work in works:  # once to warm up; what a server has cached of the prompts, both have
        engine.run(work)
    before = scrape(engine.url, num_positions) if num_positions else None
    rates = []
    for _ in range(repeats):
        outcomes: list[Outcome] = [engine.run(work) for work in works]
        rates.append(sum(o.num_tokens for o in outcomes) / sum(o.seconds for o in outcomes))
    after = scrape(engine.url, num_positions) if num_positions else None
    counters = after.since(before) if after is not None and before is not None else None
    return Result(engine.name, statistics.median(rates), counters)


def works_of(case: Case, hf: Path) -> dict[str, list[Work]]:
    """Token ids, so that no server cuts the text in its own way."""
    tokenizer = ByteTokenizer() if case.model == "octavo-tiny" else load_tokenizer(hf)
    return {
        name: [Work([tokenizer.encode(text)], NEW_TOKENS) for text in prompts] for name, prompts in case.texts.items()
    }


def servers(case: Case, options: Namespace, logs: Path) -> Iterator[HttpEngine]:
    """Ours and vLLM's, without drafts and with."""
    ours = json.dumps({**case.config, "adaptive": False}, separators=(",", ":"))
    theirs = dict(case.config) | ({"model": options.hf_draft} if case.config["method"] == "draft_model" else {})
    for name, config in (("Octavo, no drafts", "null"), ("Octavo, drafts", ours)):
        yield octavo_server(name, case.model, ["--speculative-config", config, *options.ours.split()], logs)
    if options.vllm_python:
        hf = getattr(options, case.hf)
        yield vllm_server("vLLM, no drafts", options, logs, hf, [])
        flags = ["--speculative-config", json.dumps(theirs, separators=(",", ":"))]
        yield vllm_server("vLLM, drafts", options, logs, hf, flags)


def compare(case: Case, options: Namespace, logs: Path) -> dict[str, list[Result]]:
    """Results by kind of text. All servers are started first; then each works by itself, the others stopped."""
    works = works_of(case, Path(getattr(options, case.hf)))
    results: dict[str, list[Result]] = {text: [] for text in works}
    with ExitStack() as stack:
        engines = list(servers(case, options, logs))
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
            engine.pause()
        stack.enter_context(locked(options.lock))
        for engine in engines:
            engine.resume()
            positions = case.num_drafts if engine.name.endswith(", drafts") else None
            for text, of_text in works.items():
                results[text].append(run_case(engine, of_text, positions, options.repeats))
            engine.pause()
            print(f"- {engine.name}: {engine.versions}; `{engine.command.shown()}`", flush=True)
        if options.url:
            attached = AttachedServer("vLLM, as it runs", options.url)
            for text, of_text in works.items():
                results[text].append(run_case(attached, of_text, case.num_drafts, options.repeats))
    return results


def table(case: Case, text: str, results: Sequence[Result]) -> str:
    lines = [
        f"{case.model}, {text}, `{json.dumps(dict(case.config))}`",
        "",
        "| server | tokens/s | gain | drafts kept | first draft kept | tokens a drafting step | closed form |",
        "|---|---|---|---|---|---|---|",
    ]
    plain = results[0]
    for result in results:
        plain = result if result.counters is None else plain
        lines.append(_row(result, plain, case.num_drafts))
    return "\n".join(lines) + "\n"


def _row(result: Result, plain: Result, num_drafts: int) -> str:
    cells = [result.name, f"{result.tokens_per_s:.1f}"]
    if (counted := result.counters) is not None:
        cells += [
            f"{result.tokens_per_s / plain.tokens_per_s:.2f} x",
            f"{counted.acceptance:.1%} of {counted.num_draft_tokens:.0f}",
            f"{counted.first_acceptance:.1%}",
            f"{counted.tokens_per_draft_step:.2f}",
            f"{closed_form(counted.first_acceptance, num_drafts):.2f}",
        ]
    return "| " + " | ".join([*cells, *[""] * (7 - len(cells))]) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON"))
    parser.add_argument("--url", help="of a vLLM server that runs already, instead of --vllm-python")
    parser.add_argument("--vllm-preload", default="")
    for name in ("hf-model", "hf-tiny", "hf-draft"):
        parser.add_argument(f"--{name}", help="folder made by tools.export_hf")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ours", default="", help="further flags of ours")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--lock", type=Path, nargs="*", help="files to lock (flock) while measuring")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="peers-") as temporary:
        logs = options.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        for name in options.cases:
            try:
                for text, results in compare(CASES[name], options, logs).items():
                    print(table(CASES[name], text, results), flush=True)
            except EngineFailed as error:
                print(f"{name}: {error}", file=sys.stderr)
    print(": ".join(load_line()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
