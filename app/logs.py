"""The server's log: one line per event, its fields behind it as name=value or all of it as JSON; nothing per token.

While the engine is busy a line every ten seconds says how it goes, in vLLM's words, so that eyes and scripts used to
its log find theirs here.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

from app.engine_loop import EngineLoop
from core import Engine, EngineStats, blocks_needed

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 10.0
_STANDARD_FIELDS = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class FieldFormatter(logging.Formatter):
    """Appends the fields given as `extra`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = [f"{name}={_printable(value)}" for name, value in vars(record).items() if name not in _STANDARD_FIELDS]
        return " ".join([super().formatMessage(record), *fields])


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the fields given as `extra`, and the traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _printable(value: object) -> object:
    """Texts may come from clients: with a line break in one, they could write lines of their own."""
    return repr(value) if isinstance(value, str) and not value.isprintable() else value


def configure(level: str, style: str = "text") -> None:
    """Send everything from `level` up to stderr, as text or json; stdout is for what a command answers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else FieldFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def max_concurrency(engine: Engine) -> float:
    """Requests of full context length that the KV cache holds at once."""
    return engine.num_kv_blocks / blocks_needed(engine.max_model_len, engine.config.block_size)


def log_start(engine: Engine, names: Sequence[str]) -> None:
    """What was asked for and how it turned out, and vLLM's line on the KV cache's size."""
    speculative, config = engine.config.speculative, engine.config
    logger.info(
        "model %s as %s, at most %d requests and %d tokens a step, speculation %s, prefix caching %s, "
        "preemption by %s%s",
        config.model,
        ", ".join(names),
        config.max_num_seqs,
        config.max_num_batched_tokens,
        f"by {speculative.method} with {speculative.num_speculative_tokens} drafts" if speculative else "off",
        "on" if config.enable_prefix_caching else "off",
        config.preemption_mode,
        f" with {config.num_tier_slots:,} blocks in the second tier" if config.num_tier_slots else "",
    )
    logger.info(
        "KV cache size: %s tokens, maximum concurrency for %s tokens per request: %.2fx",
        f"{engine.num_kv_blocks * engine.config.block_size:,}",
        f"{engine.max_model_len:,}",
        max_concurrency(engine),
    )


def stats_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """Rates between two snapshots that lie `seconds` apart, and the gauges of the second."""
    prompt = (now.num_prompt_tokens - before.num_prompt_tokens) / seconds
    generation = (now.num_generation_tokens - before.num_generation_tokens) / seconds
    queries = now.prefix_cache_queries - before.prefix_cache_queries
    hits = now.prefix_cache_hits - before.prefix_cache_hits
    line = (
        f"Avg prompt throughput: {prompt:.1f} tokens/s, Avg generation throughput: {generation:.1f} tokens/s, "
        f"Running: {now.num_running} reqs, Waiting: {now.num_waiting} reqs, "
        f"KV cache usage: {now.kv_blocks_used / max(now.kv_blocks, 1):.1%}, "
        f"Prefix cache hit rate: {hits / max(queries, 1):.1%}"
    )
    drafted = now.num_draft_tokens - before.num_draft_tokens
    if drafted:
        accepted = now.num_accepted_tokens - before.num_accepted_tokens
        line += f", Draft acceptance rate: {accepted / drafted:.1%}"
    return line


async def log_stats(loop: EngineLoop, interval_s: float = STATS_INTERVAL_S) -> None:
    """Until cancelled: a line after every interval in which there was something to do."""
    before = loop.engine.stats
    with suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(interval_s)
            now = loop.engine.stats
            if now is not before:  # replaced by every step
                logger.info(stats_line(before, now, interval_s))
            before = now
