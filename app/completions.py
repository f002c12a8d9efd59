"""POST /v1/completions: text in, text on. Whole or streamed, the choices are written by the same `_Writer`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.chunks import respond
from app.drafts import predicted_text
from app.errors import unsupported
from app.formats import format_field
from app.generation import (
    Ask,
    Job,
    sampling_params,
    stream_options,
)
from app.logprobs import LogprobsWriter, joined, prompt_logprobs
from app.run import shown_reason
from app.schemas.completions import CompletionChoice, CompletionLogprobs, CompletionRequest, CompletionResponse
from app.schemas.generation import PromptLogprobs
from app.scripts import parse_script
from app.service import Service, ServiceOf, trace_id
from core import InvalidRequest, OutputToken, RequestOutput, Tokenizer

router = APIRouter()
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions", response_model=CompletionResponse)
async def create_completion(body: CompletionRequest, request: Request, service: ServiceOf) -> Response:
    """Continue one prompt or several."""
    arrival_s = time.monotonic()
    body.refuse_unsupported(is_strict=service.settings.strict_fields)
    options = stream_options(body)
    ask = _ask(service, body, request, arrival_s)
    job = await service.prepare(ask)
    writer = _Writer(job, body, service.engine.tokenizer, service.fingerprint)
    return await respond(request, service.run(job), writer, options, is_streamed=body.stream)


def _ask(service: Service, body: CompletionRequest, request: Request, arrival_s: float) -> Ask:
    best_of = _best_of(body)
    if body.max_completion_tokens not in (None, body.max_tokens):
        raise unsupported("max_completion_tokens", "is chat's, completions have max_tokens")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens is 0, which is for scoring a prompt, with echo; else at least 1", "max_tokens")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return Ask(
        kind="cmpl",
        model=service.check_model(body.model),
        prompt=body.prompt,
        params=sampling_params(
            body,
            max_tokens=max_tokens,
            num_logprobs=0 if best_of is not None and body.logprobs is None else body.logprobs,
            num_prompt_logprobs=_num_prompt_logprobs(body),
            may_be_empty=True,
        ),
        n=body.n or 1,
        best_of=best_of,
        echo=bool(body.echo),
        bad_words=body.bad_words or (),
        max_prompt_tokens=body.truncate_prompt_tokens,
        is_max_tokens_default=body.max_tokens is None,
        names={"structured_output": format_field(body) or "response_format"},
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
    if not body.best_of or body.best_of == n:
        return None
    if body.best_of < n:
        raise InvalidRequest(f"best_of is {body.best_of}, at least n = {n} is needed", "best_of")
    if body.stream:
        raise InvalidRequest("best_of above n cannot be streamed: the best are known at the end", "best_of")
    return body.best_of


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """Most alternatives that are wanted with the prompt's tokens: by name, or because the prompt is echoed."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((num for num in wanted if num is not None), default=None)


@dataclass(frozen=True, slots=True)
class _Echo:
    """A prompt as it is shown again, made once for all of its choices: with log-probabilities it is large."""

    text: str
    logprobs: CompletionLogprobs | None


class _Writer:
    """Writes the choices of one job. Remembers, per choice that has begun, how long its text is by now."""

    def __init__(self, job: Job, body: CompletionRequest, tokenizer: Tokenizer, fingerprint: str) -> None:
        self._job = job
        self._body = body
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._logprobs = LogprobsWriter(
            tokenizer, num_top=body.logprobs or 0, names_ids=bool(body.return_tokens_as_token_ids)
        )
        self._offsets: dict[int, int] = {}
        self._echoes: dict[int, _Echo] = {}  # by number of the prompt
        self._scores: dict[int, PromptLogprobs] = {}  # likewise

    def answer(self, outputs: Sequence[RequestOutput], totals: Mapping[str, Any]) -> CompletionResponse:
        return self.chunk([self.whole(index, output) for index, output in enumerate(outputs)], **totals)

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
        choice = self._choice(index, output, self._echo(index, output), **self._prompt_ids(index))
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = self._score(index, output, self._body.prompt_logprobs)
        return choice

    def _score(self, index: int, output: RequestOutput, num_top: int) -> PromptLogprobs:
        number = index // self._job.n
        if number not in self._scores:
            token_ids = self._job.prompts[number].token_ids
            self._scores[number] = prompt_logprobs(self._tokenizer, token_ids, output.prompt_logprobs or (), num_top)
        return self._scores[number]

    def totals_chunk(self, totals: Mapping[str, Any]) -> CompletionResponse:
        return self.chunk([], **totals)

    def deltas(self, index: int, output: RequestOutput, extra: Mapping[str, Any]) -> Iterator[CompletionResponse]:
        """What one output adds to its choice in a stream: nothing while all of it is held back.

        An echoed prompt comes first, by itself.
        """
        is_first = index not in self._offsets  # nothing of it was shown yet
        ids = self._prompt_ids(index) if is_first else {}
        if is_first and (echo := self._echo(index, output)):
            yield self.chunk([self._choice(index, None, echo, **ids)], **extra)
            ids = {}
        if output.text or output.tokens or output.is_finished:
            yield self.chunk([self._choice(index, output, **ids)], **extra)

    def _echo(self, index: int, output: RequestOutput) -> _Echo | None:
        """The prompt, if it is echoed; its first output has its tokens' log-probabilities if asked for."""
        if not self._body.echo:
            return None
        number = index // self._job.n
        if number not in self._echoes:
            prompt = self._job.prompts[number]
            laws = [None, *(output.prompt_logprobs or [None] * (len(prompt.token_ids) - 1))]
            tokens = [OutputToken(*parts) for parts in zip(prompt.token_ids, prompt.pieces, laws, strict=True)]
            self._echoes[number] = _Echo("".join(prompt.pieces), self._lists(tokens, 0))
        return self._echoes[number]

    def _lists(self, tokens: Sequence[OutputToken], offset: int) -> CompletionLogprobs | None:
        return None if self._body.logprobs is None else self._logprobs.completion(tokens, offset)

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._job.prompt_of(index).token_ids)}

    def _choice(
        self, index: int, output: RequestOutput | None, echo: _Echo | None = None, **ids: Any
    ) -> CompletionChoice:
        """What an output brought of a choice, or the prompt before it, or both."""
        tokens = output.tokens if output else ()
        if self._body.return_token_ids:
            ids["token_ids"] = [token.token_id for token in tokens]
        text = "".join([token.text for token in tokens])
        offset = self._offsets.get(index, 0) + (len(echo.text) if echo else 0)
        self._offsets[index] = offset + len(text)
        logprobs = self._lists(tokens, offset)
        return CompletionChoice(
            index=index,
            text=echo.text + text if echo else text,
            logprobs=joined(echo.logprobs, logprobs) if echo and echo.logprobs and logprobs else logprobs,
            finish_reason=shown_reason(output) if output else None,
            stop_reason=output.stop_reason if output else None,
            **ids,
        )
