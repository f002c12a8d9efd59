"""POST /v1/responses."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.chat import prepare
from app.responses.schemas import ResponsesRequest
from app.responses.translate import NAMES, to_chat
from app.responses.writer import ResponseWriter
from app.service import ServiceOf
from app.translation import in_words_of, respond

router = APIRouter()


@router.post("/v1/responses", response_model=dict[str, Any])
async def create_response(body: ResponsesRequest, request: Request, service: ServiceOf) -> Response:
    """Answer an input: OpenAI's newer form of a chat."""
    body.refuse_unsupported(is_strict=service.settings.strict_fields)
    meant = to_chat(body)
    with in_words_of(NAMES):
        chat = await prepare(service, meant, request, kind="resp")
    return await respond(request, service, chat, ResponseWriter(chat.job, body), is_streamed=body.stream)
