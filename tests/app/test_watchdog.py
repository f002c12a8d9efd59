"""How long the engine may be silent: next to nothing between computations, long for what is known to take long."""

import pytest

from app.watchdog import FIRST_STEP_S, MARGIN, patience_s
from core import Progress


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (Progress(5.0), 1.5),
        (Progress(5.0, 1, 0.001), 1.5),
        (Progress(5.0, 512, 3.0), 3.0 * MARGIN),
        (Progress(5.0, 512, None), FIRST_STEP_S),
    ],
)
def test_patience_goes_by_what_is_being_done(last: Progress, expected: float):
    assert expected == patience_s(last, 1.5)


def test_whoever_is_more_patient_may_say_so():
    assert 100 == patience_s(Progress(5.0, 512, None), 100)
