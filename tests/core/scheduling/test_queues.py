"""Who runs and who waits, in order of age; a family is one request until it is born."""

import pytest

from core.errors import DuplicateRequest, InvariantViolation
from core.request import Request, RequestStatus
from core.scheduling.queues import RequestQueues, family_size
from tests.builders import family, request


def queues_of(*requests: Request) -> RequestQueues:
    queues = RequestQueues()
    for each in requests:
        queues.add(each)
    return queues


def test_age_is_arrival_then_choice():
    first, second = family("a", 3), request("b")
    queues_of(first, second)

    assert [(0, 0), (0, 1), (0, 2), (1, 0)] == [r.age for r in (first, *first.siblings, second)]


def test_new_requests_wait_behind_all_others():
    a, b = family("a", 2), request("b")
    queues = queues_of(a, b)

    assert ([a, b], []) == (queues.waiting, queues.running)


def test_unborn_siblings_are_known_and_hold_places_but_stand_in_no_queue():
    a, b = family("a", 3), request("b")
    queues = queues_of(a, b)

    assert (4, 4, 0) == (len(queues), queues.num_waiting, queues.num_running)
    queues.set_running(a)
    assert (1, 3) == (queues.num_waiting, queues.num_running)
    assert a.siblings[1] is queues.find("a.2")
    assert [a, *a.siblings, b] == queues.all()
    assert (3, 1) == (family_size(a), family_size(b))


def test_whoever_moves_takes_the_place_that_its_age_says():
    a, b, c = (request(name) for name in "abc")
    queues = queues_of(a, b, c)
    for each in (c, a, b):
        queues.set_running(each)
    assert ([a, b, c], []) == (queues.running, queues.waiting)
    assert {RequestStatus.RUNNING} == {each.status for each in (a, b, c)}
    for each in (c, b):
        queues.set_waiting(each)

    assert ([a], [b, c]) == (queues.running, queues.waiting)


def test_a_born_sibling_runs_behind_its_elders_and_before_all_that_came_later():
    a, b = family("a", 2), request("b")
    queues = queues_of(a, b)
    queues.set_running(b)
    queues.set_running(a)
    (sibling,), a.siblings = a.siblings, []
    queues.set_running(sibling)

    assert [a, sibling, b] == queues.running


@pytest.mark.parametrize("taken", [["a"], ["a.1"], ["x", "a"]])
def test_an_id_in_use_is_refused_wherever_it_stands_in_the_family(taken: list[str]):
    queues = queues_of(*(request(name) for name in taken))
    before = queues.all()

    with pytest.raises(DuplicateRequest, match=r"request 'a(\.1)?' exists already"):
        queues.add(family("a", 2))
    assert before == queues.all()


def test_a_family_with_one_id_twice_is_refused():
    with pytest.raises(DuplicateRequest, match="request 'a' exists already"):
        RequestQueues().add(request("a", siblings=[request("a")]))


def test_a_sibling_has_a_parent_until_it_is_born():
    a = family("a", 2)
    queues, sibling = queues_of(a), a.siblings[0]
    assert a is queues.parent_of(sibling)
    queues.set_running(a)
    assert a is queues.parent_of(sibling)
    a.siblings = []

    assert queues.parent_of(sibling) is None
    assert queues.parent_of(a) is None


def test_whoever_is_removed_is_unknown_and_its_id_free_again():
    a, b = request("a"), request("b")
    queues = queues_of(a, b)
    queues.set_running(a)
    queues.remove(a)
    queues.remove(b)

    assert (0, [], [], None) == (len(queues), queues.running, queues.waiting, queues.find("a"))
    queues.add(request("a"))


def test_books_that_do_not_balance_are_noticed():
    a, b = family("a", 2), request("b")
    queues = queues_of(a, b)
    queues.check_invariants(max_batch=2)
    for each in (b, a):
        queues.set_running(each)
    queues.check_invariants(max_batch=3)
    with pytest.raises(InvariantViolation, match="3 places are taken, limit is 2"):
        queues.check_invariants(max_batch=2)
    queues.running.reverse()
    with pytest.raises(InvariantViolation, match="a queue is out of order"):
        queues.check_invariants(max_batch=3)
    queues.running.pop()
    with pytest.raises(InvariantViolation, match="in no queue, or in two"):
        queues.check_invariants(max_batch=3)
