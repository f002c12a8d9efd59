"""What speculation is worth, and whether its closed form says so: a table for docs/speculation.md.

Requests decode in one engine, all at once, in three ways: without drafts, with a fixed number of them, and with a
number that is chosen. Counted is the CPU time of the steps in which all of them run, behind a first round that only
warms up (and teaches the controller). The ways take turns, and of several turns the cheapest counts, since what
disturbs only adds.

Acceptance by position and tokens a step are those of the fixed number. The cost c of a draft step and v of a step that
verifies, both in steps without drafts, are what the controller has measured for itself in the adaptive run (where it
never tried so many rows, what the fixed run took). From them the closed form predicts E / (v + passes c), E = 1 + the
sum of the products of acceptance; beside it stands what the fixed number gained, and what the chosen one did.

    python -m benchmarks.speculation [--model FILE ...] [--batch 1 8 32] [--drafts 3] [--turns 2] [--write PAGE]

`--write` puts the table between the two marks in that page.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, zip_longest
from operator import mul
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from app.settings import Settings
from benchmarks import load_line
from core import EMBEDDED_MODEL, Engine, EngineConfig, NewRequest, SamplingParams, SpeculativeConfig, load_engine
from core.scheduling.drafting import DraftOutlook

BEGIN, END = "<!-- benchmarks.speculation -->", "<!-- /benchmarks.speculation -->"
STORY = "Once upon a time there was a little girl. One day "
COPIED = (
    "Once upon a time, there was a little girl named Lily. She loved to play with her red ball in the park. "
    "One day, she saw a big dog. "
) * 3
RANDOM = "zq xv 81 kw; pf 07 jh bt, ux 3 ry wd 95 gm? oe "
BLOCKS_EACH = 40
WAYS = ("off", "fixed", "adaptive")
HEAD = (
    "| Model, drafts, text | Requests | Kept, by position | Tokens a step | c | v | Predicted | Measured"
    " | Chosen k | Mean k |"
)


@dataclass(frozen=True)
class Case:
    """A drafter on a text."""

    name: str
    method: str
    text: str
    temperature: float


DRAFT_MODEL_CASES = (
    Case("draft model, story, greedy", "draft_model", STORY, 0.0),
    Case("draft model, story, sampled", "draft_model", STORY, 1.0),
)
LOOK_UP_CASES = (
    Case("look-up, copied, greedy", "ngram", COPIED, 0.0),
    Case("look-up, story, sampled", "ngram", STORY, 1.0),
    Case("look-up, random, sampled", "ngram", RANDOM, 1.0),
)


@dataclass(frozen=True)
class Measured:
    """Steps in which all requests ran. A turn is one request's share of a step."""

    cpu_s: float = 0.0
    num_steps: int = 0
    num_turns: int = 0
    num_tokens: int = 0
    draft_s: float = 0.0
    num_passes: int = 0
    num_chosen: float = 0.0
    num_verified: int = 0
    kept: tuple[int, ...] = ()  # by position
    outlook: DraftOutlook | None = None  # of the last round

    def __add__(self, other: "Measured") -> "Measured":
        names = [f.name for f in fields(self) if f.name not in ("kept", "outlook")]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        kept = tuple(map(sum, zip_longest(self.kept, other.kept, fillvalue=0)))
        return Measured(**sums, kept=kept, outlook=other.outlook)

    @property
    def cpu_s_per_token(self) -> float:
        return self.cpu_s / self.num_tokens

    @property
    def acceptance(self) -> list[float]:
        """By position, of the drafts before which all were kept."""
        before = (self.num_verified, *self.kept)
        return [kept / tried if tried else 0.0 for kept, tried in zip(self.kept, before, strict=False)]


def requests_of(case: Case, numbers: range, engine: Engine, max_tokens: int) -> Iterator[NewRequest]:
    """What sets a request apart stands in front, so that their texts differ and share no blocks."""
    for number in numbers:
        prompt = tuple(engine.tokenizer.encode(f"{number}. {case.text}"))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=case.temperature)
        yield NewRequest(request_id=str(number), prompt_token_ids=prompt, params=params)


def run_round(engine: Engine, case: Case, numbers: range, max_tokens: int) -> Measured:
    """Decode these requests together until one of them ends; what the steps behind their prompts took."""
    for request in requests_of(case, numbers, engine, max_tokens):
        engine.add(request)
    before, waiting = engine.stats, {str(number) for number in numbers}
    while waiting:
        waiting -= {output.request_id for output in engine.step()}  # the first may be of several tokens
        before = engine.stats
    num_steps, num_turns, started_s = 0, 0, time.process_time()
    has_ended = False
    while not has_ended:
        outputs = engine.step()
        num_steps, num_turns = num_steps + 1, num_turns + len(outputs)
        has_ended = any(output.is_finished for output in outputs)
    cpu_s, after = time.process_time() - started_s, engine.stats
    for number in numbers:
        engine.abort(str(number))
    old, new = (stats.accepted_per_position for stats in (before, after))
    return Measured(
        cpu_s,
        num_steps,
        num_turns,
        after.num_generation_tokens - before.num_generation_tokens,
        after.draft_seconds - before.draft_seconds,
        after.num_draft_passes - before.num_draft_passes,
        after.histograms["draft_tokens"].sum - before.histograms["draft_tokens"].sum,
        after.num_drafts - before.num_drafts,
        tuple(b - a for a, b in zip(old, new, strict=True)),
        after.draft_outlook,
    )


def size_of(model: str, batch: int) -> tuple[int, int]:
    """Rounds, with the one that warms up, and tokens a request: as much as takes minutes and not hours."""
    if model == EMBEDDED_MODEL:
        return 1 + max(1, 6 // batch), 128
    return 1 + max(1, 3 // batch), 128


def run_way(model: str, case: Case, way: str, batch: int, num_drafts: int) -> Measured:
    """The rounds of one engine, the first not counted."""
    speculative = SpeculativeConfig(
        method=case.method,
        num_speculative_tokens=num_drafts,
        adaptive=way == "adaptive",
        disable_by_batch_size=batch,  # however many run: what drafts cost in a large batch is the question
    )
    limits: dict[str, Any] = {
        "num_kv_blocks": batch * BLOCKS_EACH,
        "max_num_batched_tokens": 512,
        "cache_dir": Settings().cache_dir,
    }
    engine = load_engine(
        EngineConfig(model=model, speculative=None if way == "off" else speculative, num_threads=1, **limits),
        clock=time.process_time,
    )
    num_rounds, max_tokens = size_of(model, batch)
    rounds = [run_round(engine, case, range(i * batch, (i + 1) * batch), max_tokens) for i in range(num_rounds)]
    return sum(rounds[1:], Measured())


def compare(model: str, case: Case, batch: int, num_drafts: int, turns: int) -> Mapping[str, Measured]:
    """The cheapest of the turns of each way; the ways take turns, so that what disturbs meets all of them."""
    best: dict[str, Measured] = {}
    for _ in range(turns):
        for way in WAYS:
            run = run_way(model, case, way, batch, num_drafts)
            if way not in best or run.cpu_s_per_token < best[way].cpu_s_per_token:
                best[way] = run
    return best


def costs(off: Measured, fixed: Measured, outlook: DraftOutlook | None, num_drafts: int) -> tuple[float, float]:
    """c, and v of what is verified on average: look-up does not always find something."""
    step_s = off.cpu_s / off.num_steps
    is_full = fixed.num_verified > 0.95 * fixed.num_turns
    if outlook is not None and is_full and num_drafts in outlook.verification_costs:
        return outlook.draft_cost, outlook.verification_costs[num_drafts]
    draft_cost = fixed.draft_s / fixed.num_passes / step_s if fixed.num_passes else 0.0
    return draft_cost, (fixed.cpu_s - fixed.draft_s) / fixed.num_steps / step_s


def row(model: str, case: Case, batch: int, best: Mapping[str, Measured], num_drafts: int) -> str:
    off, fixed, adaptive = (best[way] for way in WAYS)
    num_passes = fixed.num_passes / fixed.num_steps
    draft_cost, verification_cost = costs(off, fixed, adaptive.outlook, num_drafts)
    expected = 1 + fixed.num_verified / fixed.num_turns * sum(accumulate(fixed.acceptance, mul))
    predicted = expected / (verification_cost + num_passes * draft_cost)
    measured = (off.cpu_s_per_token / run.cpu_s_per_token for run in (fixed, adaptive))
    name = model if model == EMBEDDED_MODEL else Path(model).name.split(".")[0]
    kept = " ".join(f"{rate:.2f}" for rate in fixed.acceptance)
    gains = " | ".join(f"{gain:.2f} x" for gain in (predicted, *measured))
    return (
        f"| {name}, {case.name} | {batch} | {kept} | {expected:.2f} | {draft_cost:.2f} | {verification_cost:.2f}"
        f" | {gains} | {adaptive.num_chosen / adaptive.num_turns:.2f} |"
    )


def write_table(page: Path, lines: Sequence[str]) -> None:
    """Between the marks, whatever stood there."""
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise SystemExit(f"{page} lacks the marks {BEGIN} and {END}")
    page.write_text("\n".join([f"{head}{BEGIN}", *lines, f"{END}{tail}"]), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=[], help="further models, which draft by look-up")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    lines = ["", HEAD, "|---" * HEAD.count(" | ") + "|---|"]
    print("\n".join(lines))
    for model in (EMBEDDED_MODEL, *options.model):
        cases = (*DRAFT_MODEL_CASES, *LOOK_UP_CASES) if model == EMBEDDED_MODEL else LOOK_UP_CASES[::2]
        turns = options.turns if model == EMBEDDED_MODEL else 1  # a large model is disturbed less and takes longer
        for case in cases:
            for batch in options.batch:
                with threadpool_limits(limits=1, user_api="blas"):
                    best = compare(model, case, batch, options.drafts, turns)
                lines.append(row(model, case, batch, best, options.drafts))
                print(lines[-1], flush=True)
    words = [Path(word).name if word.endswith(".gguf") else word for word in sys.argv[1:]]
    command = f"`python -m benchmarks.speculation {' '.join(words)}`".replace(" `", "`")
    lines += ["", f"{command}, {load_line()[1]}.", ""]
    print("\n".join(lines[-3:]))
    if options.write:
        write_table(options.write, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
