import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.stream import SseParser, StreamFailure, StreamReader, error_text
from tests.loadgen.stubs import chunk, usage


def read(*timed_frames):
    reader = StreamReader()
    for time_s, frame in timed_frames:
        reader.take(frame if isinstance(frame, bytes) else json.dumps(frame).encode(), time_s)
    return reader


def counts(reader):
    return [piece.num_tokens for piece in reader.chunks]


STREAM = 'data: {"a": "é"}\r\n\r\n: keep-alive\n\nevent: x\ndata:1\ndata: 2\n\nid: 7\ndata: [DONE]\n\n'.encode()


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_are_the_same_wherever_the_bytes_are_cut(cuts):
    """Also within a character and between carriage return and line feed."""
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = SseParser()
    events = [e for start, end in pairwise(edges) for e in parser.feed(STREAM[start:end])]

    assert ['{"a": "é"}'.encode(), b"1\n2", b"[DONE]"] == events


def test_an_event_without_its_blank_line_is_not_one():
    assert [] == SseParser().feed(b"data: 1\n")


def test_token_ids_are_trusted_most():
    reader = read(
        (1.0, chunk("ab", token_ids=[1, 2], usage=usage(5, 99))),
        (2.0, chunk("", token_ids=[3], usage=usage(5, 99))),
        (3.0, {"choices": [], "usage": usage(5, 3)}),
    )

    assert [2, 1] == counts(reader)
    assert "token_ids" == reader.token_source


def test_running_usage_is_counted_by_its_differences():
    reader = read(*((float(n), chunk("x", usage=usage(5, n))) for n in (1, 4, 4, 6)))

    assert [1, 3, 2] == counts(reader)
    assert [1.0, 4.0, 6.0] == [piece.time_s for piece in reader.chunks]
    assert "running usage" == reader.token_source


def test_a_total_on_the_last_chunk_alone_is_no_running_usage():
    reader = read((1.0, chunk("a")), (2.0, chunk("b")), (3.0, chunk("c", usage=usage(5, 6))))

    assert [2, 2, 2] == counts(reader)
    assert "total usage, spread evenly" == reader.token_source


@pytest.mark.parametrize(("total", "expected"), [(12, [4, 4, 4]), (11, [3, 4, 4]), (3, [1, 1, 1])])
def test_a_total_is_spread_over_the_chunks_with_text(total, expected):
    reader = read(
        *((float(n), chunk("x")) for n in range(3)),
        (3.0, chunk("")),
        (3.0, {"choices": [], "usage": usage(5, total)}),
    )

    assert expected == counts(reader)


def test_without_any_count_a_chunk_is_a_token():
    reader = read((1.0, chunk("a")), (2.0, chunk("")), (3.0, chunk("b")))

    assert [1, 1] == counts(reader)
    assert "one per chunk" == reader.token_source


def test_the_role_that_opens_a_chat_is_not_its_first_token():
    role, word = ({"choices": [{"delta": delta}]} for delta in ({"role": "assistant", "content": ""}, {"content": "a"}))

    assert (2.0, 3.0) == read((1.0, role), (2.0, word), (3.0, word)).first_and_last_s


def test_a_trailing_chunk_without_tokens_does_not_lengthen_the_stream():
    reader = read((1.0, chunk("a", token_ids=[1])), (2.0, chunk("b", token_ids=[2])), (9.0, chunk("", token_ids=[])))

    assert (1.0, 2.0) == reader.first_and_last_s


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b'{"error": {"message": "out of memory"}}', "error frame"),
        (b"not json", "malformed"),
        (b"[1]", "malformed"),
        (b'{"choices": [3]}', "malformed"),
        (b'{"choices": 3}', "malformed"),
    ],
)
def test_what_is_no_chunk_fails_the_request(data, kind):
    with pytest.raises(StreamFailure) as caught:
        StreamReader().take(data, 0.0)

    assert kind == caught.value.kind


@pytest.mark.parametrize(
    ("frames", "kind"), [([chunk("a")], "truncated"), ([b"[DONE]"], "empty"), ([{"choices": []}, b"[DONE]"], "empty")]
)
def test_a_stream_that_stops_short_or_says_nothing_is_no_answer(frames, kind):
    reader = read(*((0.0, frame) for frame in frames))

    with pytest.raises(StreamFailure) as caught:
        reader.check_complete()

    assert kind == caught.value.kind


@pytest.mark.parametrize(
    "body", [{"error": {"message": "no"}}, {"error": "no"}, {"object": "error", "message": "no"}, "no"]
)
def test_error_objects_of_all_shapes_are_read(body):
    assert "no" == error_text(body)


@pytest.mark.parametrize(
    "frame",
    [
        {"error": {"message": "boom"}},
        {"error": "boom", "error_type": "generation"},
        {"error": {}},
        {"object": "error", "message": "boom", "code": 400},
        {"type": "error", "message": "boom"},
        {"message": "boom"},
        {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]},
        {"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "", "finish_reason": "error"}]},
    ],
)
def test_an_answer_that_its_server_gave_up_is_a_failure_in_whatever_shape_it_says_so(frame):
    with pytest.raises(StreamFailure, match="error frame"):
        read((1.0, chunk("a", token_ids=[1])), (2.0, frame))


@pytest.mark.parametrize(
    "frame",
    [
        b"[" * 100_000,
        {"choices": [], "usage": [1]},
        {"choices": [], "usage": {"completion_tokens": -1}},
        {"choices": [], "usage": {"completion_tokens": "many"}},
        {"choices": [], "usage": {"prompt_tokens_details": "none"}},
        b'{"choices": [{"text": "a"}], "usage": {"completion_tokens": NaN}}',
        {"choices": [{"text": "a", "token_ids": 5}]},
        {"choices": ["a"]},
    ],
)
def test_what_is_no_chunk_is_a_failure_and_nothing_worse(frame):
    with pytest.raises(StreamFailure, match="malformed"):
        read((1.0, frame))


def test_tokens_of_all_choices_that_came_together_count():
    pair = [{"index": i, "text": "a", "token_ids": [1, 2]} for i in range(2)]

    assert [4] == counts(read((1.0, {"choices": pair})))


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
def test_an_answer_need_not_be_content(delta):
    """The role before it says nothing yet."""
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    reader = read((1.0, role), (2.0, {"choices": [{"delta": delta}]}), (3.0, {"choices": [], "usage": usage(5, 3)}))

    assert [3] == counts(reader)
    assert (2.0, 2.0) == reader.first_and_last_s


def test_a_running_usage_that_goes_back_is_not_counted_again():
    reader = read(*((float(n), chunk("x", usage=usage(5, total))) for n, total in enumerate((2, 1, 3))))

    assert [2, 1] == counts(reader)


@pytest.mark.parametrize("end", [b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE] \r\n"])
def test_a_last_line_needs_no_blank_one_behind_it(end):
    parser = SseParser()
    parser.feed(b"data: {}\n\n" + end)

    assert parser.has_done_at_end


@pytest.mark.parametrize("end", [b"", b"data: [DON", b"data: {}", b": [DONE]"])
def test_any_other_end_is_none(end):
    parser = SseParser()
    parser.feed(b"data: {}\n\n" + end)

    assert not parser.has_done_at_end
