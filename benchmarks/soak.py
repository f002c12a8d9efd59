"""An hour of everything at once, and whether it leaves anything behind: memory, tasks, file descriptors, blocks.

Workers send what clients send: short and long requests, several samples, chat, tools, schemas, embeddings, what is
refused, what breaks; streams are read or dropped. At the end of each round they pause; when the server is idle its
figures are read, so that what is in flight is not taken for what is left. The first minute, or sixth of the time, warms
it up; after that the figures must be flat.

    python -m benchmarks.soak [--minutes 60] [--workers 24] [flags of octavo serve]
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import load_line, print_table
from octavo.testing import FLAGS, clean_environment, running, url_of

ROUND_S = 20.0
WARM_UP_S = 60.0  # at least
# What may still come behind it: the hashes of what other caches would have hit, of which 65,536 are kept.
SPARE_MB = 16
TIMEOUT_S = 120.0
# A small pool: its memory is touched, and its cache full, within the warm-up.
SERVER_FLAGS = ("--num-kv-blocks", "512", "--max-num-seqs", "16", "--max-queue", "64")
TEXT = "Once upon a time there was a brave and curious dog named Max. "
SCHEMA = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}
TOOLS = [{"type": "function", "function": {"name": "measure", "parameters": SCHEMA}}]

Send = Callable[[str, dict[str, Any]], Awaitable[int]]


@dataclass(frozen=True)
class Figures:
    """What an idle server holds."""

    seconds: float
    num_requests: int
    memory_mb: float
    num_tasks: int
    num_files: int
    num_blocks_used: int
    num_blocks_free: int


def judge(figures: Sequence[Figures], warm_up_s: float = WARM_UP_S) -> list[str]:
    """What is not flat, in words. The first reading behind the warm-up is what all later ones are held to."""
    warm = [f for f in figures if f.seconds >= warm_up_s]
    if len(warm) < 3:
        return [f"{len(warm)} readings behind the warm-up of {warm_up_s:.0f} s, 3 are needed"]
    first, later = warm[0], warm[1:]
    wrong = [
        f"{f.num_blocks_used} blocks used at {f.seconds:.0f} s, nothing running" for f in warm if f.num_blocks_used
    ]
    for name in ("num_tasks", "num_files"):
        # The least of the later ones: a connection may take a moment to close, a leak does not go back.
        least = min(getattr(f, name) for f in later)
        if least > getattr(first, name):
            wrong.append(f"{name} was {getattr(first, name)}, and {least} or more ever after")
    limit = 1.05 * first.memory_mb + SPARE_MB
    if later[-1].memory_mb > limit:
        wrong.append(f"memory was {first.memory_mb:.0f} MB and is {later[-1].memory_mb:.0f} MB, limit {limit:.0f} MB")
    return wrong


class Load:
    """What is sent: kinds of requests, as many as the server's own document has."""

    def __init__(self, client: httpx.AsyncClient, document: Any) -> None:
        self.num_requests = 0
        self.outcomes: Counter[str] = Counter()
        self._client = client
        paths, schemas = document["paths"], document["components"]["schemas"]
        chat = schemas["ChatRequest"]["properties"]
        kinds: list[tuple[str, bool]] = [
            ("short", True),
            ("long", True),
            ("samples", True),
            ("chat", True),
            ("refused", True),
            ("faulty", True),
            ("structured", "response_format" in chat),
            ("tools", "tools" in chat),
            ("responses", "/v1/responses" in paths),
            ("messages", "/v1/messages" in paths),
            ("embeddings", "/v1/embeddings" in paths),
        ]
        self.kinds = [name for name, is_there in kinds if is_there]

    async def work(self, rng: random.Random, until_s: float) -> None:
        """One request after the other until it is time."""
        while time.monotonic() < until_s:
            kind = rng.choice(self.kinds)
            path, body = self._request(kind, rng)
            drop_after = rng.randrange(1, 20) if body.get("stream") and rng.random() < 0.3 else None
            try:
                outcome = await self._send(path, body, drop_after)
            except httpx.RemoteProtocolError:
                outcome = "cut"
            self.num_requests += 1
            self.outcomes[f"{kind} {outcome}"] += 1

    def _request(self, kind: str, rng: random.Random) -> tuple[str, dict[str, Any]]:
        start = rng.randrange(len(TEXT))
        prompt = f"{rng.randrange(1000)} {TEXT[start:]}"
        asked: dict[str, Any] = {"max_tokens": rng.randrange(1, 40), "stream": rng.random() < 0.6}
        chat = {**asked, "messages": [{"role": "user", "content": prompt}]}
        match kind:
            case "short":
                return "/v1/completions", {**asked, "prompt": prompt, "logprobs": rng.choice([None, 3])}
            case "long":
                return "/v1/completions", {**asked, "prompt": prompt * 20, "max_tokens": 100}
            case "samples":
                return "/v1/completions", {**asked, "prompt": prompt, "n": rng.randrange(2, 5), "seed": 1}
            case "refused":
                return "/v1/completions", {**asked, "prompt": prompt, "temperature": 3}
            case "faulty":
                after = rng.randrange(4) if asked["stream"] else 0
                fault = {"type": rng.choice(["error", "disconnect"]), "after_events": after}
                return "/v1/completions", {**asked, "prompt": prompt, "fault": fault}
            case "structured":
                form = {"type": "json_schema", "json_schema": {"name": "size", "schema": SCHEMA}}
                return "/v1/chat/completions", {**chat, "response_format": form}
            case "tools":
                return "/v1/chat/completions", {**chat, "tools": TOOLS, "tool_choice": "required"}
            case "responses":
                return "/v1/responses", {"input": prompt, "max_output_tokens": 20, "stream": asked["stream"]}
            case "messages":
                return "/v1/messages", {**chat, "model": "octavo-tiny"}
            case "embeddings":
                return "/v1/embeddings", {"input": [prompt, TEXT], "model": "octavo-tiny"}
            case _:
                return "/v1/chat/completions", chat

    async def _send(self, path: str, body: dict[str, Any], drop_after: int | None) -> str:
        """The status, and how the stream went."""
        async with self._client.stream("POST", path, json=body) as response:
            num_lines = 0
            async for _ in response.aiter_lines():
                num_lines += 1
                if num_lines == drop_after:
                    return f"{response.status_code} dropped"
        return str(response.status_code)

    def unexpected(self) -> list[str]:
        """Outcomes that no request of its kind should have had. A full queue is an honest answer."""
        foreseen = {"refused": ("400",), "faulty": ("200", "500", "cut")}
        return [
            f"{number} x {outcome}"
            for outcome, number in sorted(self.outcomes.items())
            if outcome.split()[1] not in (*foreseen.get(outcome.split()[0], ("200",)), "503")
        ]


async def read_figures(url: str, started_s: float, num_requests: int) -> Figures:
    """The figures of the server, once it is idle, over a connection that is closed again."""
    deadline_s = time.monotonic() + TIMEOUT_S
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        while True:
            text = (await client.get("/metrics")).raise_for_status().text
            values = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
            if not values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"]:
                break
            if time.monotonic() > deadline_s:
                raise SystemExit(f"requests are still running {TIMEOUT_S:.0f} s after the last client has left")
            await asyncio.sleep(0.1)
    return Figures(
        seconds=time.monotonic() - started_s,
        num_requests=num_requests,
        memory_mb=values["process_resident_memory_bytes"] / 2**20,
        num_tasks=int(values["octavo:event_loop_tasks"]),
        num_files=int(values["process_open_fds"]),
        num_blocks_used=int(values["octavo:kv_blocks_used"]),
        num_blocks_free=int(values["octavo:kv_blocks_free"]),
    )


def show(figures: Figures) -> None:
    print(
        f"{figures.seconds / 60:7.1f} {figures.num_requests:9,d} {figures.memory_mb:10.1f} {figures.num_tasks:6d}"
        f" {figures.num_files:6d} {figures.num_blocks_used:12d} {figures.num_blocks_free:12d}",
        flush=True,
    )


async def soak(url: str, minutes: float, num_workers: int) -> int:
    print("minutes  requests  memory, MB  tasks  files  blocks used  blocks free")
    figures: list[Figures] = []
    outcomes: Counter[str] = Counter()
    num_requests, started_s = 0, time.monotonic()
    unexpected: list[str] = []
    while time.monotonic() - started_s < 60 * minutes:
        # New connections each round: the old ones' tasks and descriptors must be gone by its end.
        limits = httpx.Limits(max_connections=num_workers)
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as client:
            load = Load(client, (await client.get("/openapi.json")).raise_for_status().json())
            until_s = time.monotonic() + ROUND_S
            seeds = range(num_requests, num_requests + num_workers)
            await asyncio.gather(*(load.work(random.Random(seed), until_s) for seed in seeds))
        num_requests += load.num_requests
        outcomes += load.outcomes
        unexpected += load.unexpected()
        figures.append(await read_figures(url, started_s, num_requests))
        show(figures[-1])
    wrong = judge(figures, max(WARM_UP_S, 10 * minutes)) + unexpected
    print_table("outcomes", [load_line(), *((name, f"{number:,d}") for name, number in sorted(outcomes.items()))])
    print("\n".join(["not as it should be:", *wrong]) if wrong else "flat")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=24)
    args, flags = parser.parse_known_args()
    command = [sys.executable, "-m", "app", "serve", "--host", "127.0.0.1", "--port", "0"]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        command += [*FLAGS, *SERVER_FLAGS, *flags]
        with running(command, log, environment=clean_environment()) as process:
            code = asyncio.run(soak(url_of(process, log), args.minutes, args.workers))
        errors = [line for line in log.read_text().splitlines() if " ERROR " in line or " CRITICAL " in line]
        sys.stderr.write("\n".join(errors[-50:]))
    return code


if __name__ == "__main__":
    sys.exit(main())
