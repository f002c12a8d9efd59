"""What a preempted request loses: its blocks' contents, or only the time to copy them away and back.

`recompute` frees the blocks and the request catches up from its tokens; `swap` copies full blocks to the second tier
first, so that resuming is a prefix hit there; `auto` takes whichever measured steps and copies say is cheaper.
Costs: T_recompute = slope * tokens, T_swap = 2 * blocks * time per block (out and in). Kwon et al. 2023, section 4.5.
"""

from collections.abc import Callable

Swaps = Callable[[int, int], bool]  # (tokens with KV, full blocks) -> copy them out?
_MEMORY = 0.98  # how much of the past each new measurement leaves


class CostModel:
    """Fits step time = base + slope * tokens, and time per copied block, from what is measured while serving."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._copy_s = self._copied = 0.0

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens in so many seconds, copies not counted."""
        self._n = self._n * _MEMORY + 1
        self._x = self._x * _MEMORY + num_tokens
        self._y = self._y * _MEMORY + seconds
        self._xx = self._xx * _MEMORY + num_tokens**2
        self._xy = self._xy * _MEMORY + num_tokens * seconds

    def observe_copies(self, num_blocks: int, seconds: float) -> None:
        """So many blocks were copied out or in."""
        self._copied = self._copied * _MEMORY + num_blocks
        self._copy_s = self._copy_s * _MEMORY + seconds

    @property
    def seconds_per_token(self) -> float | None:
        """The slope; the mean if steps have all been of one size; None before any."""
        if self._n == 0:
            return None
        spread = self._n * self._xx - self._x**2
        slope = (self._n * self._xy - self._x * self._y) / spread if spread > 1e-9 * self._xx else 0.0
        return slope if slope > 0 else self._y / self._x

    @property
    def seconds_per_block(self) -> float | None:
        return self._copy_s / self._copied if self._copied else None

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """True if copying the blocks out and in is cheaper than computing the tokens again."""
        per_token, per_block = self.seconds_per_token, self.seconds_per_block
        if per_block is None:
            return True  # copy once, to know
        return per_token is None or 2 * num_blocks * per_block < num_tokens * per_token


def always_swap(num_tokens: int, num_blocks: int) -> bool:
    """The answer of mode `swap`."""
    return True
