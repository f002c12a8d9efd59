"""POST /v1/embeddings: what a generative model makes of a text, as one vector.

It is the mean over the prompt's tokens of the last layer's hidden states behind the final norm, scaled to length 1
(`normalize`: false leaves it as it is). The models served here were trained to continue text and not to embed it: near
texts are near, but an embedding model does much better. Each input is a request without output, through the same
scheduler as all others: it waits its turn, comes in chunks, is preempted and resumes.
"""

import base64
import math
import struct
import time
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.errors import unsupported
from app.generation import Ask, Job, renamed
from app.schemas.embeddings import Embedding, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage
from app.service import Service, ServiceOf, trace_id
from app.sse import while_connected
from core import InvalidRequest, SamplingParams

router = APIRouter()
NAMES = {"prompt": "input"}
PARAMS = SamplingParams(max_tokens=0, embed=True, speculative_tokens=0)


@router.post("/v1/embeddings", response_model=EmbeddingResponse)
async def create_embeddings(body: EmbeddingRequest, request: Request, service: ServiceOf) -> Response:
    """One vector for each input."""
    ask = _ask(service, body, request)
    try:
        job = await service.prepare(ask)
    except InvalidRequest as error:
        raise renamed(error, NAMES) from error
    vectors = await while_connected(request.receive, _vectors(service, job))
    response = _response(job, vectors, body)
    content = response.__pydantic_serializer__.to_json(response)
    return Response(content, headers={"x-request-id": job.trace_id}, media_type="application/json")


def _ask(service: Service, body: EmbeddingRequest, request: Request) -> Ask:
    arrival_s = time.monotonic()
    body.refuse_unsupported(is_strict=service.settings.strict_fields)
    size = service.engine.model_config.hidden_size
    if body.dimensions not in (None, size):
        raise unsupported("dimensions", f"cannot be {body.dimensions}: this model's hidden states have {size}")
    return Ask(
        kind="embd",
        model=service.check_model(body.model),
        prompt=body.input,
        params=PARAMS,
        n=1,
        max_prompt_tokens=body.truncate_prompt_tokens,
        names=NAMES,
        cache_salt=service.cache_salt(request, body),
        script=None,
        add_special_tokens=body.add_special_tokens is not False,
        trace_id=trace_id(request, body.request_id),
        arrival_s=arrival_s,
    )


async def _vectors(service: Service, job: Job) -> list[Sequence[float]]:
    with service.run(job) as run:
        return [output.embedding or () for output in await run.collect()]


def _response(job: Job, vectors: Sequence[Sequence[float]], body: EmbeddingRequest) -> EmbeddingResponse:
    num_tokens = sum(len(prompt.token_ids) for prompt in job.prompts)
    scaled = vectors if body.normalize is False else [_unit(vector) for vector in vectors]
    return EmbeddingResponse(
        data=[Embedding(index=i, embedding=_shown(vector, body.encoding_format)) for i, vector in enumerate(scaled)],
        model=job.model,
        usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
    )


def _unit(vector: Sequence[float]) -> list[float]:
    length = math.hypot(*vector)
    return [value / length if length else 0.0 for value in vector]


def _shown(vector: Sequence[float], encoding_format: str | None) -> list[float] | str:
    """As OpenAI's clients read them: numbers, or base64 of 32-bit floats, little end first."""
    packed = struct.pack(f"<{len(vector)}f", *vector)
    if encoding_format == "base64":
        return base64.b64encode(packed).decode("ascii")
    return list(struct.unpack(f"<{len(vector)}f", packed))
