"""POST /v1/chat/completions: messages become a prompt by the model's template, the answer a message."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.chat_template import ChatTemplate, render_prompt
from app.chunks import respond
from app.drafts import predicted_text
from app.formats import format_field
from app.generation import Ask, Job, renamed, sampling_params, stream_options
from app.logprobs import LogprobsWriter, prompt_logprobs
from app.parts import Call, CallArguments, CallStart, Part, PartReader, Text, assembled
from app.run import shown_reason
from app.schemas.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    Delta,
    FunctionCallDelta,
    MadeFunctionCall,
    MadeToolCall,
    ToolCallDelta,
)
from app.scripts import parse_script
from app.service import Service, ServiceOf, trace_id
from app.tools import ToolUse, tool_use
from core import InvalidRequest, OutputToken, RequestOutput, SamplingParams, Tokenizer

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatResponse)
async def create_chat_completion(body: ChatRequest, request: Request, service: ServiceOf) -> Response:
    """Answer a conversation."""
    options = stream_options(body)
    chat = await prepare(service, body, request)
    writer = _Writer(chat.job, body, chat.tools, service.engine.tokenizer, service.fingerprint)
    return await respond(request, service.run(chat.job), writer, options, is_streamed=body.stream)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that is ready to be answered."""

    job: Job
    tools: ToolUse


async def prepare(service: Service, body: ChatRequest, request: Request, *, kind: str = "chatcmpl") -> Chat:
    """Everything up to the engine. `kind` starts the id. Raises what the client is to be told."""
    arrival_s = time.monotonic()
    body.refuse_unsupported(is_strict=service.settings.strict_fields)
    tools = tool_use(body)
    ask = await _ask(service, body, tools, request, arrival_s)
    return Chat(await service.prepare(replace(ask, kind=kind)), tools)


def prompt_text(template: ChatTemplate, body: ChatRequest, tools: ToolUse) -> str:
    """The conversation as the model sees it; for a long one it takes its time."""
    return render_prompt(
        template,
        body.messages,
        tools=tools.definitions,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=body.chat_template_kwargs or {},
    )


async def _ask(service: Service, body: ChatRequest, tools: ToolUse, request: Request, arrival_s: float) -> Ask:
    model = service.check_model(body.model)
    params = _params(body, tools)
    script = parse_script(body.script, is_enabled=service.settings.enable_scripts)
    text = await service.in_tokenizer(prompt_text, service.require_chat_template(), body, tools)
    if tools.tools and params.structured_output is not None:
        try:
            await service.in_compiler(tools.compile, service.engine, params.structured_output)
        except InvalidRequest as error:
            raise renamed(error, _names(body)) from error
    return Ask(
        kind="chatcmpl",
        model=model,
        prompt=text,
        params=params,
        names=_names(body),
        n=body.n or 1,
        bad_words=body.bad_words or (),
        max_prompt_tokens=body.truncate_prompt_tokens,
        cache_salt=service.cache_salt(request, body),
        script=script,
        prediction=predicted_text(body.prediction),
        add_special_tokens=bool(body.add_special_tokens),  # the template writes them
        trace_id=trace_id(request, body.request_id),
        arrival_s=arrival_s,
    )


def _params(body: ChatRequest, tools: ToolUse) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:  # some clients send 0 for none
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    names = _names(body)
    try:
        params = sampling_params(
            body,
            max_tokens=getattr(body, names["max_tokens"]),
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            num_prompt_logprobs=body.prompt_logprobs,
        )
        return replace(params, structured_output=tools.structured_output(params.structured_output))
    except InvalidRequest as error:
        raise renamed(error, names) from None


def _names(body: ChatRequest) -> dict[str, str]:
    """What the engine's fields are called in this body."""
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return {
        "prompt": "messages",
        "max_tokens": limit,
        "logprobs": "top_logprobs",
        "structured_output": format_field(body) or "tools",
    }


class _Writer:
    """Writes the choices of one job. Remembers of each choice that has begun how far its text is read."""

    def __init__(self, job: Job, body: ChatRequest, tools: ToolUse, tokenizer: Tokenizer, fingerprint: str) -> None:
        self._job = job
        self._body = body
        self._tools = tools
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._logprobs_writer = LogprobsWriter(
            tokenizer, num_top=body.top_logprobs or 0, names_ids=bool(body.return_tokens_as_token_ids)
        )
        self._readers: dict[int, PartReader] = {}
        self._calling: set[int] = set()

    def answer(self, outputs: Sequence[RequestOutput], totals: Mapping[str, Any]) -> ChatResponse:
        return ChatResponse(
            object="chat.completion",
            choices=[self.whole(index, output) for index, output in enumerate(outputs)],
            **totals,
            **self.head(),
            **self.prompt_ids(),
            **self.prompt_logprobs(outputs[0]),
        )

    def head(self) -> dict[str, Any]:
        """What every chunk has."""
        job = self._job
        return {"id": job.id, "created": job.created, "model": job.model, "system_fingerprint": self._fingerprint}

    def prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._job.prompts[0].token_ids)} if self._body.return_token_ids else {}

    def prompt_logprobs(self, output: RequestOutput) -> dict[str, Any]:
        num_top, token_ids = self._body.prompt_logprobs, self._job.prompts[0].token_ids
        if num_top is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._tokenizer, token_ids, output.prompt_logprobs or (), num_top)}

    def whole(self, index: int, output: RequestOutput) -> ChatChoice:
        reason = shown_reason(output)
        assert reason is not None
        text, calls = assembled(self._tools.parts(output.text, reason))
        return ChatChoice(
            index=index,
            message=_message(text, calls),
            logprobs=self._logprobs(output.tokens),
            finish_reason=self._tools.reason(reason, has_calls=bool(calls)),
            stop_reason=output.stop_reason,
            **self._token_ids(output),
        )

    def chunk(self, choices: list[ChatChunkChoice], extra: Mapping[str, Any]) -> ChatChunk:
        return ChatChunk(object="chat.completion.chunk", choices=choices, **self.head(), **extra)

    def totals_chunk(self, totals: Mapping[str, Any]) -> ChatChunk:
        return self.chunk([], totals)

    def deltas(self, index: int, output: RequestOutput, extra: Mapping[str, Any]) -> Iterator[ChatChunk]:
        """The role before a choice's first part, a delta for each part, and an empty one with the reason."""
        if index not in self._readers:
            ids = {} if self._readers else self.prompt_ids()
            self._readers[index] = self._tools.reader()
            content = None if self._tools.must_call else ""
            yield self.chunk([_chunk_choice(index, Delta(role="assistant", content=content))], {**extra, **ids})
        for number, delta in enumerate(self._part_deltas(index, output)):
            choice = _chunk_choice(index, delta)
            if number == 0:  # the first one has the tokens of them all
                choice = choice.model_copy(
                    update={"logprobs": self._logprobs(output.tokens), **self._token_ids(output)}
                )
            yield self.chunk([choice], extra)
        if (reason := shown_reason(output)) is not None:
            choice = _chunk_choice(index, Delta())
            choice.finish_reason = self._tools.reason(reason, has_calls=index in self._calling)
            choice.stop_reason = output.stop_reason
            yield self.chunk([choice], extra)

    def _part_deltas(self, index: int, output: RequestOutput) -> list[Delta]:
        """At least one where there are tokens: what is held back may be their text, but not that they came."""
        reader = self._readers[index]
        parts = [*reader.feed(output.text), *(reader.finish() if output.is_finished else ())]
        if any(isinstance(part, CallStart) for part in parts):
            self._calling.add(index)
        if not parts and output.tokens:
            return [Delta(content="") if self._tools.choice == "none" else Delta()]
        return [_delta(part) for part in parts]

    def _token_ids(self, output: RequestOutput) -> dict[str, Any]:
        return {"token_ids": [token.token_id for token in output.tokens]} if self._body.return_token_ids else {}

    def _logprobs(self, tokens: Sequence[OutputToken]) -> ChatLogprobs | None:
        return self._logprobs_writer.chat(tokens) if self._body.logprobs else None


def _chunk_choice(index: int, delta: Delta) -> ChatChunkChoice:
    return ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)


def _message(text: str, calls: Sequence[Call]) -> AssistantMessage:
    made = [
        MadeToolCall(id=call.id, type="function", function=MadeFunctionCall(name=call.name, arguments=call.arguments))
        for call in calls
    ]
    content = None if calls and not text else text
    return AssistantMessage(role="assistant", content=content, refusal=None, **({"tool_calls": made} if made else {}))


def _delta(part: Part) -> Delta:
    match part:
        case Text(text):
            return Delta(content=text)
        case CallStart(index, id_, name):
            function = FunctionCallDelta(name=name, arguments="")
            return Delta(tool_calls=[ToolCallDelta(index=index, id=id_, type="function", function=function)])
        case CallArguments(index, piece):
            return Delta(tool_calls=[ToolCallDelta(index=index, function=FunctionCallDelta(arguments=piece))])
