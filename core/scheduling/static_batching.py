"""What continuous batching is measured against: groups that start and end together."""

from collections.abc import Sequence


def static_batching_steps(output_lens: Sequence[int], max_batch: int) -> int:
    """Decode steps of static batching: groups of `max_batch` in the given order, each as long as its longest.

    Raises:
        ValueError: max_batch below 1 or a length below 0.
    """
    if max_batch < 1:
        raise ValueError(f"max_batch is {max_batch}, at least 1 is needed")
    if any(length < 0 for length in output_lens):
        raise ValueError(f"output length {min(output_lens)} is below 0")
    return sum(max(output_lens[i : i + max_batch]) for i in range(0, len(output_lens), max_batch))
