"""Finding out what to ask before the run."""

import httpx
import pytest

from loadgen.benchmark import ServerNotReady, first_model


@pytest.mark.parametrize(
    ("status", "text", "advice"),
    [
        (401, '{"error": {"message": "no key"}}', "--api-key or OPENAI_API_KEY"),
        (404, "not here", "--model"),
        (200, '{"data": []}', "--model"),
    ],
)
def test_where_no_model_is_named_the_advice_fits_the_reason(status: int, text: str, advice: str):
    request = httpx.Request("GET", "http://server/v1/models")
    with pytest.raises(ServerNotReady, match=rf"names no model, use {advice} \(http {status}: "):
        first_model(httpx.Response(status, text=text, request=request))
