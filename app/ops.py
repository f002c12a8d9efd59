"""What operators and tools ask: health, load, metrics, ends of requests, and the tokenizer by itself."""

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import PlainTextResponse, Response

from app.chat_template import render_prompt
from app.prompts import encode
from app.schemas.ops import (
    AbortRequest,
    AbortResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from app.service import Service, ServiceOf
from app.tools import definitions
from core import Engine, InvalidRequest, Tokenizer

router = APIRouter()
ADMIN = "admin"  # the name of a key that may end other people's requests


@router.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/health", response_class=Response)
async def health(service: ServiceOf) -> Response:
    """200 while the engine lives: who sees 503 here for some time should restart the process."""
    service.loop.refuse_if_unwell()
    return Response()


@router.head("/ready", include_in_schema=False)
@router.get("/ready", response_class=Response)
async def ready(service: ServiceOf) -> Response:
    """200 while requests are taken: who sees 503 here should send them elsewhere."""
    service.loop.refuse_if_unwell()
    service.loop.refuse_if_closed()
    return Response()


@router.get("/version")
async def version(service: ServiceOf) -> dict[str, str]:
    return {"version": service.version}


@router.get("/load")
async def load(service: ServiceOf) -> dict[str, int]:
    return {"server_load": service.loop.num_open_streams}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: ServiceOf) -> Response:
    content, media_type = service.metrics.expose()
    return Response(content, headers={"content-type": media_type})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(service: ServiceOf) -> dict[str, bool]:
    """No request will hit what has been computed so far; those that run are not disturbed."""
    await service.loop.call(Engine.reset_prefix_cache)
    return {"success": True}


@router.post("/abort_requests")
async def abort_requests(body: AbortRequest, request: Request, service: ServiceOf) -> AbortResponse:
    """End requests by their ids, or all: the caller's own; anybody's if the key is named admin or there are no keys.

    Other people's requests count as not there.
    """
    body.refuse_unsupported(is_strict=service.settings.strict_fields)
    if (body.request_ids is None) == (body.all is not True):
        raise InvalidRequest("give either request_ids or all", "request_ids")
    wanted = None if body.request_ids is None else set(body.request_ids)
    key_name = getattr(request.state, "key_name", None)
    return AbortResponse(aborted=service.abort(wanted, owner=None if key_name == ADMIN else key_name))


@router.get("/server_info")
async def server_info(service: ServiceOf) -> dict[str, Any]:
    """How the server was started and what came of it; no secrets."""
    engine = service.engine
    return {
        "version": service.version,
        "settings": service.settings.model_dump(mode="json", exclude={"api_key"}),
        "max_model_len": engine.max_model_len,
        "num_kv_blocks": engine.num_kv_blocks,
        "block_size": engine.config.block_size,
        "uptime_s": int(time.time()) - service.created,
    }


@router.get("/debug/kv", include_in_schema=False)
async def debug_kv(service: ServiceOf) -> dict[str, Any]:
    """Who holds which block. Off unless the server was started with --enable-debug."""
    if not service.settings.enable_debug:
        raise HTTPException(404)
    return await service.loop.call(Engine.describe_kv)


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, service: ServiceOf) -> TokenizeResponse:
    """Tokens of a text, or of a conversation as the chat template writes it."""
    body.refuse_unsupported(is_strict=service.settings.strict_fields)
    service.check_model(body.model)
    ids = await service.in_tokenizer(_tokens, service, body)
    return TokenizeResponse(
        count=len(ids),
        max_model_len=service.engine.max_model_len,
        tokens=list(ids),
        token_strs=_texts(service.engine.tokenizer, ids) if body.return_token_strs else None,
    )


@router.get("/tokenizer_info")
async def tokenizer_info(service: ServiceOf) -> TokenizerInfo:
    """Special tokens and chat template, for clients that have no tokenizer of their own."""
    tokenizer = service.engine.tokenizer
    return TokenizerInfo(
        tokenizer_class=type(tokenizer).__name__,
        vocab_size=tokenizer.vocab_size,
        bos_token=tokenizer.special_token_texts.get("bos_token"),
        eos_token=tokenizer.special_token_texts.get("eos_token"),
        chat_template=service.settings.chat_template_source or tokenizer.chat_template,
    )


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, service: ServiceOf) -> DetokenizeResponse:
    body.refuse_unsupported(is_strict=service.settings.strict_fields)
    service.check_model(body.model)
    return DetokenizeResponse(prompt=await service.in_tokenizer(_text, service.engine.tokenizer, body.tokens))


def _tokens(service: Service, body: TokenizeRequest) -> Sequence[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", "prompt")
    adds_special = body.add_special_tokens
    if body.prompt is not None:
        return encode(service.engine, body.prompt, add_special_tokens=adds_special is not False).token_ids
    assert body.messages is not None
    template = service.require_chat_template()
    text = render_prompt(
        template,
        body.messages,
        tools=definitions(body.tools or ()),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=body.chat_template_kwargs,
    )
    return encode(service.engine, text, add_special_tokens=bool(adds_special), param="messages").token_ids


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    outside = next((token_id for token_id in ids if not 0 <= token_id < tokenizer.vocab_size), None)
    if outside is not None:
        raise InvalidRequest(f"tokens has token id {outside}, allowed is [0, {tokenizer.vocab_size - 1}]", "tokens")
    return tokenizer.decode(ids)


def _texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in ids]
