"""The command line: option names are those users of other load generators know, where they mean the same.

`bench` is one typer command function; `python -m loadgen` runs it alone and the server's command line mounts it.
Here words become a BenchOptions, and a result becomes output and an exit code; nothing is measured.
"""

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from loadgen.benchmark import BenchResult, Progress, ServerNotReady, run_benchmark
from loadgen.options import DEFAULT_METRICS, DEFAULT_NUM_PROMPTS, BenchOptions
from loadgen.record import RequestRecord
from loadgen.report import print_report, result_json, save_result
from loadgen.summary import Summary, summarize
from loadgen.workload import InvalidDataset

TRAFFIC, PROMPTS, SAMPLING, HYGIENE, METRICS, OUTPUT = (
    "Traffic",
    "Prompts",
    "Sampling",
    "Hygiene",
    "Metrics",
    "Output",
)


def bench(
    base_url: Annotated[str, typer.Option(help="The server, without the path.")] = "http://127.0.0.1:8000",
    endpoint: Annotated[
        str, typer.Option(help="Completions path; one ending in /chat/completions needs text prompts.")
    ] = "/v1/completions",
    model: Annotated[str | None, typer.Option(help="Default: the first the server lists.")] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="K:V", help="Extra header; may be repeated.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts and of the schedule.")] = 0,
    request_rate: Annotated[
        float,
        typer.Option(
            help="Requests per second, leaving by schedule whatever the server does (open loop). inf: no schedule.",
            rich_help_panel=TRAFFIC,
        ),
    ] = math.inf,
    arrival: Annotated[
        Literal["poisson", "gamma", "constant"] | None,
        typer.Option(help="Law of the gaps. Default: poisson, gamma with --burstiness.", rich_help_panel=TRAFFIC),
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Shape of gamma gaps: below 1 is burstier than Poisson.", rich_help_panel=TRAFFIC)
    ] = 1.0,
    is_exact: Annotated[
        bool,
        typer.Option(
            "--exact-duration/--poisson-process",
            help="Scale the gaps so that the mean rate is exactly the requested one, or leave them as drawn.",
            rich_help_panel=TRAFFIC,
        ),
    ] = True,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most requests in flight. Without a rate: as many all the time (closed loop).",
            rich_help_panel=TRAFFIC,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Requests to send. Default: {DEFAULT_NUM_PROMPTS}, with --duration no limit.",
            rich_help_panel=TRAFFIC,
        ),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds during which requests leave.", rich_help_panel=TRAFFIC)
    ] = None,
    grace_period: Annotated[
        float,
        typer.Option(min=0, help="Seconds after --duration to wait for answers under way.", rich_help_panel=TRAFFIC),
    ] = 30.0,
    dataset_name: Annotated[
        Literal["random", "custom"] | None,
        typer.Option(help="Default: random, custom with --dataset-path.", rich_help_panel=PROMPTS),
    ] = None,
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='JSON Lines of {"prompt": text or token ids, "output_len": optional}.',
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="One text for all requests.", rich_help_panel=PROMPTS)] = None,
    random_input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens.", rich_help_panel=PROMPTS)] = 64,
    random_output_len: Annotated[int, typer.Option(min=1, help="Tokens to ask for.", rich_help_panel=PROMPTS)] = 32,
    random_range_ratio: Annotated[
        float,
        typer.Option(help="Lengths vary uniformly by this share either way, in [0, 1).", rich_help_panel=PROMPTS),
    ] = 0.0,
    vocab_size: Annotated[
        int,
        typer.Option(
            min=1,
            help="Random prompts use the ids below this; 256 are the bytes of octavo-tiny.",
            rich_help_panel=PROMPTS,
        ),
    ] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.", rich_help_panel=SAMPLING)] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Always generate the full length.", rich_help_panel=SAMPLING)
    ] = False,
    extra_body: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Fields to add to each request; null takes one of ours out.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    num_warmups: Annotated[
        int,
        typer.Option(min=0, help="Requests before the run, with prompts it does not use.", rich_help_panel=HYGIENE),
    ] = 2,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds after which a request has failed.", rich_help_panel=HYGIENE)
    ] = 600.0,
    ready_check_timeout_sec: Annotated[
        float, typer.Option(min=0, help="How long to wait for the server.", rich_help_panel=HYGIENE)
    ] = 30.0,
    max_error_rate: Annotated[
        float | None,
        typer.Option(help="Exit with 1 when a larger share of requests fails.", rich_help_panel=HYGIENE),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC:MS",
            help="Limits a good request keeps, such as 'ttft:200 tpot:50'; may be repeated.",
            rich_help_panel=METRICS,
        ),
    ] = None,
    percentile_metrics: Annotated[str, typer.Option(help="Metrics in the table.", rich_help_panel=METRICS)] = ",".join(
        DEFAULT_METRICS
    ),
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles.", rich_help_panel=METRICS)] = "50,90,99",
    server_metrics: Annotated[
        bool, typer.Option(help="Read the server's /metrics before and after.", rich_help_panel=METRICS)
    ] = True,
    save: Annotated[
        bool, typer.Option("--save-result", help="Write the result as JSON.", rich_help_panel=OUTPUT)
    ] = False,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="The same with every request.", rich_help_panel=OUTPUT)
    ] = False,
    result_dir: Annotated[Path, typer.Option(help="Where to write it.", rich_help_panel=OUTPUT)] = Path(),
    result_filename: Annotated[
        str | None, typer.Option(help="Default: from label, load and date.", rich_help_panel=OUTPUT)
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", help="Added to the JSON; may be repeated.", rich_help_panel=OUTPUT),
    ] = None,
    label: Annotated[str | None, typer.Option(help="Name of this run.", rich_help_panel=OUTPUT)] = None,
    disable_tqdm: Annotated[
        bool, typer.Option("--disable-tqdm", help="No progress bar.", rich_help_panel=OUTPUT)
    ] = False,
) -> None:
    """Load a server that speaks OpenAI's API, and measure it."""
    if dataset_name == "custom" and dataset_path is None:
        raise typer.BadParameter("--dataset-name custom needs --dataset-path")
    if dataset_name == "random" and (dataset_path is not None or prompt is not None):
        raise typer.BadParameter("--dataset-name random excludes --dataset-path and --prompt")
    try:
        options = BenchOptions(
            base_url=base_url.rstrip("/"),
            endpoint=endpoint,
            model=model,
            headers=parse_headers(header or [], api_key),
            seed=seed,
            request_rate=request_rate,
            burstiness=burstiness,
            arrival=arrival,
            is_exact=is_exact,
            max_concurrency=max_concurrency,
            num_prompts=num_prompts,
            duration_s=duration,
            grace_period_s=grace_period,
            prompt=prompt,
            dataset_path=dataset_path,
            random_input_len=random_input_len,
            random_output_len=random_output_len,
            random_range_ratio=random_range_ratio,
            vocab_size=vocab_size,
            temperature=temperature,
            ignore_eos=ignore_eos,
            extra_body=parse_extra_body(extra_body),
            num_warmups=num_warmups,
            timeout_s=timeout,
            ready_check_timeout_s=ready_check_timeout_sec,
            max_error_rate=max_error_rate,
            goodput_s=parse_goodput(goodput or []),
            server_metrics=server_metrics,
            percentile_metrics=tuple(_words(percentile_metrics)),
            metric_percentiles=tuple(float(word) for word in _words(metric_percentiles)),
            metadata=dict(_pair(word, "=", "--metadata") for word in metadata or []),
            label=label,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    path = result_dir / (result_filename or default_filename(options)) if save or save_detailed else None
    if path is not None:
        _check_writable(path)
    result = _run(options, is_quiet=disable_tqdm)
    summary = summarize(result)
    print_report(Console(highlight=False), result, summary)
    if path is not None:
        save_result(path, result_json(result, summary, is_detailed=save_detailed))
        typer.echo(f"saved {path}")
    if is_failure(summary, max_error_rate):
        raise typer.Exit(1)


def _check_writable(path: Path) -> None:
    """Before the run, since afterwards its result would be lost. An older one stays until there is a newer."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if path.stat().st_size == 0:
            path.unlink()
    except OSError as error:
        raise typer.BadParameter(f"the result cannot be written: {error}") from error


def is_failure(summary: Summary, max_error_rate: float | None) -> bool:
    """Whether the command should say so by its exit code: nothing succeeded, or too much failed."""
    if summary.totals.num_completed == 0:
        return True
    return max_error_rate is not None and summary.error_rate > max_error_rate


def _run(options: BenchOptions, *, is_quiet: bool) -> BenchResult:
    try:
        with _progress_bar(is_quiet=is_quiet) as progress:
            return asyncio.run(run_benchmark(options, progress))
    except InvalidDataset as error:
        raise typer.BadParameter(str(error)) from error
    except ServerNotReady as error:
        Console(stderr=True, highlight=False).print("error:", escape(str(error)))
        raise typer.Exit(1) from error


@contextmanager
def _progress_bar(*, is_quiet: bool) -> Iterator[Progress]:
    """On standard error, so that the report can be redirected; silent where that is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_off = is_quiet or not console.is_terminal
    with ProgressBar(*columns, console=console, transient=True, disable=is_off) as bar:
        task = bar.add_task("starting", total=None)

        def on_phase(name: str, total: int | None) -> None:
            bar.reset(task, description=name, total=total)

        def on_done(record: RequestRecord) -> None:
            bar.advance(task)

        yield Progress(on_phase, on_done)


def parse_headers(headers: Sequence[str], api_key: str | None) -> dict[str, str]:
    """K:V words; an explicit authorization header wins over the key."""
    authorization = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return authorization | {key.lower(): value for key, value in (_pair(word, ":", "--header") for word in headers)}


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """'ttft:200 tpot:50' in milliseconds -> seconds. First tokens and ends count from the intended time."""
    pairs = (_pair(word, ":", "--goodput") for limit in limits for word in _words(limit))
    corrected = {"ttft": "ttft_corrected", "e2el": "e2el_corrected"}
    return {corrected.get(name, name): float(limit_ms) / 1e3 for name, limit_ms in pairs}


def parse_extra_body(text: str | None) -> dict[str, Any]:
    """Raises ValueError unless it is a JSON object."""
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise ValueError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"--extra-body must be a JSON object, got {text}")
    return fields


def default_filename(options: BenchOptions) -> str:
    """Such as octavo-8qps-20260131-120000.json."""
    load = f"{options.request_rate:g}qps" + (
        "" if options.max_concurrency is None else f"-concurrency{options.max_concurrency}"
    )
    name = "-".join([options.label or "octavo", load, time.strftime("%Y%m%d-%H%M%S")])
    return re.sub(r"[^\w.-]", "_", name) + ".json"


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _pair(word: str, separator: str, option: str) -> tuple[str, str]:
    key, found, value = word.partition(separator)
    if not found or not key:
        raise ValueError(f"{option} takes KEY{separator}VALUE, got {word!r}")
    return key.strip(), value.strip()


def main() -> None:
    """`python -m loadgen`."""
    typer.run(bench)
