"""Exceptions say who is to blame, and can be caught by Python's own names."""

import pytest

from core import errors
from core.errors import (
    ContextLengthExceeded,
    DuplicateRequest,
    EngineDead,
    InvalidRequest,
    InvariantViolation,
    ModelLoadError,
    NothingAllowed,
    NumericalFault,
    OctavoError,
    UnknownRequest,
)


def test_every_exception_is_ours_and_stands_in_the_tree():
    classes = [c for c in vars(errors).values() if isinstance(c, type)]

    assert len(classes) == 10
    for each in classes:
        assert issubclass(each, OctavoError)
        assert each is OctavoError or each.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("ours", "pythons"),
    [
        (InvalidRequest, ValueError),
        (ContextLengthExceeded, InvalidRequest),
        (NothingAllowed, InvalidRequest),
        (UnknownRequest, KeyError),
        (DuplicateRequest, ValueError),
        (EngineDead, RuntimeError),
        (InvariantViolation, AssertionError),
        (NumericalFault, ArithmeticError),
        (ModelLoadError, Exception),
    ],
)
def test_they_are_also_pythons_own(ours: type[Exception], pythons: type[Exception]):
    assert issubclass(ours, pythons)


def test_an_invalid_request_names_its_field():
    assert ("max_tokens", "max_tokens is 0") == (
        InvalidRequest("max_tokens is 0", "max_tokens").param,
        str(InvalidRequest("max_tokens is 0", "max_tokens")),
    )
    assert InvalidRequest("something").param is None


def test_an_unknown_request_prints_its_message_not_its_repr():
    assert "request 'a' is unknown" == str(UnknownRequest("request 'a' is unknown"))
