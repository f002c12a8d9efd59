"""One streaming completion over HTTP, timed: Prompt in, RequestRecord out, never an exception for a bad answer.

The clock is read immediately before the request is handed to the connection and once per network read, so events
that arrived together have one time. Connecting is part of the first token's latency. Nothing is retried: a
refused request is a result.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadgen.record import CANCELLED, CONNECTION, TIMEOUT, Failure, RequestRecord
from loadgen.stream import SseParser, StreamFailure, StreamReader, Usage, error_text
from loadgen.workload import Prompt


def open_http(base_url: str, headers: Mapping[str, str]) -> httpx.AsyncClient:
    """A client that adds nothing of its own to what is measured: no proxy, no compression, no limits, no timeout."""
    return httpx.AsyncClient(
        base_url=base_url,
        headers=[(name.encode(), value.encode()) for name, value in {"accept-encoding": "identity", **headers}.items()],
        timeout=None,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


@dataclass(frozen=True)
class RequestOptions:
    """What all requests of a run have in common. A null in `extra_body` takes that field out of the body."""

    endpoint: str = "/v1/completions"
    model: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0

    @property
    def is_chat(self) -> bool:
        return self.endpoint.rstrip("/").endswith("/chat/completions")

    def body(self, prompt: Prompt) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": prompt.max_tokens,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos or None,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
        }
        if self.is_chat:
            fields["messages"] = [{"role": "user", "content": prompt.content}]
        else:
            fields["prompt"] = prompt.content
        return {key: value for key, value in {**fields, **self.extra_body}.items() if value is not None}


class CompletionClient:
    """Sends prompts to one endpoint. `clock` is the run's; by default the event loop's own monotonic one."""

    def __init__(
        self, http: httpx.AsyncClient, options: RequestOptions, *, clock: Callable[[], float] | None = None
    ) -> None:
        self._http = http
        self._options = options
        self._clock = clock or asyncio.get_running_loop().time

    async def complete(
        self, index: int, prompt: Prompt, *, t_sched: float, t_queue: float, deadline: float | None = None
    ) -> RequestRecord:
        """Send and read to the end, the timeout or the deadline (of the event loop's clock), whichever is first."""
        request = self._http.build_request(
            "POST",
            self._options.endpoint,
            content=json.dumps(self._options.body(prompt)).encode(),
            headers={"content-type": "application/json"},
        )
        exchange = _Exchange(self._clock)
        timeout_s = self._options.timeout_s
        remaining_s = timeout_s if deadline is None else deadline - asyncio.get_running_loop().time()
        t_send = self._clock()
        try:
            async with asyncio.timeout(min(timeout_s, remaining_s)):
                await exchange.run(self._http, request)
            failure = None
        except TimeoutError:
            kind = TIMEOUT if timeout_s <= remaining_s else CANCELLED
            failure = Failure(kind, f"gave up after {min(timeout_s, remaining_s):.3g} s")
        except StreamFailure as error:
            failure = Failure(error.kind, error.detail)
        except httpx.HTTPError as error:
            failure = Failure(CONNECTION, f"{type(error).__name__}: {error}"[:200])
        return exchange.record(index, prompt, failure, t_sched=t_sched, t_queue=t_queue, t_send=t_send)


class _Exchange:
    """One request's way through the connection; keeps what arrived, also when it is cut short."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reader = StreamReader()
        self._status: int | None = None

    async def run(self, http: httpx.AsyncClient, request: httpx.Request) -> None:
        """Raises StreamFailure, httpx.HTTPError or TimeoutError when there is no whole answer."""
        response = await http.send(request, stream=True)
        try:
            self._status = response.status_code
            if response.status_code != httpx.codes.OK:
                raise StreamFailure(f"http {response.status_code}", await _read_error(response))
            parser = SseParser()
            async for piece in response.aiter_raw():
                time_s = self._clock()
                for data in parser.feed(piece):
                    self._reader.take(data, time_s)
            self._reader.is_done |= parser.has_done_at_end
            self._reader.check_complete()
        finally:
            await response.aclose()

    def record(
        self,
        index: int,
        prompt: Prompt,
        failure: Failure | None,
        *,
        t_sched: float,
        t_queue: float,
        t_send: float,
    ) -> RequestRecord:
        usage = self._reader.usage or Usage()
        t_first, t_last = self._reader.first_and_last_s or (None, None)
        return RequestRecord(
            index=index,
            t_sched=t_sched,
            t_queue=t_queue,
            t_send=t_send,
            t_end=self._clock(),
            t_first=t_first,
            t_last=t_last,
            chunks=self._reader.chunks,
            token_source=self._reader.token_source,
            num_planned_prompt_tokens=prompt.num_tokens,
            num_planned_output_tokens=prompt.max_tokens,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_billed_output_tokens=usage.num_output_tokens,
            finish_reason=self._reader.finish_reason,
            status=self._status,
            failure=failure,
        )


async def _read_error(response: httpx.Response) -> str:
    text = (await response.aread()).decode(errors="replace")
    try:
        return error_text(json.loads(text))
    except ValueError:
        return text[:200]
