"""KV memory without pages, as systems before paging had it: a request holds one contiguous reservation to its end.

Admission is first come, first served; fragmentation between reservations is not counted, which flatters them all.
"""

from collections.abc import Callable, Sequence

from tests.theory.traces import Lengths

Reserve = Callable[[Lengths], int]
MAX_LEN = 2048


def reserve_max(_: Lengths) -> int:
    """The longest a request could become."""
    return MAX_LEN


def reserve_power_of_two(request: Lengths) -> int:
    """The prompt and a power of two that the output does not pass."""
    return min(MAX_LEN, request.prompt + (1 << (request.output - 1).bit_length()))


def reserve_oracle(request: Lengths) -> int:
    """Exactly what it will need, as nobody can know."""
    return request.total


def utilisation(requests: Sequence[Lengths], reserve: Reserve) -> float:
    """Tokens over slots reserved for them, each request counted at every one of its output tokens."""
    num_tokens = sum(r.output * r.prompt + r.output * (r.output + 1) // 2 for r in requests)
    return num_tokens / sum(r.output * reserve(r) for r in requests)


def mean_batch(requests: Sequence[Lengths], num_slots: int, reserve: Reserve) -> float:
    """Requests running at once, averaged over the steps in which some wait."""
    waiting, running, free, batch_sizes = list(reversed(requests)), [], num_slots, []
    while waiting:
        while waiting and reserve(waiting[-1]) <= free:
            request = waiting.pop()
            free -= reserve(request)
            running.append([request.output, reserve(request)])
        if waiting:
            batch_sizes.append(len(running))
        for entry in running:
            entry[0] -= 1
        free += sum(slots for left, slots in running if left == 0)
        running = [entry for entry in running if entry[0] > 0]
    return sum(batch_sizes) / len(batch_sizes)
