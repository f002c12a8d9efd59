"""Who goes next, who gives way."""

from core.scheduling.policy import FirstComeFirstServed
from tests.builders import request

OLD, MIDDLE, YOUNG = (request(name) for name in ("old", "middle", "young"))


def test_the_oldest_is_admitted_first():
    assert OLD is FirstComeFirstServed().next_to_admit([OLD, MIDDLE, YOUNG])


def test_the_youngest_gives_way():
    assert YOUNG is FirstComeFirstServed().victim([OLD, MIDDLE, YOUNG])


def test_the_oldest_never_gives_way():
    assert FirstComeFirstServed().victim([OLD]) is None
