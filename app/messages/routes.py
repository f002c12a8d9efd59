"""POST /v1/messages, and the count of a prompt's tokens beside it."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.chat import prepare, prompt_text
from app.messages.errors import RESPONSES
from app.messages.schemas import CountTokensRequest, MessagesRequest, TokenCount
from app.messages.translate import NAMES, to_chat
from app.messages.writer import MessageWriter
from app.prompts import encode
from app.schemas.chat import ChatRequest
from app.service import Service, ServiceOf
from app.tools import tool_use
from app.translation import in_words_of, respond

router = APIRouter(responses=RESPONSES)


@router.post("/v1/messages", response_model=dict[str, Any])
async def create_message(body: MessagesRequest, request: Request, service: ServiceOf) -> Response:
    """Answer a conversation in Anthropic's form."""
    body.refuse_unsupported(is_strict=service.settings.strict_fields)
    meant = to_chat(body)
    with in_words_of(NAMES):
        chat = await prepare(service, meant, request, kind="msg")
    return await respond(request, service, chat, MessageWriter(chat.job), is_streamed=body.stream)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, service: ServiceOf) -> TokenCount:
    """How many tokens the prompt of such a conversation has."""
    body.refuse_unsupported(is_strict=service.settings.strict_fields)
    service.check_model(body.model)
    meant = to_chat(body)
    with in_words_of(NAMES):
        return TokenCount(input_tokens=await service.in_tokenizer(_num_tokens, service, meant))


def _num_tokens(service: Service, body: ChatRequest) -> int:
    text = prompt_text(service.require_chat_template(), body, tool_use(body))
    return len(encode(service.engine, text, add_special_tokens=False, param="messages").token_ids)
