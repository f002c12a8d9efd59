"""Who runs and who waits, each in order of age.

Age is (arrival, choice). A request of several samples is one request until its prompt is computed: its siblings are
unborn, in no queue, but they hold places as it does.
"""

import bisect

from core.errors import DuplicateRequest, InvariantViolation
from core.request import Request, RequestStatus


def family_size(request: Request) -> int:
    """The request and its unborn siblings."""
    return 1 + len(request.siblings)


def _age(request: Request) -> tuple[int, int]:
    return request.age


class RequestQueues:
    """All unfinished requests by id, and the two queues, oldest first."""

    def __init__(self) -> None:
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._by_id: dict[str, Request] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_running(self) -> int:
        """Places taken, unborn siblings' included."""
        return sum(map(family_size, self.running))

    @property
    def num_waiting(self) -> int:
        """Those that do not run; never counted one by one, for they may be many."""
        return len(self._by_id) - self.num_running

    def find(self, request_id: str) -> Request | None:
        return self._by_id.get(request_id)

    def all(self) -> list[Request]:
        return list(self._by_id.values())

    def add(self, request: Request) -> None:
        """Put a new request, with its unborn siblings, behind all others."""
        family = [request, *request.siblings]
        taken = [r.request_id for r in family if r.request_id in self._by_id]
        if taken or len({r.request_id for r in family}) < len(family):
            raise DuplicateRequest(f"request {(taken or [request.request_id])[0]!r} exists already")
        for member in family:
            member.age = (self._num_added, member.choice)
            self._by_id[member.request_id] = member
        self._num_added += 1
        self.set_waiting(request)

    def set_waiting(self, request: Request) -> None:
        self._move(request, self.waiting)

    def set_running(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        self._move(request, self.running)

    def _move(self, request: Request, queue: list[Request]) -> None:
        self._take_out(request)
        bisect.insort(queue, request, key=_age)

    def _take_out(self, request: Request) -> None:
        for queue in (self.running, self.waiting):
            if (place := self._place(request, queue)) is not None:
                del queue[place]

    def _place(self, request: Request, queue: list[Request]) -> int | None:
        place = bisect.bisect_left(queue, request.age, key=_age)
        return place if place < len(queue) and queue[place] is request else None

    def remove(self, request: Request) -> None:
        """Forget a request that has ended. Unborn siblings must have been seen to."""
        self._take_out(request)
        del self._by_id[request.request_id]

    def parent_of(self, request: Request) -> Request | None:
        """Whose unborn sibling this is, or None if it is born."""
        if any(self._place(request, queue) is not None for queue in (self.running, self.waiting)):
            return None
        return next((r for r in (*self.running, *self.waiting) if request in r.siblings), None)

    def check_invariants(self, max_batch: int) -> None:
        """Raise InvariantViolation unless everybody stands in one place, in order of age, and places suffice."""
        if self.num_running > max_batch:
            raise InvariantViolation(f"{self.num_running} places are taken, limit is {max_batch}")
        queued = [member.request_id for r in (*self.running, *self.waiting) for member in (r, *r.siblings)]
        if sorted(queued) != sorted(self._by_id):
            raise InvariantViolation("a request is in no queue, or in two")
        for queue in (self.running, self.waiting):
            ages = [request.age for request in queue]
            if ages != sorted(ages):
                raise InvariantViolation(f"a queue is out of order: {ages}")
