"""The OpenAPI document says what every route may answer, without any route having to."""

from typing import Any

import pytest

from app.factory import create_app
from tests.app.servers import make_engine, make_settings

DOCUMENT = create_app(make_settings(), make_engine()).openapi()
OPERATIONS = [
    pytest.param(operation, id=f"{method} {path}")
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_documents_its_failures_in_one_shape(operation: Any):
    expected = {"401", "404", "500", "503"} | ({"400", "408", "413"} if "requestBody" in operation else set())

    assert expected <= operation["responses"].keys()
    assert "422" not in operation["responses"]


def test_no_reference_leads_nowhere():
    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return own.union(*map(references, value.values()))
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    defined = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    assert set() == references(DOCUMENT) - defined
    assert "#/components/schemas/ErrorResponse" in defined


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_where_a_body_may_ask_for_a_stream_so_may_the_answer_be_one(path: str):
    content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]

    assert {"application/json", "text/event-stream"} == content.keys()


def test_probes_have_no_body_and_metrics_are_text():
    get = {path: DOCUMENT["paths"][path]["get"]["responses"]["200"] for path in ("/health", "/ready", "/metrics")}

    assert [False, False, ["text/plain"]] == [
        "content" in get["/health"],
        "content" in get["/ready"],
        list(get["/metrics"]["content"]),
    ]
