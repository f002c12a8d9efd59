"""The trial: a child that says what is wrong with a grammar, or dies of it."""

import gc
import signal
from pathlib import Path

import pytest

from core.decoding.grammar_trial import Trial

TABLE = ([bytes([byte]) for byte in range(256)] + [b"<end>"], [256], [256])


def test_a_child_answers_again_and_again() -> None:
    trial = Trial(TABLE)

    assert ["", "", True] == [
        trial.error_of('start: "a"'),
        trial.error_of("start: /a*/"),
        bool(trial.error_of("start")),
    ]
    assert not trial.is_over


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "exit code -9"),
        (signal.SIGSEGV, "refers too deeply"),
        (signal.SIGABRT, "1,073,741,824 bytes"),
        (signal.SIGPROF, "2 s"),
    ],
)
def test_a_dead_child_is_an_answer(number: signal.Signals, told: str) -> None:
    trial = Trial(TABLE)
    trial.process.send_signal(number)

    assert told in trial.error_of('start: "a"')
    assert trial.is_over


def test_a_child_ends_with_its_trial() -> None:
    trial = Trial(TABLE)
    assert "" == trial.error_of('start: "a"')
    child = Path(f"/proc/{trial.process.pid}")
    assert child.exists()
    del trial
    gc.collect()

    assert not child.exists()
