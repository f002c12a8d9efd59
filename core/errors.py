"""Every exception of the engine, and who is to blame for each.

    OctavoError
    ├── InvalidRequest            the caller's mistake in one request; `param` names the field
    │   ├── ContextLengthExceeded   prompt or output would pass the context or the KV pool
    │   └── NothingAllowed          its masks, biases and penalties leave no token that may come next
    ├── UnknownRequest            no such request id (also a KeyError)
    ├── DuplicateRequest          that id is in use
    ├── EngineDead                the engine has ended and takes nothing more
    ├── NumericalFault            numbers that are no numbers: one request fails
    ├── ModelLoadError            a model's files are missing, damaged or of a kind we do not run
    └── InvariantViolation        our own mistake; never caught below the engine

An expected "no" (out of KV memory) is not an error: it is the value None.
"""


class OctavoError(Exception):
    """Base of all errors raised by `core`."""


class InvalidRequest(OctavoError, ValueError):
    """A request that cannot be served as asked.

    Args:
        message: names the field, the value and the limit.
        param: the request field at fault, in the API's spelling, or None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt and output together, pass the context length or the KV pool."""


class NothingAllowed(InvalidRequest):
    """What a request asks for leaves no token that may come next. It shows on the way, and ends this request alone."""


class UnknownRequest(OctavoError, KeyError):
    """A request id that the object asked does not hold."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class DuplicateRequest(OctavoError, ValueError):
    """A request id that is already in use."""


class EngineDead(OctavoError, RuntimeError):
    """The engine has stopped after a fault; the process should end."""


class NumericalFault(OctavoError, ArithmeticError):
    """NaN or infinity where a number must be. The request at fault ends in error."""


class ModelLoadError(OctavoError):
    """A model cannot be loaded; the message names the file and what is wrong with it."""


class InvariantViolation(OctavoError, AssertionError):
    """An internal book does not balance: a bug in Octavo, never the caller's fault."""
