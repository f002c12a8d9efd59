"""Who goes next, who gives way."""

from core.scheduling.policy import FirstComeFirstServed
from tests.builders import request

OLD, MIDDLE, YOUNG = (request(name) for name in ("old", "middle", "young"))


def test_the_waiting_are_admitted_in_order_of_age():
    assert [OLD, MIDDLE, YOUNG] == FirstComeFirstServed().admission_order([OLD, MIDDLE, YOUNG])


def test_the_order_of_admission_is_not_the_queue_itself():
    """Whoever is admitted leaves the queue while the planner walks along the order."""
    waiting = [OLD, MIDDLE]
    order = FirstComeFirstServed().admission_order(waiting)
    waiting.remove(OLD)

    assert [OLD, MIDDLE] == order


def test_the_youngest_gives_way():
    assert YOUNG is FirstComeFirstServed().victim([OLD, MIDDLE, YOUNG])


def test_the_oldest_never_gives_way():
    assert FirstComeFirstServed().victim([OLD]) is None
