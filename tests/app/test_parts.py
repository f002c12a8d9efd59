"""Readers of answers in which nothing, or one known function, can be called."""

from app.parts import ArgumentsReader, Call, CallArguments, CallStart, Part, Text, TextReader, assembled


def test_where_nothing_can_be_called_all_is_text():
    reader = TextReader()

    assert [Text("<tool_call>")] == reader.feed("<tool_call>")
    assert [] == reader.feed("")
    assert [] == reader.finish()


def test_where_the_function_is_known_all_is_its_arguments():
    reader = ArgumentsReader("f")
    parts = [*reader.feed(""), *reader.feed('{"a"'), *reader.feed(": 1}"), *reader.finish()]
    start = parts[0]

    assert isinstance(start, CallStart)
    assert ("f", [CallArguments(0, '{"a"'), CallArguments(0, ": 1}")]) == (start.name, parts[1:])


def test_a_known_call_is_announced_even_if_nothing_was_written():
    (start,) = ArgumentsReader("f").finish()

    assert isinstance(start, CallStart)


def test_parts_assemble_to_text_and_calls():
    parts: list[Part] = [
        Text("a"),
        CallStart(0, "x", "f"),
        CallArguments(0, "{"),
        CallArguments(0, "}"),
        CallStart(1, "y", "g"),
        Text("b"),
    ]

    assert ("ab", [Call("x", "f", "{}"), Call("y", "g", "")]) == assembled(parts)
