"""`python -m core`: the three mechanisms at work on numbers small enough to check by hand.

Paged KV cache, continuous batching, speculative decoding: each is shown by the classes and functions that the server
runs, next to the arithmetic that says what must come out.
"""

import os
import string
import sys
from collections.abc import Sequence

import numpy as np

from core import (
    BlockManager,
    ContinuousBatchingScheduler,
    blocks_needed,
    kv_cache_blocks_fragmentation,
    speculative_accept,
    static_batching_steps,
)

TARGET_PROBS = (0.5, 0.3, 0.15, 0.05)
DRAFT_PROBS = (0.3, 0.3, 0.2, 0.2)
OUTPUT_LENS = (8, 2, 3, 1, 6, 2)
MAX_BATCH = 2


def show_blocks() -> None:
    """Blocks are the ceiling of tokens over block size; waste is what lies behind each last token."""
    print("1. A paged KV cache")
    for num_tokens in (0, 1, 4, 5, 8, 9):
        print(f"   blocks_needed({num_tokens}, 4) = {blocks_needed(num_tokens, 4)}")
    seq_lens, block_size = [1, 30, 5], 16
    paged, naive = kv_cache_blocks_fragmentation(seq_lens, block_size)
    blocks = [blocks_needed(length, block_size) for length in seq_lens]
    longest, num_tokens = max(seq_lens), sum(seq_lens)
    print(f"   lengths {seq_lens}, blocks of {block_size}:")
    print(f"     paged: {sum(blocks)} blocks x {block_size} = {sum(blocks) * block_size} slots,", end=" ")
    print(f"less {num_tokens} tokens: {paged} wasted")
    print(f"     naive: {len(seq_lens)} requests x {longest} = {len(seq_lens) * longest} slots,", end=" ")
    print(f"less {num_tokens} tokens: {naive} wasted")


def show_tables() -> None:
    """A table grows by a block when the last one is full, anywhere in the pool; short of memory is None."""
    manager = BlockManager(num_blocks=4, block_size=4)
    print("   a pool of 4 blocks of 4 slots:")

    def report(call: str, taken: list[int] | None) -> None:
        tables = ", ".join(f"{name} {manager.block_table(name)}" for name in ("a", "b") if name in known)
        print(f"     {call:<18} -> {taken!s:<7} free {manager.num_free_blocks}, tables: {tables}")

    known = ["a"]
    report('allocate("a", 7)', manager.allocate("a", 7))
    known.append("b")
    report('allocate("b", 3)', manager.allocate("b", 3))
    for call, name, num_tokens in (("append", "a", 1), ("append", "a", 1), ("append", "b", 1), ("append", "b", 1)):
        report(f'{call}("{name}")', manager.append(name, num_tokens))
    manager.free("a")
    known.remove("a")
    print(f'     free("a")          -> free {manager.num_free_blocks}')
    report('append("b")', manager.append("b"))


def continuous_slots(output_lens: Sequence[int], max_batch: int) -> list[str]:
    """One line per place: which request (a letter) held it in each step of the scheduler."""
    manager = BlockManager(num_blocks=sum(output_lens), block_size=1)
    scheduler = ContinuousBatchingScheduler(max_batch, manager)
    for letter, length in zip(string.ascii_uppercase, output_lens, strict=False):
        scheduler.add(letter, num_prompt_tokens=1, max_tokens=length)
    places, lines = [""] * max_batch, [""] * max_batch
    while scheduler.has_unfinished_requests:
        report = scheduler.step()
        for letter in report.scheduled:
            if letter not in places:
                places[places.index("")] = letter
        lines = [line + (place or ".") for line, place in zip(lines, places, strict=True)]
        places = ["" if place in report.finished else place for place in places]
    return lines


def static_slots(output_lens: Sequence[int], max_batch: int) -> list[str]:
    """The same for groups that start and end together."""
    lines = [""] * max_batch
    for start in range(0, len(output_lens), max_batch):
        group = output_lens[start : start + max_batch]
        for place in range(max_batch):
            length = group[place] if place < len(group) else 0
            lines[place] += (string.ascii_uppercase[(start + place) % 26] * length).ljust(max(group), ".")
    return lines


def show_batching() -> None:
    """Places given on at once, against places held until the longest of a group is done."""
    names = ", ".join(f"{letter} {n}" for letter, n in zip(string.ascii_uppercase, OUTPUT_LENS, strict=False))
    print(f"\n2. Continuous batching: output lengths {names}; {MAX_BATCH} places; a dot is a place held for nothing")
    num_static = static_batching_steps(OUTPUT_LENS, MAX_BATCH)
    for name, lines in (
        ("static", static_slots(OUTPUT_LENS, MAX_BATCH)),
        ("continuous", continuous_slots(OUTPUT_LENS, MAX_BATCH)),
    ):
        num_steps = num_static if name == "static" else len(lines[0])
        num_idle = num_steps * MAX_BATCH - sum(OUTPUT_LENS)
        print(f"   {name}: {num_steps} steps, {num_idle} of {num_steps * MAX_BATCH} slot-steps wasted")
        for line in lines:
            print(f"     |{line}|")


class _Told:
    """A random source that says what it is told."""

    def __init__(self, draws: Sequence[float]) -> None:
        self._draws = iter(draws)

    def random(self) -> float:
        return next(self._draws)


def show_trace(draft_tokens: Sequence[int], draws: Sequence[float]) -> None:
    """One call of speculative_accept, and each comparison in it."""
    num_drafts = len(draft_tokens)
    target, draft = np.array([TARGET_PROBS] * (num_drafts + 1)), np.array([DRAFT_PROBS] * num_drafts)
    num_accepted, bonus = speculative_accept(draft_tokens, target, draft, _Told(draws))
    print(f"   drafts {list(draft_tokens)}, draws {list(draws)}:")
    for token, drawn in list(zip(draft_tokens, draws, strict=False))[: num_accepted + 1]:
        ratio = min(1.0, TARGET_PROBS[token] / DRAFT_PROBS[token])
        sign, verdict = ("<", "kept") if drawn < ratio else (">=", "refused")
        print(f"     token {token}: {drawn} {sign} min(1, {TARGET_PROBS[token]} / {DRAFT_PROBS[token]}): {verdict}")
    law = "the target's law" if num_accepted == num_drafts else "the positive part of target - draft"
    print(f"     bonus token {bonus} by {draws[-1]} from {law}: emitted {[*draft_tokens[:num_accepted], bonus]}")


def show_speculation() -> None:
    """Acceptance and tokens per step of two fixed laws, then two steps traced."""
    print(f"\n3. Speculative decoding: target law {TARGET_PROBS}, draft law {DRAFT_PROBS}")
    smaller = [min(pair) for pair in zip(TARGET_PROBS, DRAFT_PROBS, strict=True)]
    acceptance = sum(smaller)
    num_drafts = 4
    per_step = sum(acceptance**i for i in range(num_drafts + 1))
    print(f"   acceptance: sum of the smaller = {' + '.join(map(str, smaller))} = {acceptance:.4g}")
    powers = " + ".join(["1", *(f"{acceptance:.4g}^{i}" for i in range(1, num_drafts + 1))])
    print(f"   tokens per step with {num_drafts} drafts: {powers} = {per_step:.4f}")
    show_trace((0, 2, 3), (0.9, 0.6, 0.4, 0.7))
    show_trace((0, 2, 1), (0.9, 0.6, 0.4, 0.7))


def main() -> None:
    """Print the worked example."""
    try:
        show_blocks()
        show_tables()
        show_batching()
        show_speculation()
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has read enough; at its end Python would try to write the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
