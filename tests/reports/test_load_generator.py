"""Public reports on load generators that report what did not happen: ours, against servers with a script."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from loadgen.client import CompletionClient, RequestOptions, open_http
from loadgen.metrics import icl, itl, measure, tpot
from loadgen.record import RequestRecord
from loadgen.workload import Prompt
from tests.loadgen.stubs import (
    DONE,
    Frame,
    ScriptedServer,
    SteppedClock,
    chunk,
    event,
    serve,
    serve_bytes,
    usage,
)
from tests.loadgen.test_cli import run_against

ONE_TOKEN = event(chunk("a", token_ids=[1]))


async def ask(url: str, clock: SteppedClock | None = None) -> RequestRecord:
    async with open_http(url, {}) as http:
        client = CompletionClient(http, RequestOptions(model="m"), clock=clock)
        return await client.complete(0, Prompt((1, 2, 3), 12), t_sched=0.0, t_queue=0.0, deadline=None)


@pytest.mark.parametrize("names_ids", [True, False], ids=["token ids", "usage only"])
async def test_bc_122_chunks_of_several_tokens_are_no_tokens(names_ids: bool):
    """BC-122, sgl-project/sglang#12064: the time of a chunk, which holds several tokens, was reported as a token's."""
    fields = {"token_ids": [1, 2, 3]} if names_ids else {}
    frames = [event(chunk("abc", **fields), 0.1 + 0.009 * number) for number in range(4)]
    frames += [event({"choices": [], "usage": usage(3, 12)}, 0.127), event("[DONE]", 0.127)]
    clock = SteppedClock()
    async with serve(ScriptedServer(lambda body: frames, clock)) as url:
        record = await ask(url, clock)

    assert 12 == record.num_output_tokens
    assert [0.003] * 9 == pytest.approx(itl(record))
    assert 0.003 == pytest.approx(tpot(record))
    assert [0.009] * 3 == pytest.approx(icl(record))


def assert_failed(kind: str, record: RequestRecord) -> None:
    """Failed, and in no figure."""
    assert record.failure is not None
    assert kind == record.failure.kind
    assert not record.is_ok
    for name in ("ttft", "itl", "tpot"):
        assert measure(name, [record]) is None


@pytest.mark.parametrize(
    ("frames", "kind"),
    [([ONE_TOKEN, event({"error": {"message": "broke"}}), DONE], "error frame"), ([ONE_TOKEN], "truncated")],
    ids=["error", "no [DONE]"],
)
async def test_bc_124_an_answer_that_breaks_off_is_a_failure(frames: Sequence[Frame], kind: str):
    """BC-124, vllm-project/guidellm#743, error inside a 200 stream counted as success: so were its tokens."""
    async with serve(ScriptedServer(lambda body: frames)) as url:
        assert_failed(kind, await ask(url))


async def test_bc_124_a_connection_that_is_reset_is_a_failure():
    """BC-124, error inside a 200 stream counted as success."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serve_bytes(head + b"%x\r\n%s\r\n" % (len(ONE_TOKEN.data), ONE_TOKEN.data), is_reset=True) as url:
        assert_failed("connection", await ask(url))


def test_bc_124_the_report_counts_the_failures_and_none_of_their_tokens(tmp_path: Path):
    """BC-124, error inside a 200 stream counted as success: the number of tokens asked for was reported as produced."""
    answers = iter([[ONE_TOKEN, event({"error": {"message": "broke"}}), DONE], [ONE_TOKEN], [ONE_TOKEN, event("{")]])
    files = "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"
    one_by_one = "--num-prompts", "3", "--max-concurrency", "1", "--num-warmups", "0"
    result, _ = run_against(lambda body: next(answers), *one_by_one, *files)
    saved = json.loads((tmp_path / "r.json").read_text())

    assert 1 == result.exit_code
    assert (0, 3, 0) == (saved["completed"], saved["failed"], saved["total_output_tokens"])
    assert {"error frame": 1, "truncated": 1, "malformed": 1} == saved["failures"]
