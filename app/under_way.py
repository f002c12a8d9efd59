"""The runs under way, by their owners: found by their ids, and no more of one owner's than its share.

An owner is the name of an API key, so that two keys of one name share; a server without keys knows one owner, None.
What is in flight is asked of the runs themselves: whoever leaves, whatever the way out, has given its place back.
"""

from collections import defaultdict
from typing import TYPE_CHECKING

from app.errors import rate_limited
from core import InvalidRequest

if TYPE_CHECKING:
    from app.run import Run


class UnderWay:
    """All runs from their start to their end. `max_per_owner`: most sequences of one owner's waiting or running."""

    def __init__(self, max_per_owner: int | None = None) -> None:
        self.num_rejections = 0
        self._max_per_owner = max_per_owner
        self._runs: defaultdict[str | None, set[Run]] = defaultdict(set)

    def add(self, run: "Run") -> None:
        self._runs[run.owner].add(run)

    def discard(self, run: "Run") -> None:
        self._runs[run.owner].discard(run)

    def found(self, ids: set[str] | None, *, owner: str | None) -> list["Run"]:
        """Those with one of these ids, or all (None), of one owner or of anybody (None)."""
        of_owners = self._runs.values() if owner is None else [self._runs[owner]]
        return [run for runs in of_owners for run in runs if ids is None or run.ids & ids]

    def refuse_beyond_share(self, owner: str | None, num_new: int = 1) -> None:
        """Raise what an owner is told that may not have so many sequences more: 429, or 400 if it never may."""
        limit = self._max_per_owner
        if limit is None:
            return
        if num_new > limit:
            raise InvalidRequest(f"the prompts times n are {num_new} sequences, limit for a key is {limit}")
        num_in_flight = sum(run.num_in_flight for run in self._runs[owner])
        if num_in_flight + num_new > limit:
            self.num_rejections += 1
            whose = "this server" if owner is None else f"key '{owner}'"
            what = f"{num_in_flight} requests are in flight, limit is {limit}"
            raise rate_limited(f"Rate limit reached for {whose}: {what}", kind="requests")
