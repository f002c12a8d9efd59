"""POST /v1/completions: text in, text on. Whole or streamed, the choices are written by the same `_Writer`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app import sse
from app.drafts import predicted_text
from app.errors import unsupported
from app.generation import (
    Ask,
    Job,
    sampling_params,
    stream_options,
    token_name,
)
from app.run import make_usage, shown_reason
from app.schemas import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from app.scripts import parse_script
from app.service import Service, ServiceOf, trace_id
from core import InvalidRequest, OutputToken, RequestOutput, Tokenizer

router = APIRouter()
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", response_model=CompletionResponse)
async def create_completion(body: CompletionRequest, request: Request, service: ServiceOf) -> Response:
    """Continue one prompt or several."""
    arrival_s = time.monotonic()
    body.refuse_unsupported()
    options = stream_options(body)
    ask = _ask(service, body, request, arrival_s)
    job = await service.prepare(ask)
    writer = _Writer(job, body, service.engine.tokenizer, service.fingerprint)
    headers = {"x-request-id": job.trace_id}
    if _generates_nothing(body):
        return _json(writer.chunk(writer.prompts_alone(), usage=make_usage(job.prompts)), headers)
    if body.stream:
        return sse.EventStream(sse.chunk_events(service.run(job), writer, options), headers)
    return _json(await sse.while_connected(request.receive, _complete(service, job, writer)), headers)


def _ask(service: Service, body: CompletionRequest, request: Request, arrival_s: float) -> Ask:
    best_of = _best_of(body)
    if body.echo and body.logprobs is not None:
        raise unsupported("echo", "together with logprobs is not supported by this server")
    if _generates_nothing(body) and body.stream:
        raise InvalidRequest("max_tokens is 0, a stream needs at least 1", "max_tokens")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return Ask(
        kind="cmpl",
        model=service.check_model(body.model),
        prompt=body.prompt,
        params=sampling_params(
            body,
            max_tokens=None if _generates_nothing(body) else max_tokens,
            num_logprobs=0 if best_of is not None and body.logprobs is None else body.logprobs,
        ),
        n=body.n or 1,
        best_of=best_of,
        is_max_tokens_default=body.max_tokens is None,
        cache_salt=service.cache_salt(request, body),
        script=parse_script(body.script, is_enabled=service.settings.enable_scripts),
        prediction=predicted_text(body.prediction),
        add_special_tokens=body.add_special_tokens is not False,
        trace_id=trace_id(request, body.request_id),
        arrival_s=arrival_s,
    )


def _best_of(body: CompletionRequest) -> int | None:
    """How many samples to choose from; None where all that are drawn are shown."""
    n = body.n or 1
    if body.best_of is None or body.best_of == n:
        return None
    if body.best_of < n:
        raise InvalidRequest(f"best_of is {body.best_of}, at least n = {n} is needed", "best_of")
    if body.stream:
        raise InvalidRequest("best_of above n cannot be streamed: the best are known at the end", "best_of")
    return body.best_of


def _generates_nothing(body: CompletionRequest) -> bool:
    """Echo of the prompt alone: the one use of max_tokens 0."""
    return bool(body.echo) and body.max_tokens == 0


async def _complete(service: Service, job: Job, writer: "_Writer") -> CompletionResponse:
    with service.run(job) as run:
        outputs = await run.collect()
    return writer.chunk([writer.whole(index, output) for index, output in enumerate(outputs)], **run.totals())


def _json(response: CompletionResponse, headers: dict[str, str]) -> Response:
    content = response.__pydantic_serializer__.to_json(response, exclude_unset=True)
    return Response(content, headers=headers, media_type="application/json")


class _Writer:
    """Writes the choices of one job. Remembers, per choice, how long its text is by now."""

    def __init__(self, job: Job, body: CompletionRequest, tokenizer: Tokenizer, fingerprint: str) -> None:
        self._job = job
        self._body = body
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._offsets: dict[int, int] = {}

    def chunk(self, choices: list[CompletionChoice], **totals: Any) -> CompletionResponse:
        return CompletionResponse(
            id=self._job.id,
            object="text_completion",
            created=self._job.created,
            model=self._job.model,
            system_fingerprint=self._fingerprint,
            choices=choices,
            **totals,
        )

    def whole(self, index: int, output: RequestOutput) -> CompletionChoice:
        """A finished choice, the prompt before it if it is echoed."""
        echoed = self._start(index)
        choice = self._choice(index, output, **self._prompt_ids(index))
        choice.text = echoed + choice.text
        return choice

    def totals_chunk(self, totals: Mapping[str, Any]) -> CompletionResponse:
        return self.chunk([], **totals)

    def deltas(self, index: int, output: RequestOutput, extra: Mapping[str, Any]) -> Iterator[CompletionResponse]:
        """What one output adds to its choice in a stream: nothing while all of it is held back."""
        is_first = index not in self._offsets
        echoed = self._start(index) if is_first else ""
        if echoed:
            yield self.chunk([self._prompt_alone(index, echoed, is_finished=False)], **extra)
        if output.text or output.tokens or output.is_finished:
            ids = self._prompt_ids(index) if is_first and not echoed else {}
            yield self.chunk([self._choice(index, output, **ids)], **extra)

    def prompts_alone(self) -> list[CompletionChoice]:
        """Every choice when nothing is generated."""
        return [self._prompt_alone(i, self._start(i), is_finished=True) for i in range(self._job.num_choices)]

    def _start(self, index: int) -> str:
        """The echoed prompt, '' without echo; its text counts for the offsets of what follows."""
        prompt = self._job.prompt_of(index)
        echoed = "" if not self._body.echo else prompt.text
        if echoed is None:
            echoed = self._tokenizer.decode(prompt.token_ids)
        self._offsets[index] = len(echoed)
        return echoed

    def _prompt_alone(self, index: int, text: str, *, is_finished: bool) -> CompletionChoice:
        ids: dict[str, Any] = {**self._prompt_ids(index), **({"token_ids": []} if self._body.return_token_ids else {})}
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=None,
            finish_reason="length" if is_finished else None,
            stop_reason=None,
            **ids,
        )

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._job.prompt_of(index).token_ids)}

    def _choice(self, index: int, output: RequestOutput, **ids: Any) -> CompletionChoice:
        if self._body.return_token_ids:
            ids["token_ids"] = [token.token_id for token in output.tokens]
        return CompletionChoice(
            index=index,
            text=output.text,
            logprobs=None if self._body.logprobs is None else self._logprobs(index, output.tokens),
            finish_reason=shown_reason(output),
            stop_reason=output.stop_reason,
            **ids,
        )

    def _logprobs(self, index: int, tokens: Sequence[OutputToken]) -> CompletionLogprobs:
        listed = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token in tokens:
            assert token.logprobs is not None
            others = [pair for pair in token.logprobs.top if pair[0] != token.token_id]
            top = {token_name(self._tokenizer, id_, token.logprobs): value for id_, value in others}
            # Under its own text, so that looking up a token among its alternatives always finds it.
            top[token.text] = token.logprobs.logprob
            listed.tokens.append(token.text)
            listed.token_logprobs.append(token.logprobs.logprob)
            listed.top_logprobs.append(dict(sorted(top.items(), key=lambda item: -item[1])))
            listed.text_offset.append(self._offsets[index])
            self._offsets[index] += len(token.text)
        return listed
