"""When a request ends and what may be shown before that: examples, and random texts against a plain oracle."""

from collections.abc import Sequence
from itertools import accumulate, permutations
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core.request import FinishReason, Request, RequestOutput, TokenLogprobs
from core.scheduling.stopping import StopTracker, find_stop, partial_stop_length
from core.tokenizer import IncrementalDetokenizer
from tests.builders import END, request, text_decoder, text_of, token_ids_of


class Pieces:
    """A vocabulary: token i is the i-th piece."""

    strips_leading_space = False

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id] if token_id < len(self._pieces) else b""


def said(pieces: Sequence[str | bytes], *, steps: Sequence[int] | None = None, **params: Any) -> list[RequestOutput]:
    """Outputs of a request that says these pieces, one token a step unless told otherwise, until it ends."""
    data = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    params = {"max_tokens": len(data), **params}
    it = request(decoder=IncrementalDetokenizer(Pieces(data)), **params)
    return follow(it, range(len(data)), steps or [1] * len(data))


def follow(it: Request, token_ids: Sequence[int], steps: Sequence[int]) -> list[RequestOutput]:
    tracker, outputs, left = StopTracker(it), [], list(token_ids)
    for num_tokens in steps:
        step, left = left[:num_tokens], left[num_tokens:]
        for token_id in step:
            tracker.append(token_id, TokenLogprobs(float(-token_id)))
            if it.is_finished:
                break
        outputs.append(tracker.take_output())
        if it.is_finished:
            break
    return outputs


# Ends


def test_the_end_token_ends_it_and_has_no_text():
    it = request(eos={END}, decoder=text_decoder(), max_tokens=9)
    outputs = follow(it, [72, 105, END, 33], [1] * 4)

    assert ("Hi", FinishReason.STOP, None) == (text_of(outputs), it.finish_reason, it.stop_reason)
    assert [72, 105, END] == token_ids_of(outputs) == it.output_token_ids
    assert "" == outputs[-1].tokens[-1].text


def test_ignore_eos_goes_on_past_the_end_token():
    it = request(eos={END}, decoder=text_decoder(), max_tokens=3, ignore_eos=True)
    follow(it, [END, 105, END], [1] * 3)

    assert (FinishReason.LENGTH, 3) == (it.finish_reason, it.num_output_tokens)


def test_a_stop_id_ends_it_and_is_named_also_if_it_is_the_end_token():
    for token_id in (105, END):
        it = request(eos={END}, decoder=text_decoder(), max_tokens=9, stop_token_ids=(token_id,), ignore_eos=True)
        outputs = follow(it, [72, token_id, 33], [1] * 3)

        assert (FinishReason.STOP, token_id, "H") == (it.finish_reason, it.stop_reason, text_of(outputs))


def test_max_tokens_ends_it_by_length():
    outputs = said(["a", "b", "c"], max_tokens=2)

    assert ("ab", FinishReason.LENGTH) == (text_of(outputs), outputs[-1].finish_reason)


def test_the_context_ends_it_by_length():
    it = request(prompt=[1, 1, 1], max_tokens=9)
    tracker = StopTracker(it, max_model_len=5)
    tracker.append(0)
    assert not it.is_finished
    tracker.append(0)

    assert FinishReason.LENGTH is it.finish_reason


def test_an_end_token_in_the_last_place_is_a_stop():
    it = request(eos={END}, max_tokens=2)
    follow(it, [7, END], [1, 1])

    assert FinishReason.STOP is it.finish_reason


def test_a_stop_string_in_the_last_place_is_a_stop():
    outputs = said(["a", "X"], stop=("X",), max_tokens=2)

    assert (FinishReason.STOP, "X", "a") == (outputs[-1].finish_reason, outputs[-1].stop_reason, text_of(outputs))


def test_min_tokens_holds_every_kind_of_end_off():
    it = request(eos={END}, decoder=text_decoder(), max_tokens=9, min_tokens=3, stop=("X",), stop_token_ids=(7,))
    outputs = follow(it, [ord("X"), 7, END, ord("a"), ord("X")], [1] * 5)

    assert (FinishReason.STOP, "X", 5) == (it.finish_reason, it.stop_reason, it.num_output_tokens)
    assert "X\x07a" == text_of(outputs)


def test_a_stop_string_that_completes_behind_min_tokens_counts_from_its_start():
    assert "a" == text_of(said(["a", "X", "Y"], stop=("XY",), min_tokens=2, max_tokens=9))


def test_an_end_inside_a_step_leaves_the_rest_of_the_step_unsaid():
    outputs = said(["a", "b", "ST", "OP", "c", "d"], steps=[6], stop=("STOP",))

    assert ("ab", 4, [0, 1, 2, 3]) == (text_of(outputs), outputs[-1].num_generated_tokens, token_ids_of(outputs))


def test_without_a_decoder_there_is_no_text_and_nothing_is_held_back():
    it = request(max_tokens=3, stop=("X",))
    outputs = follow(it, [5, 6, 7], [1, 1, 1])

    assert [((5,), ""), ((6,), ""), ((7,), "")] == [
        (tuple(t.token_id for t in output.tokens), output.text) for output in outputs
    ]


# Stop strings


def test_a_stop_string_is_cut_off_wherever_the_tokens_are_cut():
    for pieces in (["go ", "STOP"], ["go ST", "OP on"], ["go ", "S", "T", "O", "P"], ["go STOP on"]):
        assert "go " == text_of(said(pieces, stop=("STOP",)))


def test_a_stop_string_may_be_asked_for_in_the_output():
    outputs = said(["go ST", "OP on"], stop=("STOP",), include_stop_str_in_output=True)

    assert ("go STOP", "STOP") == (text_of(outputs), outputs[-1].stop_reason)


@pytest.mark.parametrize(
    ("pieces", "text"),
    [(["a", "b"], "ab"), ([b"\xc3", b"\xa9"], "é"), (["a", b"\xc3"], "a\ufffd"), (["ST", "O"], "STO")],
)
def test_a_stop_id_may_be_asked_for_in_the_output(pieces: list[str | bytes], text: str):
    """As a stop string's, its text stays; the end token's does not, that is nobody's stop."""
    ends: dict[str, Any] = {"stop_token_ids": (1,), "stop": ("STOP",), "include_stop_str_in_output": True}
    outputs = said([*pieces, "more"], **ends)
    by_end_token = request(eos={105}, decoder=text_decoder(), max_tokens=9, include_stop_str_in_output=True)

    assert (text, 1, 2) == (text_of(outputs), outputs[-1].stop_reason, len(token_ids_of(outputs)))
    assert "H" == text_of(follow(by_end_token, [72, 105], [2]))


def test_what_may_become_a_stop_string_is_held_back_and_let_go_when_it_does_not():
    outputs = said(["a", "ST", "O", "x", "b"], stop=("STOP",))

    assert ["a", "", "", "STOx", "b"] == [output.text for output in outputs]
    assert [1, 2, 3, 4, 5] == [output.num_generated_tokens for output in outputs]


def test_a_whole_stop_string_that_must_not_stop_yet_holds_nothing_back():
    """The b falls under min_tokens; it cannot become the longer stop string either."""
    outputs = said(["b", "a"], stop=("b", "aa"), min_tokens=1)

    assert ["b", "a"] == [output.text for output in outputs]


def test_what_is_held_back_at_the_end_is_said():
    assert "aSTO" == text_of(said(["a", "ST", "O"], stop=("STOP",)))


def test_tokens_leave_whole():
    """Of "xS" only the S may belong to a stop, yet the token stays until it is decided."""
    outputs = said(["xS", "y"], stop=("STOP",))

    assert [("", ()), ("xSy", ("xS", "y"))] == [(o.text, tuple(t.text for t in o.tokens)) for o in outputs]


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [(("cd", "bcd"), "a", "bcd"), (("bc", "bcd"), "a", "bc"), (("abcd", "c"), "ab", "c"), (("d", "b", "cd"), "a", "b")],
)
def test_the_stop_string_that_is_complete_first_wins_and_among_those_the_longest(
    stops: tuple[str, ...], text: str, stop: str
):
    """In whatever order they are named, and however tokens cut the text."""
    for named in permutations(stops):
        for pieces in (["abcd"], ["ab", "cd"], ["a", "bcd"], ["abc", "d"], list("abcd")):
            outputs = said(pieces, stop=named)

            assert (text, stop) == (text_of(outputs), outputs[-1].stop_reason), (named, pieces)


def test_a_match_must_end_behind_what_was_seen():
    assert find_stop("aXb", ("X",), 2) is None
    assert (1, "X") == find_stop("aXb", ("X",), 1)


@pytest.mark.parametrize(
    ("text", "length"), [("abS", 1), ("abSTO", 3), ("abSTOP", 0), ("", 0), ("STSTO", 3), ("\n", 1), ("O", 0)]
)
def test_the_longest_tail_that_begins_a_stop_string(text: str, length: int):
    assert length == partial_stop_length(text, ("STOP", "\n\n"))


def test_logprobs_stay_with_their_tokens_through_hold_back():
    outputs = said(["a", "ST", "O", "x", "ST", "OP"], stop=("STOP",))
    tokens = [token for output in outputs for token in output.tokens]

    assert [0, 1, 2, 3, 4, 5] == [token.token_id for token in tokens]
    assert [-0.0, -1.0, -2.0, -3.0, -4.0, -5.0] == [token.logprobs.logprob for token in tokens if token.logprobs]
    assert ["a", "ST", "O", "x", "", ""] == [token.text for token in tokens]


# Characters


def test_a_character_in_four_tokens_leaves_with_the_last_of_them():
    face = "😀".encode()
    outputs = said([face[:1], face[1:2], face[2:3], face[3:], "a"])

    assert ["", "", "", "😀", "a"] == [output.text for output in outputs]
    assert [0, 0, 0, 4, 1] == [len(output.tokens) for output in outputs]


def test_a_character_left_open_is_one_replacement_at_the_end():
    assert "a\ufffd" == text_of(said(["a", "😀".encode()[:3]]))


def test_a_character_left_open_before_the_end_token_is_one_replacement():
    it = request(eos={END}, decoder=text_decoder(), max_tokens=9)

    assert "a\ufffd" == text_of(follow(it, [97, 0xF0, 0x9F, END], [1] * 4))


def test_a_character_open_behind_a_stop_string_is_dropped():
    assert "a" == text_of(said(["aX\xc3".encode("latin-1"), "b"], stop=("X",)))


def test_a_stop_string_may_hold_characters_that_tokens_cut():
    data = "a→b".encode()
    outputs = said([data[:2], data[2:3], data[3:]], stop=("→",))

    assert ("a", "→") == (text_of(outputs), outputs[-1].stop_reason)


# Outputs


def test_an_output_is_handed_over_once():
    it = request(max_tokens=2)
    tracker = StopTracker(it)
    tracker.append(5)

    assert [1, 0] == [len(tracker.take_output().tokens) for _ in range(2)]


def test_only_the_last_output_says_why():
    outputs = said(["a", "b"])

    assert [None, FinishReason.LENGTH] == [output.finish_reason for output in outputs]
    assert [False, True] == [output.is_finished for output in outputs]


# Random texts

ALPHABET = "abbcé→😀"
texts = st.text(ALPHABET, min_size=1, max_size=24)
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4).map(tuple)


def visible(pieces: Sequence[bytes]) -> str:
    """The whole characters among the bytes so far (a prefix of good UTF-8)."""
    return b"".join(pieces).decode("utf-8", "ignore")


def plain_end(
    pieces: Sequence[bytes], stops: Sequence[str], min_tokens: int, *, with_stop: bool
) -> tuple[str, int, str | None]:
    """(text, tokens, stop string): read token by token, and each character by character."""
    seen = 0
    for num_tokens in range(1, len(pieces) + 1):
        text = visible(pieces[:num_tokens])
        for end in range(seen + 1, len(text) + 1):
            complete = [stop for stop in stops if text[:end].endswith(stop)]
            if complete and num_tokens > min_tokens:
                stop = max(complete, key=len)
                return text[: end if with_stop else end - len(stop)], num_tokens, stop
        seen = len(text)
    is_open = len(text.encode()) < sum(map(len, pieces))
    return text + "\ufffd" * is_open, len(pieces), None


def most_that_may_leave(pieces: Sequence[bytes], stops: Sequence[str]) -> int:
    """Tokens that end before any beginning of a stop string at the text's end, and with a whole character."""
    text = visible(pieces)
    tails = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    safe = len(text) - max(tails, default=0)
    starts = [visible(pieces[:k]) for k in range(len(pieces) + 1)]
    is_whole = [len(start.encode()) == sum(map(len, pieces[:k])) for k, start in enumerate(starts)]
    return max(k for k, start in enumerate(starts) if len(start) <= safe and is_whole[k])


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    ends = [*sorted({c % len(data) for c in cuts} - {0}), len(data)]
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(
    text=texts,
    cuts=st.lists(st.integers(0, 200), max_size=30),
    stops=stop_lists,
    min_tokens=st.integers(0, 4),
    with_stop=st.booleans(),
    steps=st.lists(st.integers(1, 4), max_size=20),
    is_cut_short=st.booleans(),
)
@example("abab", [1, 2, 3], ("bb", "ba"), 0, False, [], False)
def test_what_is_said_is_the_plain_reading_of_the_text(
    text: str,
    cuts: list[int],
    stops: tuple[str, ...],
    min_tokens: int,
    with_stop: bool,
    steps: list[int],
    is_cut_short: bool,
):
    """Joined deltas equal a plain oracle; so nothing leaks; and nothing waits longer than it must."""
    pieces = cut(text.encode(), cuts)
    if is_cut_short and len(pieces) > 1:
        pieces.pop()  # may end inside a character
    min_tokens = min(min_tokens, len(pieces))
    params = {"stop": stops, "min_tokens": min_tokens, "include_stop_str_in_output": with_stop}
    outputs = said(pieces, steps=[*steps, *[1] * len(pieces)], **params)
    expected, num_tokens, stop = plain_end(pieces, stops, min_tokens, with_stop=with_stop)

    assert expected == text_of(outputs)
    assert (FinishReason.STOP if stop else FinishReason.LENGTH, stop) == (
        outputs[-1].finish_reason,
        outputs[-1].stop_reason,
    )
    assert list(range(num_tokens)) == token_ids_of(outputs)
    for output in outputs:
        assert output.text == "".join(token.text for token in output.tokens)
        assert [TokenLogprobs(float(-t.token_id)) for t in output.tokens] == [t.logprobs for t in output.tokens]
    ends = list(accumulate(len(output.tokens) for output in outputs))
    for output, num_left in list(zip(outputs, ends, strict=True))[:-1]:
        assert most_that_may_leave(pieces[: output.num_generated_tokens], stops) == num_left
