"""The comparison's own parts: its client counts what a server says, its counters what a server has counted."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.peers.client import EngineFailed, Work, run_over_http
from benchmarks.peers.compare import Comparison, Figures, Prompts
from benchmarks.peers.report import write_report
from benchmarks.peers.speculation import closed_form, read_counters

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":%d}}\n\n'
DONE = b"data: [DONE]\n\n"


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A server on a port that reads a request's head and gives this answer, cut into small pieces."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for start in range(0, len(answer), 7):
            writer.write(answer[start : start + 7])
            await writer.drain()
        writer.close()

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.run_until_complete(server.wait_closed())
        loop.close()


def test_tokens_are_those_of_the_usage() -> None:
    with answering(HEAD + TOKEN * 5 + USAGE % 9 + DONE) as port:
        outcome = run_over_http("127.0.0.1", port, "m", Work([[1, 2]] * 3, 9))

    assert 27 == outcome.num_tokens
    assert 3 == len(outcome.first_token_s)
    assert all(0 < first <= outcome.seconds for first in outcome.first_token_s)


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 503 Busy\r\n\r\n", HEAD, HEAD + TOKEN * 3, HEAD + TOKEN + DONE, HEAD + TOKEN + USAGE % 1],
    ids=["refused", "empty", "cut off", "no usage", "no end"],
)
def test_an_answer_that_did_not_end_well_is_a_failure(answer: bytes) -> None:
    with answering(answer) as port, pytest.raises(EngineFailed):
        run_over_http("127.0.0.1", port, "m", Work([[1, 2]], 9))


EXPOSITION = """
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 1.0
vllm:spec_decode_num_accepted_tokens_created{engine="0",model_name="m"} 1.79e+09
"""


def test_counters_are_read_from_an_exposition() -> None:
    counters = read_counters(EXPOSITION, 3)

    assert (10, 30, 12, [7, 4, 1]) == (
        counters.num_drafts,
        counters.num_draft_tokens,
        counters.num_accepted,
        counters.accepted_per_position,
    )
    assert (0.4, 0.7, 2.2) == (counters.acceptance, counters.first_acceptance, counters.tokens_per_draft_step)
    assert 0 == counters.since(counters).acceptance


def test_counters_that_are_not_there_are_0() -> None:
    assert [0, 0] == read_counters("", 2).accepted_per_position


@pytest.mark.parametrize(("acceptance", "expected"), [(0.0, 1.0), (0.5, 1.875), (1.0, 4.0)])
def test_closed_form(acceptance: float, expected: float) -> None:
    assert expected == closed_form(acceptance, 3)


def test_prompts_are_never_said_twice() -> None:
    prompts = Prompts()
    said = [tuple(prompt) for _ in range(5) for prompt in prompts.work(8, 16, 1).prompts]

    assert 40 == len(set(said))
    assert {16} == {len(prompt) for prompt in said}


def test_a_ratio_is_the_median_of_pairs() -> None:
    """Not the ratio of medians, which would be 10 / 5 here."""
    ours = Figures("ours", tokens_per_s={8: [10.0, 20.0, 5.0]}, first_token_s=[1.0], memory_bytes=1 << 30)
    peer = Figures("peer", tokens_per_s={8: [10.0, 5.0, 4.0]}, first_token_s=[2.0], memory_bytes=2 << 30)

    ratios = write_report([Comparison([ours, peer])]).splitlines()[6]
    assert "| ours / theirs, median of pairs | 1.25 x | 0.50 x |  | 0.50 x |" == ratios
