"""A body's `script`: what a request says instead of the model, as JSON has it.

A script is a list of pieces of one token each; a nested list of pieces is one step's. A piece is a string, a list of
bytes, or an object as in the `logprobs` of a chat answer, so that a recorded answer can be said again:
`{"token": "Hel", "logprob": -0.5, "top_logprobs": [{"token": "Hel", "logprob": -0.5}, {"token": "Ha"}]}`.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.errors import unsupported
from core import InvalidRequest, ScriptedToken, ScriptEntry, ScriptPiece

Logprob = Annotated[float, Field(ge=-9999.0, le=0.0)]
MAX_TOP = 1024


class TopToken(BaseModel):
    """A token with its log-probability. Bytes, where they are given, are what counts; the text is for readers."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    token: str
    bytes: list[Annotated[int, Field(ge=0, le=255)]] | None = None
    logprob: Logprob = 0.0


class PieceObject(TopToken):
    """A piece that is not only said, but with what probability."""

    top_logprobs: Annotated[list[TopToken], Field(max_length=MAX_TOP)] | None = None


def parse_script(value: Any, *, is_enabled: bool) -> tuple[ScriptEntry, ...] | None:
    """The script of a request, None without one.

    Raises:
        InvalidRequest, ApiError: it is none, or scripts are not taken.
    """
    if value is None:
        return None
    if not is_enabled:
        raise unsupported("script", "is only taken by a server started with --enable-scripts")
    if not isinstance(value, list) or not value:
        raise InvalidRequest("script must be a list of at least one piece", "script")
    return tuple(_entry(item) for item in value)


def _entry(item: Any) -> ScriptEntry:
    if isinstance(item, list) and item and not _are_bytes(item):
        return tuple(_piece(piece) for piece in item)
    return _piece(item)


def _piece(item: Any) -> ScriptPiece:
    if isinstance(item, dict):
        return _piece_of_object(item)
    if isinstance(item, str) and item:
        return _with_utf8(item)
    if isinstance(item, list) and item and _are_bytes(item) and all(0 <= byte <= 255 for byte in item):
        return bytes(item)
    raise InvalidRequest(
        f"script has {str(item)[:64]!r}, a piece is a string, a list of bytes or an object with a token, not empty",
        "script",
    )


def _piece_of_object(item: dict[str, Any]) -> ScriptedToken:
    try:
        piece = PieceObject.model_validate(item)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise InvalidRequest(f"script has a piece whose {where} cannot be: {problem['msg']}", "script") from None
    top = tuple((_data(token), token.logprob) for token in piece.top_logprobs or ())
    return ScriptedToken(_data(piece), piece.logprob, top)


def _data(token: TopToken) -> str | bytes:
    data = token.token if token.bytes is None else bytes(token.bytes)
    if not data:
        raise InvalidRequest("script has a piece with an empty token", "script")
    return data if isinstance(data, bytes) else _with_utf8(data)


def _are_bytes(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)  # True is an int to isinstance


def _with_utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"script has half of a surrogate pair at character {error.start}", "script") from None
    return text
