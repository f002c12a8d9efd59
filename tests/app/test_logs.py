"""The log: fields behind the message, vLLM's lines on the cache and on how it goes."""

import asyncio
import json
import logging
import subprocess
import sys

import pytest

from app.engine_loop import EngineLoop
from app.logs import FieldFormatter, JsonFormatter, log_start, log_stats, max_concurrency, stats_line
from core import EngineStats
from tests.app.servers import in_process, make_engine


def test_fields_stand_behind_the_message():
    record = logging.makeLogRecord({"msg": "request %s", "args": ("finished",), "levelname": "INFO", "name": "app.x"})
    record.request_id = "r1"

    assert FieldFormatter().format(record).endswith("INFO app.x: request finished request_id=r1")


def test_a_field_cannot_write_a_line_of_its_own():
    record = logging.makeLogRecord({"msg": "m", "levelname": "INFO", "name": "app.x"})
    record.field = "a\n2026 ERROR\x1b[1m"

    assert FieldFormatter().format(record).endswith(r"app.x: m field='a\n2026 ERROR\x1b[1m'")


def test_a_line_may_be_an_object_of_json():
    try:
        raise ValueError("a\nb")
    except ValueError:
        record = logging.LogRecord("app.x", logging.ERROR, "", 0, "request %s", ("failed",), sys.exc_info())
    record.created, record.num, record.text = 1.5, 7, "é\n"

    line = JsonFormatter().format(record)
    found = json.loads(line)
    assert "\n" not in line
    assert "ValueError: a\nb" in found.pop("exception")
    assert {
        "time": "1970-01-01T00:00:01.500+00:00",
        "level": "error",
        "logger": "app.x",
        "message": "request failed",
        "num": 7,
        "text": "é\n",
    } == found


def test_the_flag_chooses_the_lines_form():
    code = "import logging; from app import logs; logs.configure('info', 'json'); logging.getLogger('x').info('m')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ("m", "x") == tuple(json.loads(ran.stderr)[name] for name in ("message", "logger"))


def test_the_start_line_tells_the_caches_size(caplog: pytest.LogCaptureFixture):
    engine = make_engine(num_kv_blocks=64, block_size=4, max_model_len=30)
    with caplog.at_level(logging.INFO):
        log_start(engine, ["mine", "its-alias"])

    assert f"model {engine.config.model} as mine, its-alias, at most" in caplog.text
    assert 64 / 8 == max_concurrency(engine)
    assert "KV cache size: 256 tokens, maximum concurrency for 30 tokens per request: 8.00x" in caplog.text


def test_the_stats_line_tells_rates_between_two_moments():
    before = EngineStats(num_prompt_tokens=100, num_generation_tokens=10, num_draft_tokens=5, num_accepted_tokens=5)
    now = EngineStats(
        num_prompt_tokens=150,
        num_generation_tokens=30,
        num_running=2,
        num_waiting=1,
        kv_blocks=10,
        kv_blocks_used=5,
        prefix_cache_queries=4,
        prefix_cache_hits=1,
        num_draft_tokens=15,
        num_accepted_tokens=9,
    )

    assert (
        "Avg prompt throughput: 5.0 tokens/s, Avg generation throughput: 2.0 tokens/s, Running: 2 reqs, "
        "Waiting: 1 reqs, KV cache usage: 50.0%, Prefix cache hit rate: 25.0%, Draft acceptance rate: 40.0%"
    ) == stats_line(before, now, seconds=10)


async def test_an_unknown_field_is_logged_once(caplog: pytest.LogCaptureFixture):
    async with in_process() as server:
        for _ in range(2):
            await server.complete(prompt="p", a_field_nobody_knows=1)

    assert ["a_field_nobody_knows"] == [vars(r)["field"] for r in caplog.records if "unknown request field" in r.msg]


async def test_stats_are_logged_while_there_is_something_to_do_and_only_then(caplog: pytest.LogCaptureFixture):
    engine = make_engine()
    loop = EngineLoop(engine, max_queue=1)
    with caplog.at_level(logging.INFO):
        task = asyncio.create_task(log_stats(loop, interval_s=0.001))
        await asyncio.sleep(0)
        engine.stats = EngineStats(num_running=3)
        while "Running: 3 reqs" not in caplog.text:
            await asyncio.sleep(0)
        task.cancel()
        await task

    assert 1 == caplog.text.count("Avg prompt throughput")
