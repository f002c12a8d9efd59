"""POST /v1/chat/completions: messages become a prompt by the model's template, the answer a message."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app import sse
from app.chat_template import render_prompt
from app.generation import Ask, Job, parse_script, renamed, sampling_params, shown_reason, stream_options
from app.schemas import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    Delta,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from app.service import Service, ServiceOf, trace_id
from core import InvalidRequest, OutputToken, RequestOutput, SamplingParams, Tokenizer

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatResponse)
async def create_chat_completion(body: ChatRequest, request: Request, service: ServiceOf) -> Response:
    """Answer a conversation."""
    arrival_s = time.monotonic()
    body.refuse_unsupported()
    options = stream_options(body)
    ask = await _ask(service, body, request, arrival_s)
    job = await service.prepare(ask)
    writer = _Writer(job, body, service.engine.tokenizer, service.fingerprint)
    headers = {"x-request-id": job.trace_id}
    if body.stream:
        return sse.EventStream(sse.chunk_events(service.run(job), writer, options), headers)
    response = await sse.while_connected(request.receive, _complete(service, job, writer))
    content = response.__pydantic_serializer__.to_json(response, exclude_unset=True)
    return Response(content, headers=headers, media_type="application/json")


async def _ask(service: Service, body: ChatRequest, request: Request, arrival_s: float) -> Ask:
    model = service.check_model(body.model)
    params = _params(body)
    script = parse_script(body.script, is_enabled=service.settings.enable_scripts)
    text = await service.in_tokenizer(
        render_prompt,
        service.require_chat_template(),
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )
    return Ask(
        kind="chatcmpl",
        model=model,
        prompt=text,
        params=params,
        names=_names(body),
        n=body.n or 1,
        cache_salt=service.cache_salt(request, body),
        script=script,
        add_special_tokens=bool(body.add_special_tokens),  # the template writes them
        trace_id=trace_id(request, body.request_id),
        arrival_s=arrival_s,
    )


def _params(body: ChatRequest) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    names = _names(body)
    try:
        return sampling_params(
            body,
            max_tokens=getattr(body, names["max_tokens"]),
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
    except InvalidRequest as error:
        raise renamed(error, names) from None


def _names(body: ChatRequest) -> dict[str, str]:
    """What the engine's fields are called in this body."""
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return {"prompt": "messages", "max_tokens": limit}


async def _complete(service: Service, job: Job, writer: "_Writer") -> ChatResponse:
    with service.run(job) as run:
        outputs = await run.collect()
    return ChatResponse(
        object="chat.completion",
        choices=[writer.whole(index, output) for index, output in enumerate(outputs)],
        usage=run.usage(),
        **writer.head(),
        **writer.prompt_ids(),
    )


class _Writer:
    """Writes the choices of one job. Remembers which choices have begun."""

    def __init__(self, job: Job, body: ChatRequest, tokenizer: Tokenizer, fingerprint: str) -> None:
        self._job = job
        self._body = body
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._begun: set[int] = set()

    def head(self) -> dict[str, Any]:
        """What every chunk has."""
        job = self._job
        return {"id": job.id, "created": job.created, "model": job.model, "system_fingerprint": self._fingerprint}

    def prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._job.prompts[0].token_ids)} if self._body.return_token_ids else {}

    def whole(self, index: int, output: RequestOutput) -> ChatChoice:
        reason = shown_reason(output)
        assert reason is not None
        return ChatChoice(
            index=index,
            message=AssistantMessage(role="assistant", content=output.text, refusal=None),
            logprobs=self._logprobs(output.tokens),
            finish_reason=reason,
            stop_reason=output.stop_reason,
            **self._token_ids(output),
        )

    def chunk(self, choices: list[ChatChunkChoice], extra: Mapping[str, Any]) -> ChatChunk:
        return ChatChunk(object="chat.completion.chunk", choices=choices, **self.head(), **extra)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return self.chunk([], {"usage": usage})

    def deltas(self, index: int, output: RequestOutput, extra: Mapping[str, Any]) -> Iterator[ChatChunk]:
        """The role before a choice's first text, the text if there is some, and an empty delta with the reason."""
        if index not in self._begun:
            ids = {} if self._begun else self.prompt_ids()
            self._begun.add(index)
            yield self.chunk([_chunk_choice(index, Delta(role="assistant", content=""))], {**extra, **ids})
        if output.text or output.tokens:
            choice = ChatChunkChoice(
                index=index,
                delta=Delta(content=output.text),
                logprobs=self._logprobs(output.tokens),
                finish_reason=None,
                **self._token_ids(output),
            )
            yield self.chunk([choice], extra)
        if output.is_finished:
            choice = _chunk_choice(index, Delta())
            choice.finish_reason, choice.stop_reason = shown_reason(output), output.stop_reason
            yield self.chunk([choice], extra)

    def _token_ids(self, output: RequestOutput) -> dict[str, Any]:
        return {"token_ids": [token.token_id for token in output.tokens]} if self._body.return_token_ids else {}

    def _logprobs(self, tokens: Sequence[OutputToken]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return ChatLogprobs(content=[self._token(token) for token in tokens], refusal=None)

    def _token(self, token: OutputToken) -> TokenLogprob:
        assert token.logprobs is not None
        return TokenLogprob(
            **self._named(token.token_id, token.text),
            logprob=token.logprobs.logprob,
            top_logprobs=[TopLogprob(**self._named(id_), logprob=value) for id_, value in token.logprobs.top],
        )

    def _named(self, token_id: int, text: str = "") -> dict[str, Any]:
        """A token's display text and its bytes; a scripted one may lie outside the vocabulary, and is its text."""
        if token_id >= self._tokenizer.vocab_size:
            return {"token": text, "bytes": list(text.encode())}
        data = self._tokenizer.token_bytes(token_id)
        return {"token": self._tokenizer.token_text(token_id), "bytes": list(data)}


def _chunk_choice(index: int, delta: Delta) -> ChatChunkChoice:
    return ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
