"""An answer's parts: text, and calls of tools; found in the model's text as it comes.

A reader takes a choice's text piece by piece and gives parts as soon as they are certain. What endpoints write - deltas
of a message, items, content blocks - they write from parts alone, so none of them knows in which form a model calls.
"""

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Something for the reader to see."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. `index` counts the calls of a choice from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of call `index`; the pieces joined are a JSON object."""

    index: int
    piece: str


Part = Text | CallStart | CallArguments


class PartReader(Protocol):
    """Reads one choice."""

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain now."""

    def finish(self) -> list[Part]:
        """What was held back, now that nothing more comes."""


class TextReader:
    """Where nothing can be called all is text."""

    def feed(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class ArgumentsReader:
    """Where the one function to be called is known before, the text is its arguments and nothing else."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_begun = False

    def feed(self, text: str) -> list[Part]:
        if not text:
            return []
        return [*self.finish(), CallArguments(0, text)]

    def finish(self) -> list[Part]:
        start: list[Part] = [] if self._is_begun else [CallStart(0, new_call_id(), self._name)]
        self._is_begun = True
        return start


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(slots=True)
class Call:
    """A whole call."""

    id: str
    name: str
    arguments: str = ""


def assembled(parts: Iterable[Part]) -> tuple[str, list[Call]]:
    """The text and the calls of a whole answer."""
    texts: list[str] = []
    calls: list[Call] = []
    for part in parts:
        match part:
            case Text(text):
                texts.append(text)
            case CallStart(_, id_, name):
                calls.append(Call(id_, name))
            case CallArguments(index, piece):
                calls[index].arguments += piece
    return "".join(texts), calls
