"""What a newcomer types: curl against a server that was started with one command."""

import json
import re
import subprocess

from tests.e2e.live import LiveServer

BODY = '{"prompt":"Once upon a time","max_tokens":64,"stream":true}'
# About the most frequent words of stories; any English of 64 characters has several.
COMMON = re.compile(
    r"\b(a|and|the|was|to|he|she|it|his|her|had|in|of|there|with|named|is|that|they|said|on|one|day|little|big|girl"
    r"|boy|very|who|for|you|but|not|so|mom|dog|cat|lived|loved|wanted|were|out|up|went|play)\b"
)


def curl(url: str, *arguments: str) -> str:
    command = ["curl", "-sS", "-N", "--max-time", "120", *arguments, url]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_curl_streams_english_and_ends_with_done(tiny: LiveServer):
    output = curl(f"{tiny.url}/v1/completions", "-H", "content-type: application/json", "-d", BODY)

    events = output.removesuffix("\n\n").split("\n\n")
    assert "data: [DONE]" == events[-1]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert len(chunks) > 1
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert len(COMMON.findall(text.lower())) >= len(text.split()) / 4 > 0, text


def test_an_answer_says_that_it_streams_and_must_not_be_cached(tiny: LiveServer):
    head = curl(f"{tiny.url}/v1/completions", "-D", "-", "-H", "content-type: application/json", "-d", BODY).lower()

    assert "content-type: text/event-stream" in head
    assert "cache-control: no-cache" in head
    assert "x-accel-buffering: no" in head
