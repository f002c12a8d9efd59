"""How long steps take, by their size: what may be expected of the next, for who must tell a long one from a stall.

A clock alone cannot: a step of a large model over a long prompt takes seconds and is well, and one that decodes for a
small model takes milliseconds. Sizes are counted in powers of two, since a step's time grows no faster than its tokens.
"""

from dataclasses import dataclass

_MEMORY = 0.98  # of the longest step of its size, what each further one leaves: one hiccup is not remembered for ever


@dataclass(frozen=True, slots=True)
class Progress:
    """The last sign of life: a step began or ended to compute `num_tokens` (0: nothing is being computed).

    `longest_s`: the longest that steps of about that size have taken lately; None: there was no step yet.
    """

    at_s: float
    num_tokens: int = 0
    longest_s: float | None = 0.0


class StepPace:
    """Remembers the longest steps."""

    def __init__(self) -> None:
        self._longest_s: dict[int, float] = {}  # by the bits that the number of tokens has

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens has taken so long."""
        size = num_tokens.bit_length()
        self._longest_s[size] = max(seconds, self._longest_s.get(size, 0.0) * _MEMORY)

    def longest_s(self, num_tokens: int) -> float | None:
        """The longest step of about so many tokens. Where there was none: of the next larger, or in proportion."""
        size = num_tokens.bit_length()
        larger = [known for known in self._longest_s if known >= size]
        if larger:
            return self._longest_s[min(larger)]
        if not self._longest_s:
            return None
        largest = max(self._longest_s)
        return self._longest_s[largest] * 2.0 ** (size - largest)
