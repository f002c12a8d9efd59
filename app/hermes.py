"""The Hermes form of tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in the model's text.

All of it: the words that tell a model of its tools where its template has none, the grammar that holds it to the form,
and the reader that finds calls in what it writes. The form is NousResearch's (Hermes 2 Pro, 2024); Qwen's models were
trained on it too.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, NoReturn

from app.parts import CallArguments, CallStart, Part, Text, new_call_id
from core import lark_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALLS = 32  # of an answer that has to be calls: it may end after each, but a small model may not see when to
TEXT = r"/(.|\n)*/"  # any
_INTRODUCTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_MEMBER = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')


def in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, takes_system: bool = True
) -> list[dict[str, Any]]:
    """A conversation for a template that knows no tools: what it would leave out stands in the messages' text.

    The tools go into the system message (a new one if there is none, or the user's first where the template takes no
    system's), calls behind their message's text. Results become messages of the user, neighbours one message, since
    such templates know no other roles.
    """
    worded: list[dict[str, Any]] = []
    for are_results, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if are_results:
            worded.append({"role": "user", "content": "\n".join(map(_result, group))})
        else:
            worded += map(_with_calls, group)
    return _introduced(worded, tools, takes_system=takes_system) if tools else worded


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON with characters as they are, as models were trained on it; half of a surrogate pair stays an escape.

    As a filter of chat templates it takes what transformers' takes.
    """
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.encode("utf-8", "backslashreplace").decode()


def _introduced(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, takes_system: bool
) -> list[dict[str, Any]]:
    text = _INTRODUCTION.format(tools="\n".join(map(to_json, tools)))
    if messages and messages[0]["role"] in ("system", "developer"):
        first, *rest = messages
        return [{**first, "content": f"{first['content']}\n\n{text}".lstrip("\n")}, *rest]
    if not takes_system and messages and messages[0]["role"] == "user":
        first, *rest = messages
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    texts = [f"{OPEN}\n{to_json(call)}\n{CLOSE}" for call in calls]
    return {**plain, "content": "\n".join(filter(None, [message["content"], *texts]))}


def _result(message: Mapping[str, Any]) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def grammar(schemas: Mapping[str, Mapping[str, Any]], *, is_parallel: bool, otherwise: str | None = None) -> str:
    """In llguidance's Lark: calls of these functions, with arguments of these schemas.

    `otherwise` is a term for what may be instead of calls. Free text (`TEXT`) may be around them too: then the tag
    decides, and once it is written there is no way but through a call.
    """
    if otherwise == TEXT:
        start = f"(open call)* {TEXT}" if is_parallel else f"open call | {TEXT}"
        rules = [f"start: {start}", f"open[lazy]: {TEXT} {json.dumps(OPEN)}"]
    else:
        more = f' ("\\n" open call){{0,{MAX_CALLS - 1}}}' if is_parallel else ""
        rules = [f"start: open call{more}{f' | {otherwise}' if otherwise else ''}", f"open: {json.dumps(OPEN)}"]
    choices = " | ".join(f"call_{i}" for i in range(len(schemas)))
    rules.append(f'call: "\\n" ({choices}) "\\n{CLOSE}"')
    for i, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        rules.append(f'call_{i}: {head} arguments_{i} "}}"\narguments_{i}: {lark_json(schema)}')
    return "\n".join(rules)


class CallReader:
    """Finds calls in text as it comes. White space around calls is dropped; what is no call stays text.

    A call whose end is there is judged whole: it must parse, and name a function that there is. One that is still being
    written is announced once its name and the beginning of its arguments are there, and its arguments pass piece by
    piece; should they then turn out wrong, it cannot be taken back.

    Args:
        names: of the functions that there are.
        is_parallel: take further calls; else the first ends the answer, and what comes behind it is dropped.
        announces_early: see above; False to take only calls that are there as a whole.
    """

    def __init__(self, names: Collection[str], *, is_parallel: bool = True, announces_early: bool = True) -> None:
        self._names = names
        self._is_parallel = is_parallel
        self._announces_early = announces_early
        self._buffer = ""  # text that is not certain yet; within a call, all of it behind the tag
        self._call: _OpenCall | None = None
        self._gap = ""  # white space before the tag, in case it is none
        self._num_calls = 0
        self._is_behind_call = False  # between a call's end and the next text

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while (more := self._next()) is not None:
            parts += more
        return parts

    def finish(self) -> list[Part]:
        rest = self._buffer
        self._buffer = ""
        if self._call is not None:
            return [] if self._call.is_announced else [Text(self._gap + OPEN + rest)]
        if self._is_behind_call:
            rest = "" if CLOSE.startswith(rest.strip()) else rest.lstrip()
        return [Text(rest)] if rest else []

    def _next(self) -> list[Part] | None:
        """The parts of one step through the buffer; None when it takes more text to go on."""
        if self._call is not None:
            return self._step_in_call(self._call)
        if self._is_behind_call:
            if not self._is_parallel:
                self._buffer = ""
                return None
            while (rest := self._buffer.lstrip().removeprefix(CLOSE)) != self._buffer:
                self._buffer = rest
            if CLOSE.startswith(self._buffer):  # the empty text too
                return None
        return self._step_in_text()

    def _step_in_text(self) -> list[Part] | None:
        before, tag, behind = self._buffer.partition(OPEN)
        if tag:
            self._call, self._buffer, shown = _OpenCall(), behind, before.rstrip()
            self._gap = before[len(shown) :]
        else:
            shown = _certain(self._buffer)
            self._buffer = self._buffer[len(shown) :]
        if shown:
            self._is_behind_call = False
        return [Text(shown)] if shown else [] if tag else None

    def _step_in_call(self, call: "_OpenCall") -> list[Part] | None:
        call.scan(self._buffer)
        if call.is_announced:
            return self._go_on(call)
        if call.is_broken:
            return self._give_up()
        if call.end is None:
            return self._announce(call)
        decoded = _decode(self._buffer[: call.end], self._names)
        if decoded is None:
            return self._give_up()
        index = self._end_call(call.end)
        return [CallStart(index, new_call_id(), decoded[0]), CallArguments(index, decoded[1])]

    def _announce(self, call: "_OpenCall") -> list[Part] | None:
        match = _HEADER.match(self._buffer) if self._announces_early else None
        if match is None or match[1] not in self._names:
            return None
        call.is_announced, call.num_sent = True, match.end()
        return [CallStart(self._num_calls, new_call_id(), match[1])]

    def _go_on(self, call: "_OpenCall") -> list[Part] | None:
        until = call.arguments_end or call.position
        piece, call.num_sent = self._buffer[call.num_sent : until], max(call.num_sent, until)
        parts: list[Part] = [CallArguments(self._num_calls, piece)] if piece else []
        if call.end is None and not call.is_broken:
            return parts or None
        self._end_call(call.position)
        return parts

    def _end_call(self, end: int) -> int:
        self._call, self._buffer, self._is_behind_call = None, self._buffer[end:], True
        self._num_calls += 1
        return self._num_calls - 1

    def _give_up(self) -> list[Part]:
        """It was no call: the tag is text, and what follows is looked through again."""
        self._call, self._is_behind_call = None, False
        return [Text(self._gap + OPEN)]


class _OpenCall:
    """A walk over a call's JSON as it grows, to see where its arguments and itself end.

    Attributes:
        position: how far the walk has come.
        arguments_end: behind the first value at depth 1 that is an object: of a call in the usual order, its arguments.
        end: behind the whole object.
        is_broken: no JSON object goes on like this.
    """

    def __init__(self) -> None:
        self.position = 0
        self.arguments_end: int | None = None
        self.end: int | None = None
        self.is_broken = False
        self.is_announced = False
        self.num_sent = 0
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def scan(self, text: str) -> None:
        while self.position < len(text) and self.end is None and not self.is_broken:
            if self._is_in_string:
                self._scan_string(text[self.position])
            else:
                self._scan_structure(text[self.position])
            self.position += not self.is_broken

    def _scan_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False
        elif char < " " and not self.is_announced:  # an open quote would swallow all that follows; a line ends it
            self.is_broken = True

    def _scan_structure(self, char: str) -> None:
        if char in "{[":
            self._depth += 1
        elif char == '"' and self._depth:
            self._is_in_string = True
        elif char in "}]" and self._depth:
            self._depth -= 1
            if self._depth == 1 and self.arguments_end is None:
                self.arguments_end = self.position + 1
            elif self._depth == 0:
                self.end = self.position + 1
        elif char == "<" or (self._depth == 0 and not char.isspace()):
            self.is_broken = True


def _certain(text: str) -> str:
    """What of a text can be shown: not its end, where that may be white space before a call or the start of a tag."""
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if text.endswith(OPEN[:length]):
            return text[:-length].rstrip()
    return text.rstrip()


def _decode(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments of a whole call, the latter to the letter; None if it is none."""
    try:
        members = _members(text)
    except (ValueError, RecursionError):
        return None
    name, _ = members.get("name", (None, ""))
    arguments, written = members.get("arguments") or members.get("parameters") or (None, "")
    if not isinstance(name, str) or name not in names:
        return None
    if arguments is None:  # so models call functions that have no parameters
        return name, "{}"
    return (name, written) if isinstance(arguments, dict) else None


def _members(text: str) -> dict[str, tuple[Any, str]]:
    """An object's values, each with the text that it was read from; of one name the first. Raises what json raises."""
    if not isinstance(json.loads(text, parse_constant=_refuse), dict):
        return {}
    decoder, position = json.JSONDecoder(), text.index("{") + 1
    members: dict[str, tuple[Any, str]] = {}
    while match := _MEMBER.match(text, position):
        value, position = decoder.raw_decode(text, match.end())
        members.setdefault(json.loads(match[1]), (value, text[match.end() : position]))
    return members


def _refuse(constant: str) -> NoReturn:
    """NaN and infinities, which Python would read, and others not."""
    raise ValueError(constant)
