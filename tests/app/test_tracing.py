"""Traces: a span for each request under its caller's, and below it what each sequence has gone through."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from app.tracing import TracedSequence, Tracing
from core import RequestTimes
from tests.app.servers import Gate, RunningServer, in_process, live, make_engine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Traced:
    """A server whose spans are kept."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self._exporter = InMemorySpanExporter()
        server.service.tracing = Tracing(SimpleSpanProcessor(self._exporter))

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    @property
    def root(self) -> ReadableSpan:
        (found,) = [span for span in self.spans if span.kind is SpanKind.SERVER]
        return found

    def below_root(self) -> list[ReadableSpan]:
        """In order of their starts."""
        assert self.root.context is not None
        found = [span for span in self.spans if span.parent and span.parent.span_id == self.root.context.span_id]
        return sorted(found, key=lambda span: (str((span.attributes or {})["gen_ai.request.id"]), span.start_time or 0))


@pytest.fixture
async def traced() -> AsyncIterator[Traced]:
    async with in_process() as server:
        yield Traced(server)


async def test_queue_prefill_and_decode_follow_each_other_within_the_request(traced: Traced):
    answer = (await traced.server.complete(prompt="abc", max_tokens=4)).json()
    queue, prefill, decode = traced.below_root()
    root = traced.root

    assert ("llm_request", "queue", "prefill", "decode") == tuple(s.name for s in (root, queue, prefill, decode))
    assert (queue.end_time, prefill.end_time) == pytest.approx((prefill.start_time, decode.start_time), abs=10**6)
    assert root.start_time is not None
    assert root.start_time - 10**6 <= (queue.start_time or 0) <= (decode.end_time or 0) <= (root.end_time or 0) + 10**6
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.request.id": answer["id"],
        "gen_ai.request.n": 1,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 4,
        "gen_ai.response.finish_reasons": "length",
    }
    found = dict(root.attributes or {})
    assert expected == {name: found[name] for name in expected}
    assert 0 <= found["gen_ai.latency.time_in_queue"] <= found["gen_ai.latency.time_to_first_token"]
    assert "octavo" == root.resource.attributes["service.name"]


async def test_every_sequence_has_its_own(traced: Traced):
    await traced.server.complete(prompt=["a", "b"], n=2, max_tokens=2)

    assert ["queue", "prefill", "decode"] * 4 == [span.name for span in traced.below_root()]


async def test_the_callers_span_is_the_parent(traced: Traced):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    await traced.server.client.post("/v1/completions", json={"prompt": "p"}, headers=headers)
    root = traced.root

    assert root.parent is not None
    assert int(PARENT, 16) == root.parent.span_id
    assert {int(TRACE, 16)} == {span.context.trace_id for span in traced.spans if span.context}


@pytest.mark.parametrize("header", [f"00-{TRACE}-{PARENT}-00", f"00-{TRACE}-{PARENT}-02"])
async def test_a_caller_that_samples_nothing_gets_nothing(traced: Traced, header: str):
    await traced.server.client.post("/v1/completions", json={"prompt": "p"}, headers={"traceparent": header})

    assert [] == traced.spans


async def test_a_broken_parent_is_none(traced: Traced):
    await traced.server.client.post("/v1/completions", json={"prompt": "p"}, headers={"traceparent": "nonsense"})

    assert traced.root.parent is None


async def test_a_refusal_is_a_span_alone_and_probes_are_none(traced: Traced):
    await traced.server.client.get("/health")
    await traced.server.complete(prompt=[])

    (span,) = traced.spans
    assert ("POST /v1/completions", 400) == (span.name, (span.attributes or {})["http.response.status_code"])
    assert StatusCode.UNSET is span.status.status_code


async def test_a_fault_of_the_servers_is_an_error(traced: Traced):
    traced.server.service.loop.is_dead = True
    await traced.server.complete(prompt="p")

    assert StatusCode.ERROR is traced.root.status.status_code


async def test_a_client_that_left_the_queue_was_in_the_queue_only():
    gate = Gate()
    async with live(make_engine(gate, max_num_seqs=1)) as server, gate:
        traced = Traced(server)
        first = asyncio.create_task(server.complete(prompt="p", max_tokens=1))
        await gate.until_arrived(1)
        second = asyncio.create_task(server.complete(prompt="p", max_tokens=1))
        while server.service.loop.num_open_streams < 2:
            await asyncio.sleep(0)
        second.cancel()
        while not traced.spans:
            await asyncio.sleep(0)
        assert ["queue"] == [span.name for span in traced.below_root()]
        gate.open()
        await first


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (None, [("queue", 1.0, 9.0)]),
        (RequestTimes(2.0, None, None), [("queue", 1.0, 2.0), ("prefill", 2.0, 9.0)]),
        (RequestTimes(2.0, 3.0, 8.0), [("queue", 1.0, 2.0), ("prefill", 2.0, 3.0), ("decode", 3.0, 9.0)]),
    ],
)
def test_a_sequence_has_the_phases_that_it_has_come_to(times: RequestTimes | None, expected: Any):
    assert expected == list(TracedSequence("r", 1.0, 9.0, times).phases())


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A real collector as far as OTLP goes: its URL, and what it was sent."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
        server.shutdown()
        thread.join()


async def test_spans_arrive_at_the_endpoint_before_the_server_has_ended(
    collector: tuple[str, list[ExportTraceServiceRequest]],
):
    url, received = collector
    async with in_process(otlp_traces_endpoint=url) as server:
        await server.complete(prompt="abc", max_tokens=4)

    names = {s.name for r in received for rs in r.resource_spans for ss in rs.scope_spans for s in ss.spans}
    assert {"llm_request", "queue", "prefill", "decode"} == names
