"""Forms of the output as bodies ask for them, in completions and in chat, whole and streamed."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.app.servers import RunningServer, in_process, tiny_engine
from tests.reports.answers import WAYS, ask, ask_choices

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [30, 7]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON_TEXT = r'\{"name": ?"(\\.|[^"]){0,8}", ?"age": ?(30|7)\}'


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    async with in_process(tiny_engine()) as running:
        yield running


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}}


FORMS: list[tuple[dict[str, Any], str]] = [
    (schema_format(PERSON, strict=True), PERSON_TEXT),
    (schema_format(PERSON, strict=False, description="A person."), PERSON_TEXT),
    ({"structured_outputs": {"json": PERSON}}, PERSON_TEXT),
    ({"structured_outputs": {"json": json.dumps(PERSON)}}, PERSON_TEXT),
    ({"guided_json": PERSON}, PERSON_TEXT),
    ({"structured_outputs": {"regex": "[0-9]{3}-[ab]"}}, "[0-9]{3}-[ab]"),
    ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
    ({"structured_outputs": {"choice": ["yes", "né😀"], "regex": None, "disable_fallback": True}}, "yes|né😀"),
    ({"guided_choice": ["red", "green"], "guided_decoding_backend": "auto"}, "red|green"),
    ({"structured_outputs": {"grammar": 'start: "a" start | "b"'}}, "a*b"),
    ({"guided_grammar": 'start: "x"+ "."'}, r"x+\."),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("form", "expected"), FORMS, ids=lambda value: str(value)[:60])
async def test_an_output_has_the_form_that_was_asked_for(server: RunningServer, way: str, form: Any, expected: str):
    answers = await ask_choices(server, way, **form, n=2, max_tokens=80)

    assert [] == [answer for answer in answers if not re.fullmatch(expected, answer.text)]
    assert {"stop"} == {answer.finish_reason for answer in answers}
    assert 2 == len(answers)


@pytest.mark.parametrize(
    "form", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}], ids=str
)
@pytest.mark.parametrize("way", WAYS)
async def test_json_mode_says_one_object(server: RunningServer, way: str, form: dict[str, Any]):
    """With a liking for closing what is open, which the embedded model has not."""
    answer = await ask(server, way, **form, max_tokens=200, logit_bias={"34": 9, "125": 9}, seed=1)

    assert "stop" == answer.finish_reason
    assert isinstance(json.loads(answer.text), dict)


async def test_a_schema_without_a_schema_is_json_mode(server: RunningServer):
    said = {"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}

    assert "{" == (await ask(server, "chat", **said, max_tokens=1)).text


@pytest.mark.parametrize("form", [{"response_format": {"type": "text"}}, {"response_format": None}], ids=str)
async def test_text_is_no_form(server: RunningServer, form: dict[str, Any]):
    asked = {"prompt": "Once", "max_tokens": 12, "temperature": 0}

    assert await ask(server, "completion", **asked) == await ask(server, "completion", **asked, **form)


async def test_an_output_that_the_limit_cuts_says_so(server: RunningServer):
    answer = await ask(server, "completion", structured_outputs={"regex": "[0-9]{9}"}, max_tokens=4)

    assert ("length", 4) == (answer.finish_reason, len(answer.text))


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (schema_format({"type": "strin"}), "response_format", "Invalid type"),
    (schema_format({"not": {}}), "response_format", "not"),
    (schema_format(False), "response_format", "object"),
    (schema_format(PERSON, name="a b"), "response_format", "name"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
    ({"response_format": {"type": "json_object", "schema": PERSON}}, "schema", "not supported"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
    ({"response_format": "json"}, "response_format", "object"),
    ({"structured_outputs": {}}, "structured_outputs", "0 forms"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex, choice"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex cannot be honoured"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "empty list"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "json_schema cannot be read"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " *"}}, "whitespace_pattern", "not supported"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structural_tag", "not supported"),
    ({"guided_regex": "("}, "guided_regex", "regex cannot be honoured"),
    ({"guided_grammar": "begin: x"}, "guided_grammar", "grammar cannot be honoured"),
    ({"guided_decoding_backend": "xgrammar", "guided_regex": "a"}, "guided_decoding_backend", "not supported"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "both"),
]


@pytest.mark.parametrize(("form", "param", "told"), REFUSED, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_cannot_be_honoured_is_refused_before_anything_is_said(
    server: RunningServer, is_streamed: bool, form: dict[str, Any], param: str, told: str
):
    messages = [{"role": "user", "content": "Hi"}]
    for response in (
        await server.complete(prompt="p", stream=is_streamed, **form),
        await server.chat(messages=messages, stream=is_streamed, **form),
    ):
        error = response.json()["error"]
        assert (400, param, "invalid_request_error") == (response.status_code, error["param"], error["type"])
        assert told in error["message"]


async def test_a_form_is_one_for_all_prompts(server: RunningServer):
    response = await server.complete(prompt=["Once", "There"], guided_choice=["yes", "no"])

    assert {"yes", "no"} >= {choice["text"] for choice in response.json()["choices"]}
    assert 2 == len(response.json()["choices"])
