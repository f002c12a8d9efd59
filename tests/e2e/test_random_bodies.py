"""Whatever is sent to it, a server answers, says no with a 4xx, and is as it was before."""

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.e2e.bodies import JUNK, TEXTS, Bodies, rarely
from tests.e2e.conftest import Serve
from tests.e2e.live import LiveServer, Scrape

NUM_BODIES = 1000
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": TEXTS}),
    min_size=1,
    max_size=3,
)
FEW = st.integers(0, 5)
# What mostly stands in these, so that bodies get behind the first check.
LIKELY: Mapping[str, Any] = {
    "model": st.sampled_from([None, "", "octavo-tiny", "octavo-tiny", "nope"]),
    "prompt": TEXTS | st.lists(TEXTS, max_size=3) | st.lists(st.integers(0, 260), max_size=9) | JUNK,
    "messages": MESSAGES,
    "input": TEXTS | st.lists(TEXTS, max_size=3) | MESSAGES,
    "max_tokens": FEW,
    "max_completion_tokens": FEW,
    "max_output_tokens": FEW,
    "min_tokens": FEW,
    "n": st.integers(1, 4),
    "best_of": st.integers(1, 4),
    "logprobs": FEW | st.booleans(),
    "top_logprobs": FEW,
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "script": st.lists(TEXTS | st.lists(st.integers(0, 256), max_size=3), max_size=3),
    "fault": st.none(),
}


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> LiveServer:
    return serve_module("--max-model-len", "96", "--num-kv-blocks", "64", "--enable-scripts", "--enable-debug")


def posts(server: LiveServer) -> dict[str, Any]:
    """The document's POSTs that take JSON: path and schema of the body."""
    paths = server.document["paths"]
    bodies = {path: operations.get("post", {}).get("requestBody") for path, operations in paths.items()}
    return {path: body["content"]["application/json"]["schema"] for path, body in bodies.items() if body}


def assert_nothing_is_left(server: LiveServer) -> None:
    scrape = server.wait_until_idle()
    kv = server.http.get("/debug/kv").json()

    assert scrape.total("octavo:kv_blocks") == scrape.total("octavo:kv_blocks_free")
    assert [] == kv["requests"]
    assert [] == [block for block in kv["blocks"] if block["ref_count"]]
    assert 200 == server.http.get("/health").status_code


def test_random_bodies_are_answered_or_refused_and_leave_nothing_behind(server: LiveServer):
    """Never a 5xx, never a hang (the client's deadline would tell), never a block that stays taken."""
    bodies, statuses = Bodies(server.document), set()
    asked = [
        st.tuples(st.just(path), rarely(JUNK, bodies.of(schema, likely=LIKELY)))
        for path, schema in posts(server).items()
    ]
    generated = [path for path in posts(server) if path.startswith("/v1/")]

    @settings(max_examples=NUM_BODIES)
    @given(st.one_of(asked))
    def check(request: tuple[str, Any]) -> None:
        path, body = request
        response = server.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        statuses.add((path, response.status_code))
        assert response.status_code < 500, response.text
        assert "server_error" not in response.text
        if response.status_code >= 400:
            assert response.json()["error"]["message"]

    check()
    assert {(path, code) for path in generated for code in (200, 400)} <= statuses
    assert_nothing_is_left(server)


def test_bodies_that_are_no_json_are_refused(server: LiveServer):
    rng = random.Random(5)
    valid = json.dumps({"prompt": "x", "max_tokens": 2, "messages": [{"role": "user", "content": "é"}]}).encode()
    for path in posts(server):
        for _ in range(20):
            cut = bytearray(valid[: rng.randrange(len(valid))])
            cut[rng.randrange(len(cut)) if cut else 0 :] = rng.randbytes(rng.randrange(9))
            response = server.http.post(path, content=bytes(cut), headers={"content-type": "application/json"})
            assert 400 == response.status_code, (bytes(cut), response.text)
    assert_nothing_is_left(server)


def test_random_paths_and_model_names_make_no_new_series(server: LiveServer):
    ask_for_what_is_not_there(server, random.Random(1))
    before = series(server.scrape())
    for seed in range(2, 100):
        ask_for_what_is_not_there(server, random.Random(seed))

    assert before == series(server.scrape())


def ask_for_what_is_not_there(server: LiveServer, rng: random.Random) -> None:
    name = "".join(rng.choices("abcdefgh/.%", k=12))
    server.http.get(f"/{name}")
    server.http.get(f"/v1/models/{name}")
    server.http.request("".join(rng.choices("ABCDEF", k=6)), "/v1/completions")
    server.http.request("DELETE", f"/{name}")
    for path in posts(server):
        server.http.post(path, json={"model": name, "prompt": "x", "input": "x", "max_tokens": 1, "cache_salt": name})


def series(scrape: Scrape) -> set[Any]:
    """Names and labels of all samples."""
    return set(scrape.samples)
