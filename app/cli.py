"""The command line: `octavo serve`, `pull`, `bench`, `info`; `python -m app` is the same.

The flags of `serve` and `info` are made from the fields of `Settings`, so that a setting is named and described once.
Whatever a command does not need is imported inside it: `serve` should listen within two seconds.
"""

import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from app.settings import ENV_PREFIX, Settings, SettingsError, flag_of, load_settings
from core import EMBEDDED_MODEL, InvalidRequest, ModelLoadError, kv_memory, numerics

logger = logging.getLogger(__name__)
cli = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
EXIT_USAGE = 2
EXIT_FAILED = 1
# Two threads run Python now and then, the event loop and the step: at the default of 5 ms each waits for the other
# longer than a small model's step takes.
SWITCH_INTERVAL_S = 0.0005


_SHOWN = int | float | str  # a default of None, or one that is worked out, is told in words


def _option(name: str, annotation: Any, description: str, default: Any) -> Any:
    """A field of Settings as a flag. Values go over as text: Settings parses and judges them, like variables."""
    default = ", ".join(default) if isinstance(default, tuple) else default
    shown = f" [default: {default}]" if default != "" and default is not False and isinstance(default, _SHOWN) else ""
    text = f"{description}{shown} [{ENV_PREFIX}{name.upper()}]"
    if annotation is bool:
        return Annotated[bool | None, typer.Option(f"{flag_of(name)}/{flag_of('no_' + name)}", help=text)]
    kind: Any = list[str] | None if str(annotation).startswith("tuple") else str | None
    return Annotated[kind, typer.Option(flag_of(name), help=text, metavar="TEXT")]


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a flag for every field of Settings, and hands it the Settings."""
    options = {
        name: _option(name, field.annotation, field.description or "", field.default)
        for name, field in Settings.model_fields.items()
    }
    options = {"argument": Annotated[str | None, typer.Argument(metavar="MODEL", help="Same as --model.")]} | options

    def wrapped(argument: str | None = None, **flags: Any) -> None:
        if argument is not None:
            flags["model"] = argument
        command(_settings({name: value for name, value in flags.items() if value not in (None, [])}))

    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]
    vars(wrapped)["__signature__"] = inspect.Signature(parameters)
    wrapped.__annotations__ = options
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    return wrapped


def _settings(flags: Mapping[str, Any]) -> Settings:
    try:
        return load_settings({name: tuple(v) if isinstance(v, list) else v for name, v in flags.items()})
    except SettingsError as error:
        _fail(str(error), EXIT_USAGE)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"octavo: {message}", err=True)
    raise typer.Exit(code)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"octavo {importlib.metadata.version('octavo')}")
        raise typer.Exit


@cli.callback()
def octavo(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """An LLM serving engine you can read in an afternoon, behind OpenAI's API."""


@cli.command()
@_with_settings
def serve(settings: Settings) -> None:
    """Serve a model behind OpenAI's API."""
    from app import logs
    from app.listening import CannotListen, bind

    logs.configure(settings.log_level, settings.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        sockets = bind(settings.host, settings.port)
    except CannotListen as error:
        _fail(str(error), EXIT_FAILED)
    with ThreadPoolExecutor(1) as pool:
        from app.factory import create_app, load

        loading = pool.submit(load, settings)
        from app.server import run  # uvicorn takes a while to import: meanwhile the model loads

        try:
            engine = loading.result()
        except (ModelLoadError, InvalidRequest) as error:
            _fail(str(error), EXIT_FAILED)
    raise typer.Exit(run(create_app(settings, engine), settings, sockets))


@cli.command()
@_with_settings
def info(settings: Settings) -> None:
    """Say what a model's KV cache takes and how many requests fit, without loading the model."""
    model = settings.model
    if model != EMBEDDED_MODEL:
        from app.hub import resolve_model

    try:
        if model != EMBEDDED_MODEL:
            model = str(resolve_model(model, cache_dir=settings.cache_dir))
        config = settings.engine_config(model)
        memory, chosen = kv_memory(config), numerics(config)
    except (ModelLoadError, InvalidRequest) as error:
        _fail(str(error), EXIT_FAILED)
    typer.echo(f"model                  {settings.model}")
    typer.echo(f"numerics               {chosen}")
    typer.echo(f"KV bytes per token     {memory.bytes_per_token:,}")
    typer.echo(f"KV blocks              {memory.num_blocks:,} of {memory.block_size} tokens")
    typer.echo(f"KV tokens              {memory.num_tokens:,}")
    typer.echo(f"concurrent requests    {memory.max_concurrency:.2f} of the longest length")


@cli.command()
def pull(
    name: Annotated[str, typer.Argument(help="smollm2")],
    cache_dir: Annotated[Path | None, typer.Option(help="Where to put it.")] = None,
) -> None:
    """Fetch a model into the cache."""
    from app import hub

    try:
        directory = _settings({"cache_dir": cache_dir} if cache_dir else {}).cache_dir
        with hub.shown_progress() as report:
            file = hub.pull(name, cache_dir=directory, report=report)
    except ModelLoadError as error:
        _fail(str(error), EXIT_FAILED)
    typer.echo(str(file))


def main() -> None:
    """Entry point of `octavo`."""
    if sys.argv[1:2] not in (["serve"], ["info"], ["pull"]):
        from loadgen.cli import bench  # for the help it is named too; `serve` need not wait for it

        cli.command("bench")(bench)
    cli()
