"""What the books of the KV cache cost: CPU time of an allocate, an append and a free, and of hashing a token.

None may grow with the number of blocks. Every pool is full when the clock starts: half of its blocks are held by
requests, the other half are cached contents, so that each block taken evicts something and leaves the index. Requests
of 8 blocks are allocated, each with its first 4 blocks asked for by hash and found; each grows by a block; each is
freed. Times are CPU time, the best of several rounds, since what disturbs only adds.

    python -m benchmarks.blocks [--rounds 30] [--num-blocks 1000 10000 100000 1000000]
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import load_line, print_table
from core.block_hash import BlockHashes
from core.memory.block_manager import BlockManager

BLOCK_SIZE = 16
BLOCKS_EACH = 8
NUM_HITS = 4
OPERATIONS = 16  # of each kind in a round: small enough for the smallest pool
# Dearest over cheapest. The books of a large pool lie outside the CPU caches, which costs a factor of 2.
MAX_RATIO = 3.0
MAX_HASH_US = 1.0  # a token


@dataclass(frozen=True)
class Costs:
    """CPU microseconds of one call."""

    allocate: float
    append: float
    free: float


def full_manager(num_blocks: int) -> BlockManager:
    """Half of its blocks used, half cached, in requests of BLOCKS_EACH whose hashes are (request, place)."""
    manager = BlockManager(num_blocks, BLOCK_SIZE)
    num_requests = num_blocks // BLOCKS_EACH
    for request in range(num_requests):
        manager.allocate(request, BLOCKS_EACH * BLOCK_SIZE)
        manager.publish(request, [(request, place) for place in range(BLOCKS_EACH)])
    for request in range(num_requests // 2):
        manager.free(2 * request)
    return manager


def timed(work: Callable[[int], object], names: range) -> float:
    """CPU microseconds a call."""
    started_ns = time.process_time_ns()
    for name in names:
        work(name)
    return (time.process_time_ns() - started_ns) / 1e3 / len(names)


def measure(num_blocks: int, rounds: int) -> Costs:
    """The cheapest of many rounds, for each call by itself."""
    manager = full_manager(num_blocks)
    num_tokens = BLOCKS_EACH * BLOCK_SIZE
    num_held = num_blocks // BLOCKS_EACH // 2
    stride = max(1, num_held // OPERATIONS)
    first_new = num_blocks  # names that nobody has yet
    costs = []
    for number in range(rounds):
        names = range(first_new, first_new + OPERATIONS)
        first_new += OPERATIONS
        # Prefixes of requests that are still there, from all over the pool.
        held = [2 * ((number + i * stride) % num_held) + 1 for i in range(OPERATIONS)]
        hashes = {name: [(of, place) for place in range(NUM_HITS)] for name, of in zip(names, held, strict=True)}
        allocate = timed(lambda name: manager.allocate(name, num_tokens, block_hashes=hashes[name]), names)  # noqa: B023
        append = timed(manager.append, names)
        for name in names:  # what they hold is cached when they are gone, so that the pool stays full
            manager.publish(name, [*hashes[name], *((name, place) for place in range(NUM_HITS, BLOCKS_EACH))])
        costs.append(Costs(allocate, append, timed(manager.free, names)))
    return Costs(
        min(cost.allocate for cost in costs), min(cost.append for cost in costs), min(cost.free for cost in costs)
    )


def hash_us(rounds: int, num_tokens: int = 4096) -> float:
    """CPU microseconds a token of hashing a prompt."""
    token_ids = list(itertools.islice(itertools.cycle(range(50_000)), num_tokens))
    times = []
    for _ in range(rounds):
        started_ns = time.process_time_ns()
        BlockHashes(BLOCK_SIZE, b"salt").up_to(token_ids, num_tokens // BLOCK_SIZE)
        times.append(time.process_time_ns() - started_ns)
    return min(times) / 1e3 / num_tokens


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--num-blocks", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    options = parser.parse_args()
    costs = {num_blocks: measure(num_blocks, options.rounds) for num_blocks in options.num_blocks}
    rows = [
        (f"{num_blocks:,} blocks", f"{cost.allocate:6.2f} us {cost.append:6.2f} us {cost.free:6.2f} us")
        for num_blocks, cost in costs.items()
    ]
    ratios = [
        max(values) / min(values)
        for values in zip(*((cost.allocate, cost.append, cost.free) for cost in costs.values()), strict=True)
    ]
    per_token = hash_us(options.rounds)
    rows += [
        ("dearest over cheapest", " ".join(f"{ratio:6.2f}   " for ratio in ratios)),
        ("target, a factor", f"at most {MAX_RATIO}: {_verdict(max(ratios) <= MAX_RATIO)}"),
        ("hashing", f"{per_token:.3f} us a token"),
        ("target, a token", f"at most {MAX_HASH_US} us: {_verdict(per_token <= MAX_HASH_US)}"),
        load_line(),
    ]
    print_table(f"CPU time of a call: allocate {BLOCKS_EACH} blocks ({NUM_HITS} hits), append, free", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
