"""What one owner may have: places at a time, requests a minute, tokens a minute. Beyond it 429, for it alone.

What a minute allows flows in evenly, and as much as a minute's can be saved up. Requests are paid for when they begin.
Tokens, prompt and output, are paid for when they have been had, since nobody knows before how many there will be: an
owner that took more than it had waits until the debt is gone.
"""

import math
import time
from collections.abc import Callable

from app.errors import ApiError, rate_limited
from core import InvalidRequest

Owner = str | None


class Allowance:
    """So much a minute for each owner."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._saved: dict[Owner, tuple[float, float]] = {}  # how much, and when that was

    def wait_s(self, owner: Owner) -> float:
        """Seconds until there is one for it to take; 0: there is."""
        return max(0.0, 1.0 - self._left(owner)) * 60 / self.per_minute

    def take(self, owner: Owner, amount: int) -> None:
        """Also more than there is."""
        self._saved[owner] = self._left(owner) - amount, self._clock()

    def _left(self, owner: Owner) -> float:
        saved, at_s = self._saved.get(owner, (self.per_minute, 0.0))
        return min(self.per_minute, saved + (self._clock() - at_s) * self.per_minute / 60)


class Shares:
    """The same share for each owner; None is no limit. Refusals are counted by the name of the limit."""

    def __init__(
        self,
        *,
        places: int | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.places = places
        self._requests = None if requests_per_minute is None else Allowance(requests_per_minute, clock)
        self._tokens = None if tokens_per_minute is None else Allowance(tokens_per_minute, clock)
        self.num_refused = {"max_num_seqs_per_key": 0, "requests_per_minute_per_key": 0, "tokens_per_minute_per_key": 0}

    def refuse_beyond(self, owner: Owner, *, num_in_flight: int, num_new: int) -> None:
        """Raise what an owner is told that may not have so many sequences more: 429, or 400 if it never may."""
        limit = self.places
        if limit is not None and num_new > limit:
            raise InvalidRequest(f"the prompts times n are {num_new} sequences, limit for a key is {limit}")
        if limit is not None and num_in_flight + num_new > limit:
            what = f"requests in flight are {num_in_flight}, limit is {limit}"
            raise self._refusal(owner, "max_num_seqs_per_key", what, "requests")
        for kind, allowance in (("requests", self._requests), ("tokens", self._tokens)):
            if allowance is not None and (wait_s := math.ceil(allowance.wait_s(owner))):
                what = f"limit is {allowance.per_minute} {kind} per minute, try again in {wait_s} s"
                raise self._refusal(owner, f"{kind}_per_minute_per_key", what, kind, retry_after_s=wait_s)

    def has_begun(self, owner: Owner) -> None:
        if self._requests is not None:
            self._requests.take(owner, 1)

    def has_ended(self, owner: Owner, *, num_tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(owner, num_tokens)

    def _refusal(self, owner: Owner, limit: str, what: str, kind: str, *, retry_after_s: int = 1) -> ApiError:
        self.num_refused[limit] += 1
        whose = "this server" if owner is None else f"key '{owner}'"
        return rate_limited(f"Rate limit reached for {whose}: {what}", kind=kind, retry_after_s=retry_after_s)
