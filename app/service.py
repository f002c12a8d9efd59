"""What the routes share: the engine behind its loop, the tokenizing thread, and the names the model answers to."""

import asyncio
import importlib.metadata
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Annotated, ParamSpec, TypeVar

from fastapi import Depends, Request

from app.access import key_name
from app.engine_loop import EngineLoop
from app.errors import model_not_found
from app.generation import Ask, Job, build, renamed
from app.logs import log_stats
from app.metrics import Metrics
from app.run import Run
from app.schemas.embeddings import EmbeddingRequest
from app.schemas.generation import GenerationRequest
from app.settings import Settings
from app.shares import Shares
from app.tracing import tracing_to
from app.under_way import UnderWay
from core import Engine, InvalidRequest

if TYPE_CHECKING:
    from app.chat_template import ChatTemplate

P = ParamSpec("P")
T = TypeVar("T")


@cache
def package_version() -> str:
    return importlib.metadata.version("octavo")


class Service:
    """One engine and what stands around it, from `start` to `stop`."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.settings = settings
        self.engine = engine
        self.loop = EngineLoop(engine, max_queue=settings.max_queue, stall_timeout_s=settings.stall_timeout)
        shares = Shares(
            places=settings.max_num_seqs_per_key,
            requests_per_minute=settings.requests_per_minute_per_key,
            tokens_per_minute=settings.tokens_per_minute_per_key,
        )
        self._under_way = UnderWay(shares)
        self.metrics = Metrics(
            self.loop, shares, settings.model_names[0], has_legacy_names=settings.legacy_metric_names
        )
        self.created = int(time.time())
        self.version = package_version()
        self.fingerprint = f"octavo-{self.version}"
        self.tracing = tracing_to(settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None
        self._stats_task: asyncio.Task[None] | None = None
        # Its own thread, for a long text may take longer than many steps.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        # And one for grammars, of which a bad one takes seconds.
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="compiler")

    @property
    def model_name(self) -> str:
        """The name in responses and metrics; the others are aliases."""
        return self.settings.model_names[0]

    @cached_property
    def chat_template(self) -> "ChatTemplate | None":
        """The flag's or the model's; None when neither has one. Made on first use, since jinja2 is slow to import."""
        from app.chat_template import ChatTemplate

        source = self.settings.chat_template_source or self.engine.tokenizer.chat_template
        return None if source is None else ChatTemplate(source, self.engine.tokenizer.special_token_texts)

    def start(self) -> None:
        self.loop.start()
        self._stats_task = asyncio.create_task(log_stats(self.loop), name="stats line")

    async def stop(self) -> None:
        if self._stats_task is not None:
            self._stats_task.cancel()
        await self.loop.stop()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.shutdown)
        for threads in (self._tokenizing, self._compiling):
            threads.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str | None) -> str:
        """The name to answer with. A request may leave it out; an unknown one is 404."""
        if not name:
            return self.model_name
        if name not in self.settings.model_names:
            raise model_not_found(name)
        return name

    async def in_tokenizer(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what may take long for a long text in the tokenizing thread."""
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, call)

    async def in_compiler(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what compiles grammars in the compiling thread, so that neither texts nor steps wait for it."""
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._compiling, call)

    async def prepare(self, ask: Ask) -> Job:
        """Tokenize and check. Refused at once where nothing more is taken, of anybody or of this key."""
        self.loop.refuse_if_closed()
        self._under_way.refuse_beyond_share(key_name())
        if ask.params.structured_output is not None:
            try:
                await self.in_compiler(self.engine.compile, ask.params.structured_output)
            except InvalidRequest as error:
                raise renamed(error, ask.names) from error
        return await self.in_tokenizer(build, self.engine, ask)

    def run(self, job: Job) -> Run:
        return Run(
            self.loop,
            job,
            self._under_way,
            timeout_s=self.settings.request_timeout,
            tells_times=self.settings.enable_per_request_metrics,
            draft_metrics=self.settings.per_request_spec_decode_metrics,
        )

    def abort(self, ids: set[str] | None, *, owner: str | None) -> list[str]:
        """End the runs with one of these ids, or all (None), of one owner or of anybody (None); returns their ids."""
        found = self._under_way.found(ids, owner=owner)
        for run in found:
            run.abort()
        return [run.job.id for run in found]

    def cache_salt(self, request: Request, body: GenerationRequest | EmbeddingRequest) -> dict[str, str]:
        """What must be equal for two requests to share KV blocks: the key's name and the caller's salt, kept apart."""
        parts = {"api_key": getattr(request.state, "key_name", None), "cache_salt": body.cache_salt}
        return {name: value for name, value in parts.items() if value is not None}

    def require_chat_template(self) -> "ChatTemplate":
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template; give one with --chat-template", "messages")
        return self.chat_template


async def _service_of(request: Request) -> Service:  # async, or FastAPI would call it in a thread of its own
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceOf = Annotated[Service, Depends(_service_of)]


def trace_id(request: Request, body_id: str | None) -> str | None:
    """The caller's own id of this request: as its header has it, or its body, if it may stand in a header."""
    if given := request.headers.get("x-request-id"):
        return given
    return body_id if body_id and len(body_id) <= 256 and body_id.isascii() and body_id.isprintable() else None
