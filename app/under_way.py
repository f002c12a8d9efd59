"""The runs under way, by their owners: found by their ids, and no more of one owner's than its share.

An owner is the name of an API key, so that two keys of one name share; a server without keys knows one owner, None.
What is in flight is asked of the runs themselves: whoever leaves, whatever the way out, has given its place back.
"""

from collections import defaultdict
from typing import TYPE_CHECKING

from app.shares import Owner, Shares

if TYPE_CHECKING:
    from app.run import Run


class UnderWay:
    """All runs from their start to their end."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._runs: defaultdict[Owner, set[Run]] = defaultdict(set)

    def add(self, run: "Run") -> None:
        self._runs[run.owner].add(run)
        self._shares.has_begun(run.owner)

    def discard(self, run: "Run") -> None:
        self._runs[run.owner].discard(run)
        self._shares.has_ended(run.owner, num_tokens=run.usage().total_tokens)

    def found(self, ids: set[str] | None, *, owner: Owner) -> list["Run"]:
        """Those with one of these ids, or all (None), of one owner or of anybody (None)."""
        of_owners = self._runs.values() if owner is None else [self._runs[owner]]
        return [run for runs in of_owners for run in runs if ids is None or run.ids & ids]

    def refuse_beyond_share(self, owner: Owner, num_new: int = 1) -> None:
        """Raise what an owner is told that may not have so many sequences more."""
        is_limited = self._shares.places is not None  # or a thousand runs would be asked for nothing
        num_in_flight = sum(run.num_in_flight for run in self._runs[owner]) if is_limited else 0
        self._shares.refuse_beyond(owner, num_in_flight=num_in_flight, num_new=num_new)
