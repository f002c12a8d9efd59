"""Constraints: masks are what the grammar says of bytes, for any tokenizer, whatever was asked before."""

import json
import pickle
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.decoding.constraints import Constraint, GrammarCompiler
from core.errors import InvalidRequest
from core.sampling_params import StructuredOutput
from core.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from tests.builders import END
from tools.make_tiny_gguf import TinyModel, write_gguf, write_safetensors_dir

BYTES = GrammarCompiler(ByteTokenizer())
CHOICES = ("hello", "hello world", "help", "né😀", "")


def constraint(kind: str, value: str | tuple[str, ...] = "", compiler: GrammarCompiler = BYTES) -> Constraint:
    return compiler.compile(StructuredOutput(kind, value)).constraint()  # type: ignore[arg-type]


def ids_of(mask: bytes) -> set[int]:
    return {8 * i + bit for i, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


def after(said: Constraint, text: str) -> set[int]:
    """Allowed tokens behind a text that is read as bytes."""
    return ids_of(said.allowed(list(text.encode())))


class TestWhatIsAllowed:
    @pytest.mark.parametrize(
        ("kind", "value", "text", "expected"),
        [
            ("choice", ("yes", "no"), "", {*b"yn"}),
            ("choice", ("yes", "no"), "n", {*b"o"}),
            ("choice", ("yes", "no"), "no", {END}),
            ("choice", ("yes", "yesterday"), "yes", {*b"t", END}),
            ("choice", ('\x7f\x1f\u2028"\\',), "\x7f", {0x1F}),
            ("regex", "a+b", "a", {*b"ab"}),
            ("regex", "a\\\\", "a", {*b"\\"}),
            ("regex", "a+b", "aab", {END}),
            ("regex", "^a/b\\.$", "a", {*b"/"}),
            ("regex", "é", "", {0xC3}),
            ("grammar", 'start: "(" start ")" | "x"', "((x)", {*b")"}),
            ("json_object", "", "", {*b"{"}),
            ("json_object", "", "{", {*b'"}'}),
            ("json_object", "", '{"a"', {*b":"}),
            ("json_object", "", '{"a":', {*b' "-0123456789[{tfn'}),
            ("json_schema", '{"type": "boolean"}', "t", {*b"r"}),
            ("json_schema", "true", "fals", {*b"e"}),
        ],
    )
    def test_next_bytes(self, kind: str, value: str | tuple[str, ...], text: str, expected: set[int]) -> None:
        assert expected == after(constraint(kind, value), text)

    def test_no_blank_may_follow_a_blank(self) -> None:
        """A model that likes blanks cannot write them for ever."""
        said = constraint("json_object")
        assert ord(" ") in after(said, '{"a":')
        assert not set(b" \n\t\r") & after(said, '{"a": ')
        assert not set(b" \n\t\r") & after(said, '{"a": 1')
        assert ord(" ") in after(said, '{"a": 1,')

    def test_an_end_may_come_only_where_the_text_may_end(self) -> None:
        said = constraint("regex", "(ab)*")
        assert [True, False, True] == [END in after(said, text) for text in ("", "a", "ab")]

    def test_behind_an_end_there_are_ends_alone(self) -> None:
        said = constraint("regex", "(ab)*")
        assert {END} == ids_of(said.allowed([END])) == ids_of(said.allowed([END, END]))

    def test_behind_what_is_forbidden_stands_what_is_allowed_in_its_place(self) -> None:
        said = constraint("regex", "ab*c")
        assert {*b"bc"} == after(said, "a?") == after(said, "abb?c")


@pytest.mark.parametrize(
    ("kind", "value", "complete", "unfinished"),
    [
        ("choice", ("yes", "yesterday"), ["yesterday"], ["", "y", "yes"]),
        ("json_object", "", ['{"a": 1}', "{}"], ["", "{", '{"a"']),
        ("json_schema", '{"type": "integer"}', [], ["-1", "12"]),
        ("json_schema", '{"type": "integer", "minimum": 0, "maximum": 25}', ["25", "9"], ["1", "2"]),
        ("regex", "a{2}", ["aa"], ["a"]),
    ],
)
def test_an_output_is_complete_when_nothing_can_follow(
    kind: str, value: str | tuple[str, ...], complete: list[str], unfinished: list[str]
) -> None:
    said = constraint(kind, value)
    assert [(t, True) for t in complete] == [(t, said.is_complete(list(t.encode()))) for t in complete]
    assert [(t, False) for t in unfinished] == [(t, said.is_complete(list(t.encode()))) for t in unfinished]


RECURSIVE = json.dumps({"type": "array", "items": {"$ref": "#"}, "maxItems": 2})


@given(
    grammar=st.sampled_from([("regex", "(ab|a)*c?"), ("json_schema", RECURSIVE), ("choice", CHOICES)]),
    questions=st.lists(st.lists(st.sampled_from([*b"abc[],hel ", END]), max_size=8), max_size=12),
)
def test_the_answer_is_a_function_of_the_ids(grammar: tuple[str, str], questions: list[list[int]]) -> None:
    """Whatever was asked before, drafts that were refused and branches not taken included."""
    said = constraint(*grammar)
    for ids in questions:
        assert constraint(*grammar).allowed(ids) == said.allowed(ids)
        assert constraint(*grammar).is_complete(ids) == said.is_complete(ids)
        assert constraint(*grammar).num_allowed(ids[:2], ids[2:]) == said.num_allowed(ids[:2], ids[2:])


def test_siblings_do_not_hear_of_each_other() -> None:
    grammar = BYTES.compile(StructuredOutput("regex", "a*b*c"))
    one, other = grammar.constraint(), grammar.constraint()

    assert {*b"bc"} == after(one, "ab")
    assert {*b"abc"} == after(other, "a")
    assert {*b"c"} >= after(one, "abc") - {END}


def test_a_draft_counts_up_to_what_is_forbidden() -> None:
    said = constraint("regex", "ab*c")
    assert [3, 1, 0, 0] == [said.num_allowed([97], list(draft)) for draft in (b"bbcc", b"ca", b"ab", b"")]
    assert {*b"bc"} == after(said, "a")


@pytest.fixture(scope="module", params=["directory", "gguf"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "directory":
        return load_tokenizer(write_safetensors_dir(TinyModel(), folder))
    return load_tokenizer(write_gguf(TinyModel(), folder / "model.gguf"))


def allowed_by_bytes(tokenizer: Tokenizer, texts: Sequence[str], output: Sequence[int]) -> set[int]:
    """By the definition: tokens with which some text goes on, and ends where one is whole."""
    said = b"".join(map(tokenizer.token_bytes, output))
    pieces = [(i, data) for i in range(tokenizer.vocab_size) if (data := tokenizer.token_bytes(i))]
    allowed = {i for i, data in pieces if any(text.encode().startswith(said + data) for text in texts)}
    return allowed | (set(tokenizer.eos_token_ids) if said in [text.encode() for text in texts] else set())


@settings(max_examples=20)
@given(data=st.data())
def test_tokens_are_their_bytes_however_the_text_is_cut(vocabulary: Tokenizer, data: st.DataObject) -> None:
    """Along a random walk; no token is preferred because a tokenizer would have cut the text there."""
    texts = ("Hello, world", "Hello", "the other", "né😀 the end\n")
    said, output = constraint("choice", texts, GrammarCompiler(vocabulary)), list[int]()
    while not said.is_complete(output):
        expected = allowed_by_bytes(vocabulary, texts, output)
        assert expected == ids_of(said.allowed(output))
        output.append(data.draw(st.sampled_from(sorted(expected))))
    assert vocabulary.decode(output) in texts


def test_a_grammar_may_ask_for_special_tokens() -> None:
    assert {END} == after(constraint("grammar", 'start: "a" <|end|> "b"'), "a")


def nested(depth: int) -> str:
    return '{"items": ' * depth + "{}" + "}" * depth


def chain(length: int) -> str:
    """A grammar that refers from rule to rule."""
    return "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(length)) + f'a{length}: "x"'


class TestRefusals:
    @pytest.mark.parametrize(
        ("kind", "value", "told"),
        [
            ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
            ("json_schema", '{"not": {}}', "not"),
            ("json_schema", '{"uniqueItems": true}', "uniqueItems"),
            ("json_schema", "false", "must be an object"),
            ("json_schema", "{", "cannot be read"),
            ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
            ("json_schema", '{"$ref": "http://localhost/schema"}', "http://localhost/schema"),
            ("json_schema", '{"$ref": "#"}', "no text keeps to it"),
            ("json_schema", '{"$schema": "http://json-schema.org/draft-03/schema#"}', "draft 3"),
            ("json_schema", '{"items": [{"minProperties": 3, "required": ["a"]}]}', "minProperties 3"),
            ("json_schema", nested(64), "nested more than 64 deep"),
            ("json_schema", nested(2000), "cannot be read"),
            ("json_schema", json.dumps({"const": "x" * 2**16}), "65549 bytes, limit is 65536"),
            ("regex", "a\\", "middle of an escape"),
            ("regex", "a(?=b)", "look-ahead"),
            ("regex", "(", "unclosed"),
            ("regex", "\ud800", "surrogate"),
            ("choice", ("a", "\udfff"), "surrogate"),
            ("json_schema", '{"const": "\\ud800"}', "hex escape"),
            ("regex", "x" * 65537, "65537 bytes, limit is 65536"),
            ("choice", (), "empty list"),
            ("choice", ("é" * 2**15, "!"), "65537 bytes, limit is 65536"),
            ("grammar", "start: a\na: missing", "at 2("),
            ("grammar", "start: start", "no text keeps to it"),
        ],
    )
    def test_what_cannot_be_honoured_is_refused(self, kind: str, value: str | tuple[str, ...], told: str) -> None:
        with pytest.raises(InvalidRequest, match=f"(?s)^{kind} .*{re.escape(told)}") as caught:
            constraint(kind, value)
        assert "structured_output" == caught.value.param
        assert len(str(caught.value)) < 500

    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            ("json_schema", nested(62)),
            ("json_schema", '{"minProperties": 2, "required": ["a"]}'),
            ("json_schema", '{"const": {"minProperties": 9}}'),
            ("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(2000)}})),
            ("choice", tuple(f"choice {i}" for i in range(4000))),
            ("grammar", chain(500)),
        ],
    )
    def test_what_is_only_large_is_honoured(self, kind: str, value: str | tuple[str, ...]) -> None:
        assert ids_of(constraint(kind, value).allowed([]))

    @pytest.mark.parametrize(
        ("kind", "value", "told"),
        [
            ("grammar", chain(4000), "refers too deeply"),
            ("grammar", "start: A\nA: " + " & ".join(f"/(a|b)*a(a|b){{{i}}}/" for i in range(60)), "more than 2 s"),
        ],
        ids=["stack", "time"],
    )
    def test_what_would_end_the_server_ends_a_trial(self, kind: str, value: str, told: str) -> None:
        """And the next one is compiled as ever."""
        with pytest.raises(InvalidRequest, match=told):
            constraint(kind, value)
        assert {*b"a"} == after(constraint("regex", f"a{{1,{len(value)}}}"), "")


def test_trials_at_the_same_time_do_not_hear_of_each_other() -> None:
    compiler = GrammarCompiler(ByteTokenizer())
    with ThreadPoolExecutor(4) as threads:
        said = list(threads.map(lambda i: constraint("regex", f"a{{{i}}}b", compiler), range(1, 9)))

    assert [{*b"b"}] * 8 == [after(one, "a" * i) for i, one in enumerate(said, 1)]


def test_what_is_asked_for_is_plain() -> None:
    wanted = StructuredOutput("choice", ("a", "b"))
    assert wanted == pickle.loads(pickle.dumps(wanted))


def test_the_same_is_compiled_once() -> None:
    wanted = StructuredOutput("regex", "once+")
    assert BYTES.compile(wanted) is BYTES.compile(StructuredOutput("regex", "once+"))
