"""One benchmark from beginning to end: wait for the server, warm up, read its metrics, run, read them again."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from loadgen.arrivals import Schedule
from loadgen.client import CompletionClient, RequestOptions, open_http
from loadgen.options import BenchOptions
from loadgen.record import RequestRecord
from loadgen.runner import Run, Runner
from loadgen.server_metrics import ServerMetrics, compare, scrape_server

READY_POLL_INTERVAL_S = 0.25
READY_REQUEST_TIMEOUT_S = 5.0


class ServerNotReady(Exception):
    """The server did not answer GET /v1/models in time, or names no model."""


@dataclass(frozen=True)
class BenchResult:
    """All that was observed; `model` is the name that was sent."""

    options: BenchOptions
    model: str
    schedule: Schedule | None
    run: Run
    server: ServerMetrics | None


@dataclass(frozen=True)
class Progress:
    """Told as the benchmark goes on."""

    on_phase: Callable[[str, int | None], None] = lambda name, total: None
    on_done: Callable[[RequestRecord], None] = lambda record: None


async def run_benchmark(options: BenchOptions, progress: Progress | None = None) -> BenchResult:
    """Raises ServerNotReady; a server that fails later makes failed records, not exceptions."""
    progress = progress or Progress()
    prompts, schedule = options.prompts(), options.schedule()
    async with open_http(options.base_url, options.headers) as http:
        progress.on_phase("waiting for the server", None)
        models = await wait_until_ready(http, options.ready_check_timeout_s)
        model = options.model or first_model(models)
        client = CompletionClient(http, _request_options(options, model))
        progress.on_phase("warming up", options.num_warmups)
        await _warm_up(client, options, progress)
        before = await scrape_server(http) if options.server_metrics else {}
        progress.on_phase("running", len(schedule.offsets_s) if schedule else options.num_requests)
        runner = Runner(
            client.complete,
            prompts,
            max_concurrency=options.max_concurrency,
            stop_after_s=options.stop_after_s,
            on_done=progress.on_done,
        )
        if schedule is not None:
            run = await runner.open_loop(schedule)
        else:
            run = await runner.closed_loop(options.num_requests, duration_s=options.duration_s)
        server = compare(before, await scrape_server(http)) if options.server_metrics else None
    return BenchResult(options, model, schedule, run, server)


def _request_options(options: BenchOptions, model: str) -> RequestOptions:
    return RequestOptions(
        endpoint=options.endpoint,
        model=model,
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        extra_body=options.extra_body,
        timeout_s=options.timeout_s,
    )


async def _warm_up(client: CompletionClient, options: BenchOptions, progress: Progress) -> None:
    """As many at once as the run will have, so that connections and batch shapes are warm as well."""
    if options.num_warmups:
        concurrency = min(options.num_warmups, options.max_concurrency or options.num_warmups)
        runner = Runner(
            client.complete, options.warmup_prompts(), max_concurrency=concurrency, on_done=progress.on_done
        )
        await runner.closed_loop(options.num_warmups)


async def wait_until_ready(http: httpx.AsyncClient, timeout_s: float) -> httpx.Response:
    """The first answer to GET /v1/models that is not a server error; asked at least once."""
    now = asyncio.get_running_loop().time
    deadline = now() + timeout_s
    while True:
        try:
            response = await http.get("/v1/models", timeout=READY_REQUEST_TIMEOUT_S)
            if not response.is_server_error:
                return response
            problem = f"http {response.status_code}"
        except httpx.TransportError as error:
            problem = f"{type(error).__name__}: {error}"
        if now() + READY_POLL_INTERVAL_S > deadline:
            raise ServerNotReady(f"{http.base_url} is not ready after {timeout_s:g} s ({problem})")
        await asyncio.sleep(READY_POLL_INTERVAL_S)


def first_model(response: httpx.Response) -> str:
    """Raises ServerNotReady when the answer to GET /v1/models holds no name."""
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        use = "--api-key or OPENAI_API_KEY" if response.status_code == 401 else "--model"
        problem = f"{response.url} names no model, use {use} (http {response.status_code}: {response.text[:200]})"
        raise ServerNotReady(problem) from error
