"""Libraries that people call models through, each doing what it is mostly used for, against the real server.

Scripts say what a test must know; the rest is the model's own text, or held to a schema.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import litellm
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

MODEL = "octavo-tiny"
HI = [{"role": "user", "content": "Hi"}]
SCRIPT = ["Hello", ", ", "world"]
NO_BLANKS = {str(ord(blank)): -100 for blank in " \n\r\t"}  # which JSON allows without end
TOO_LONG = "word " * 2000
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class City(BaseModel):
    """A city, and nothing more: what a schema does not forbid, a tiny model goes on saying."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=8)
    size: int = Field(ge=0, le=9)


def langchain(v1: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=v1, api_key="none", model=MODEL, max_retries=0, **options)


def test_langchain_invokes_and_streams(v1: str):
    model = langchain(v1, extra_body={"script": SCRIPT}, stream_usage=True)

    assert "Hello, world" == model.invoke("Hi").content
    chunks = list(model.stream([HumanMessage("Hi")]))
    assert "Hello, world" == "".join(chunk.content for chunk in chunks)
    assert 4 == sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)


def test_langchain_knows_a_context_overflow(v1: str):
    with pytest.raises(Exception, match="prompt is too long") as refusal:
        langchain(v1).invoke(TOO_LONG)
    assert "ContextOverflow" in "".join(base.__name__ for base in type(refusal.value).__mro__)


def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def test_langchain_reads_tool_calls(v1: str):
    model = langchain(v1, extra_body={"script": list(CALL)}).bind_tools([weather])
    (call,) = model.invoke("How is it in Oslo?").tool_calls

    assert ("weather", {"city": "Oslo"}) == (call["name"], call["args"])


def ask_litellm(v1: str, **options: Any) -> Any:
    return litellm.completion(
        model=f"openai/{MODEL}", api_base=v1, api_key="none", num_retries=0, **{"messages": HI, **options}
    )


def test_litellm_completes_and_streams(v1: str):
    whole = ask_litellm(v1, extra_body={"script": SCRIPT})
    stream = ask_litellm(v1, extra_body={"script": SCRIPT}, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)

    assert ("Hello, world", "stop") == (whole.choices[0].message.content, whole.choices[0].finish_reason)
    assert "Hello, world" == "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens


def test_litellm_knows_a_context_overflow(v1: str):
    with pytest.raises(litellm.ContextWindowExceededError):
        ask_litellm(v1, messages=[{"role": "user", "content": TOO_LONG}])


def test_litellm_raises_for_an_error_in_mid_stream(v1: str):
    fault = {"type": "error", "after_events": 2}
    with pytest.raises(Exception, match="injected fault"):
        list(ask_litellm(v1, extra_body={"script": SCRIPT, "fault": fault}, stream=True))


@pytest.mark.parametrize("options", [(), ("--no-stream",)], ids=["streamed", "whole"])
def test_llm_prompts_from_the_command_line(v1: str, tmp_path: Path, options: tuple[str, ...]):
    (tmp_path / "extra-openai-models.yaml").write_text(f"- model_id: octavo\n  model_name: {MODEL}\n  api_base: {v1}\n")
    command = [sys.executable, "-m", "llm", "prompt", "-m", "octavo", "-o", "max_tokens", "12", "-o", "seed", "3"]
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [*command, *options, "Once upon a time"], env=environment, capture_output=True, text=True, check=False
    )

    assert 0 == done.returncode, done.stderr
    assert done.stdout.strip()


def test_anthropics_client_messages_and_streams(url: str):
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 9, "messages": HI, "extra_body": {"script": SCRIPT}}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()

    assert ("Hello, world", "end_turn") == (whole.content[0].text, whole.stop_reason)
    assert ("Hello, world", whole.usage) == (text, final.usage)


def test_anthropics_client_reads_tool_calls(url: str):
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"name": "weather", "description": "The weather.", "input_schema": schema}]
    answer = client.messages.create(
        model=MODEL, max_tokens=200, messages=HI, tools=tools, extra_body={"script": list(CALL)}
    )

    assert "tool_use" == answer.stop_reason
    assert {"city": "Oslo"} == answer.content[-1].input


def test_pydantic_ai_fills_a_model(v1: str):
    """Nothing is scripted: what the tiny model says is held to the schema, and comes to its end without blanks."""
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=v1, api_key="none"))
    answer = Agent(model, output_type=City, model_settings={"logit_bias": NO_BLANKS, "max_tokens": 400}).run_sync("Hi")

    assert isinstance(answer.output, City)
    assert 0 <= answer.output.size <= 9
    assert len(answer.output.name) <= 8
