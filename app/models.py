"""GET /v1/models: the one model, under each of its names."""

from fastapi import APIRouter, HTTPException

from app.schemas.models import ModelCard, ModelList
from app.service import Service, ServiceOf

router = APIRouter()


@router.get("/v1/models")
async def list_models(service: ServiceOf) -> ModelList:
    return ModelList(data=[_card(service, name) for name in service.settings.model_names])


@router.get("/v1/models/{name:path}")  # names may hold slashes
async def retrieve_model(name: str, service: ServiceOf) -> ModelCard:
    if not name:  # a slash behind the list's path: nowhere is such a path another than without it
        raise HTTPException(404)
    return _card(service, service.check_model(name))


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=service.created, root=service.settings.model, max_model_len=service.engine.max_model_len
    )
