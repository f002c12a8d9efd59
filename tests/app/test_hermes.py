"""The Hermes form: what a model is told of its tools, and how calls are found in its text."""

import json
from itertools import accumulate, cycle, islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.hermes import TEXT, CallReader, grammar, in_words
from app.parts import CallArguments, CallStart, Part, Text, assembled
from core import ByteTokenizer, StructuredOutput, lark_json
from core.decoding.constraints import GrammarCompiler

NAMES = {"f", "g"}
F = '{"name": "f", "arguments": {"a": "x}", "b": [1, {}]}}'
F_ARGUMENTS = '{"a": "x}", "b": [1, {}]}'


def call(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


F1 = call('{"name": "f", "arguments": {"a": 1}}')


def read(*pieces: str, **options: Any) -> list[Part]:
    reader = CallReader(NAMES, **options)
    return [part for piece in pieces for part in reader.feed(piece)] + reader.finish()


def answer(*pieces: str, **options: Any) -> tuple[str, list[tuple[str, str]]]:
    """Text, and calls as (name, arguments)."""
    text, calls = assembled(read(*pieces, **options))
    return text, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("", "", []),
        ("just text", "just text", []),
        (" text with space ", " text with space ", []),
        (call(F), "", [("f", F_ARGUMENTS)]),
        (f"Let me see.\n{call(F)}", "Let me see.", [("f", F_ARGUMENTS)]),
        (f"{call(F)}\n{call(F)}\n", "", [("f", F_ARGUMENTS)] * 2),
        (f"a{call(F)} b", "ab", [("f", F_ARGUMENTS)]),
        # neither tags nor white space decide where a call ends, its JSON does
        (f"<tool_call>{F}</tool_call>", "", [("f", F_ARGUMENTS)]),
        (f"<tool_call>{F}", "", [("f", F_ARGUMENTS)]),
        (f"<tool_call>{F}</tool", "", [("f", F_ARGUMENTS)]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
            "",
            [("f", '{"a": "</tool_call>"}')],
        ),
        ('<tool_call>{"name":"f","arguments":{"a":"\\"}"}}</tool_call>', "", [("f", '{"a":"\\"}"}')]),
        # unusual, but clear
        ('<tool_call>{"arguments": {"a":1}, "name": "g"}</tool_call>', "", [("g", '{"a":1}')]),
        ('<tool_call>{"name": "g"}</tool_call>', "", [("g", "{}")]),
        ('<tool_call>{"name": "g", "arguments": null}</tool_call>', "", [("g", "{}")]),
        ('<tool_call>{"name": "g", "parameters": {"a": [1]}}</tool_call>', "", [("g", '{"a": [1]}')]),
        # what Python would write otherwise: as no JSON, or as nothing that has bytes
        (r'<tool_call>{"arguments": {"a": "\ud800"}, "name": "g"}</tool_call>', "", [("g", r'{"a": "\ud800"}')]),
        ('<tool_call>{"arguments": {"a": 1e999}, "name": "g"}</tool_call>', "", [("g", '{"a": 1e999}')]),
        # a tag too many
        (f"<tool_call>{F}</tool_call></tool_call> b", "b", [("f", F_ARGUMENTS)]),
        (f"<tool_call><tool_call>{F}</tool_call>\n</tool_call>", "<tool_call>", [("f", F_ARGUMENTS)]),
        ('<tool_call>{"name": "g", "arguments": {"a":1}, "id": 3}</tool_call>', "", [("g", '{"a":1}')]),
        ('<tool_call>{"name": "g", "arguments": {"a":1}, "x": {"y": 2}}</tool_call>', "", [("g", '{"a":1}')]),
    ],
)
def test_calls_are_found_and_what_is_around_them_stays_text(text: str, shown: str, calls: list[tuple[str, str]]):
    assert (shown, calls) == answer(text)
    assert (shown, calls) == answer(*text)


@pytest.mark.parametrize(
    "inside",
    [
        "not json",
        "",
        "[1]",
        '[{"name": "f", "arguments": {}}]',
        '{"name": "f"',
        '{"name": "f", "arguments": ',
        '{"name": "unknown", "arguments": {}}',
        '{"name": "f", "arguments": "text"}',
        '{"name": "f", "arguments": [1]}',
        '{"name": ["f"], "arguments": {}}',
        '{"arguments": {}}',
        '{name: "f", "arguments": {}}',
        '{"name": "f, "arguments": {}}',
        "{" * 50,
    ],
)
def test_what_is_no_call_stays_text_and_does_not_hide_the_next(inside: str):
    text = f"see \n<tool_call>\n{inside}\n</tool_call> so\n"
    follows = f"{text}{F1}"

    assert (text, []) == answer(text)
    assert (text, []) == answer(*text)
    assert (text.rstrip(), [("f", '{"a": 1}')]) == answer(follows)
    assert (text.rstrip(), [("f", '{"a": 1}')]) == answer(*follows)


@pytest.mark.parametrize("arguments", ["{bad}", '{"a": NaN}', '{"a": 1,}', '{"a": "\n"}'])
def test_arguments_that_do_not_parse_are_no_call_where_the_whole_is_known(arguments: str):
    text = call(f'{{"name": "f", "arguments": {arguments}}}')

    assert (text, []) == answer(text, announces_early=False)
    assert (text, []) == answer(text)


def test_arguments_pass_as_they_come_once_the_call_is_certain():
    pieces = ["Hi <to", "ol_call>", '{"name": ', '"f", "argu', 'ments": {"ci', 'ty": ', '"Rome"}', "}", "</tool_call>"]
    reader = CallReader(NAMES)
    fed = [reader.feed(piece) for piece in pieces]

    assert [Text("Hi")] == fed[0]
    assert [[], [], []] == fed[1:4]
    start, arguments = fed[4]
    assert isinstance(start, CallStart)
    assert (0, "f", CallArguments(0, '{"ci')) == (start.index, start.name, arguments)
    assert [[CallArguments(0, 'ty": ')], [CallArguments(0, '"Rome"}')], [], []] == fed[5:]
    assert [] == reader.finish()


@pytest.mark.parametrize("broken", ['{"a": </tool_call>', '{"a": 1</tool_call>'])
def test_announced_arguments_that_end_too_soon_end_the_call(broken: str):
    """They cannot be taken back; the reader of the next call must not suffer for it."""
    text = '<tool_call>{"name": "f", "arguments": ' + broken

    shown, calls = answer(*(text + call(F)))
    assert ("", [("f", broken.removesuffix("</tool_call>")), ("f", F_ARGUMENTS)]) == (shown, calls)


def test_a_call_that_the_limit_cut_is_shown_as_far_as_it_came_only_where_that_is_wished():
    text = '<tool_call>{"name": "f", "arguments": {"a": "unfin'

    assert ("", [("f", '{"a": "unfin')]) == answer(text)
    assert ("", [("f", '{"a": "unfin')]) == answer(*text)
    assert (text, []) == answer(text, announces_early=False)


def test_without_parallel_calls_the_first_ends_the_answer():
    text = f"a {call(F)} b {call(F)} c"

    assert ("a", [("f", F_ARGUMENTS)]) == answer(text, is_parallel=False)
    assert ("a", [("f", F_ARGUMENTS)]) == answer(*text, is_parallel=False)


def test_calls_are_counted_and_have_ids_of_their_own():
    starts = [part for part in read(*(call(F) + call(F))) if isinstance(part, CallStart)]

    assert [0, 1] == [start.index for start in starts]
    assert 2 == len({start.id for start in starts})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=3), JSON, max_size=3))
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=8)
BITS = ["<", "<tool", "<tool_call>", "</tool_call>", " ", "\n", "text", "{", "}", '"', '{"name": "f"', '"arguments": {']


def cut(text: str, sizes: list[int]) -> list[str]:
    ends = list(accumulate(islice(cycle(sizes), len(text))))
    return [text[end - size : end] for end, size in zip(ends, cycle(sizes), strict=False)]


@given(st.lists(CALLS | st.sampled_from(["so", "é <", "a b"]), max_size=6), st.sampled_from([None, 1]), SIZES)
def test_calls_come_out_as_written_in_whatever_pieces(written: list[Any], indent: int | None, sizes: list[int]):
    calls = [bit for bit in written if isinstance(bit, tuple)]
    texts = [
        bit if isinstance(bit, str) else call(json.dumps({"name": bit[0], "arguments": bit[1]}, indent=indent))
        for bit in written
    ]
    shown, found = answer(*cut("".join(texts), sizes))

    assert "".join(bit for bit in written if isinstance(bit, str)) == shown
    assert calls == [(name, json.loads(arguments)) for name, arguments in found]
    assert (shown, found) == answer("".join(texts))


@given(st.lists(st.sampled_from(BITS), max_size=12), SIZES)
def test_text_without_a_call_comes_out_to_the_letter_in_whatever_pieces(bits: list[str], sizes: list[int]):
    text = "".join(bits)

    assert (text, []) == answer(*cut(text, sizes))


G1 = call('{"name": "g", "arguments": {"b": [1, "x"]}}')
MORE_BITS = [
    *BITS,
    F1,
    G1,
    f"<tool_call>{F}",
    call('{"name": "f"}'),
    "</tool_call>",
    '{"name": "f", "arguments": ',
    "{}}",
]


@given(st.lists(st.sampled_from(MORE_BITS), max_size=8), SIZES, st.booleans())
def test_pieces_do_not_matter_to_who_takes_only_whole_calls(bits: list[str], sizes: list[int], is_parallel: bool):
    text, options = "".join(bits), {"announces_early": False, "is_parallel": is_parallel}

    assert answer(text, **options) == answer(*cut(text, sizes), **options)


SCHEMAS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    "g": {"type": "object"},
}
TRUE = call('{"name": "f", "arguments": {"a": true}}')


@pytest.mark.parametrize(
    ("options", "whole", "no_way"),
    [
        (
            {},
            [F1, G1, f"{F1}\n{G1}"],
            ["", "x", f"{F1}{G1}", f"{F1}\nx", F1.replace("1", "true"), F1.replace("f", "h")],
        ),
        ({"is_parallel": False}, [F1], ["", f"{F1}\n"]),
        ({"otherwise": TEXT}, ["", "x", "a < b", F1, f"x {F1} y\n{G1}z"], ["x<tool_call>y", TRUE]),
        ({"otherwise": lark_json({"type": "integer"})}, ["7", F1], ["x", f"{F1}7", f"7{F1}", TRUE]),
        ({"is_parallel": False, "otherwise": TEXT}, ["", "x", f"x {F1}"], ["<tool_call>y", f"{F1} y"]),
    ],
)
def test_the_grammar_is_the_form(options: dict[str, Any], whole: list[str], no_way: list[str]):
    lark = grammar(SCHEMAS, **{"is_parallel": True, **options})
    compiled = GrammarCompiler(ByteTokenizer()).compile(StructuredOutput("grammar", lark))

    def takes(text: str) -> bool:
        """Whether the output may be this text, and end there."""
        token_ids = list(text.encode())
        constraint = compiled.constraint()
        if constraint.num_allowed([], token_ids) < len(token_ids):
            return False
        end = ByteTokenizer.END_TOKEN_ID
        return bool(constraint.allowed(token_ids)[end // 8] >> end % 8 & 1)

    assert whole == [text for text in whole if takes(text)]
    assert [] == [text for text in no_way if takes(text)]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_tools_are_told_in_the_system_message():
    (first, second) = in_words([user("Hi")], [TOOL])

    assert ("system", user("Hi")) == (first["role"], second)
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in first["content"]
    (joined, _) = in_words([{"role": "system", "content": "Be kind."}, user("Hi")], [TOOL])
    assert f"Be kind.\n\n{first['content']}" == joined["content"]


def test_calls_and_results_become_text():
    made = {"role": "assistant", "content": "Well.", "tool_calls": [{"function": {"name": "f", "arguments": {}}}] * 2}
    results = [{"role": "tool", "content": content, "tool_call_id": "x"} for content in ("1", "2")]
    (_, calls, result, last) = in_words([user("Hi"), made, *results, user("So?")], [])

    one = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert {"role": "assistant", "content": f"Well.\n{one}\n{one}"} == calls
    assert user("<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>") == result
    assert user("So?") == last


def test_a_conversation_without_tools_is_left_as_it_is():
    messages = [{"role": "system", "content": "Be kind."}, user("Hi")]

    assert messages == in_words(messages, [])
