"""OpenTelemetry traces: one span for each HTTP request, and below it queue, prefill and decode of each sequence.

Spans are made when a request has ended and all its moments are known, so that nothing is traced while it runs. A
caller's W3C `traceparent` is the parent. Names of attributes are vLLM's where they mean the same. The packages are the
extra `otel`; they are imported only by a server that was given --otlp-traces-endpoint. What the endpoint is told
besides (headers, service name, sampler) is the packages' own affair: they read OTEL_... from the environment.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core import RequestTimes

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

SERVICE_NAME = "octavo"
# Fields of the request's line in the log, as attributes of its span.
_ATTRIBUTES = {
    "request_id": "gen_ai.request.id",
    "num_choices": "gen_ai.request.n",
    "num_prompt_tokens": "gen_ai.usage.prompt_tokens",
    "num_output_tokens": "gen_ai.usage.completion_tokens",
    "reason": "gen_ai.response.finish_reasons",
    "key": "octavo.key",
}


@dataclass(frozen=True, slots=True)
class TracedSequence:
    """The moments of one sequence, in seconds of time.monotonic. `times`: None if it was never computed for."""

    request_id: str
    arrival_s: float
    ended_s: float
    times: RequestTimes | None

    def phases(self) -> Iterator[tuple[str, float, float]]:
        """(name, start, end) of those that it has come to."""
        if self.times is None:
            yield "queue", self.arrival_s, self.ended_s
            return
        first_s = self.times.first_token_s
        yield "queue", self.arrival_s, self.times.scheduled_s
        yield "prefill", self.times.scheduled_s, self.ended_s if first_s is None else first_s
        if first_s is not None:
            yield "decode", first_s, self.ended_s


class Tracing:
    """Hands spans to a processor; `shutdown` sends what is left."""

    def __init__(self, processor: "SpanProcessor") -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource({"service.name": SERVICE_NAME}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("octavo")

    def record(
        self,
        line: Mapping[str, Any],
        route: str,
        headers: Mapping[str, str],
        sequences: list[TracedSequence],
        start_s: float,
    ) -> None:
        """The spans of one request: `line` is what its line in the log says, `headers` those that it came with."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers)
        span = self._tracer.start_span(
            "llm_request" if sequences else f"{line['method']} {route}",
            parent,
            SpanKind.SERVER,
            _attributes(line, route),
            start_time=_wall_ns(start_s),
        )
        if line["status"] >= 500:
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        for sequence in sequences:
            self._record_sequence(sequence, inside)
        _add_latencies(span, sequences)
        span.end(_wall_ns(start_s + line["duration_s"]))

    def _record_sequence(self, sequence: TracedSequence, inside: "Context") -> None:
        for name, start_s, end_s in sequence.phases():
            attributes = {"gen_ai.request.id": sequence.request_id}
            span = self._tracer.start_span(name, inside, attributes=attributes, start_time=_wall_ns(start_s))
            span.end(_wall_ns(end_s))

    def shutdown(self) -> None:
        """Blocks until all is sent, or cannot be."""
        with suppress(Exception):  # whoever collects them may have gone before
            self._provider.shutdown()


def _attributes(line: Mapping[str, Any], route: str) -> dict[str, Any]:
    given = {name: line[field] for field, name in _ATTRIBUTES.items() if field in line}
    http = {"http.request.method": line["method"], "http.route": route, "http.response.status_code": line["status"]}
    return {**http, **given}


def _add_latencies(span: "Span", sequences: list[TracedSequence]) -> None:
    """Those of the first sequence that came to them: who sends one prompt asks about one."""
    for sequence in sequences[:1]:
        span.set_attribute("gen_ai.latency.e2e", sequence.ended_s - sequence.arrival_s)
        if sequence.times is not None:
            span.set_attribute("gen_ai.latency.time_in_queue", sequence.times.scheduled_s - sequence.arrival_s)
            if sequence.times.first_token_s is not None:
                first_s = sequence.times.first_token_s - sequence.arrival_s
                span.set_attribute("gen_ai.latency.time_to_first_token", first_s)


def _wall_ns(monotonic_s: float) -> int:
    """A moment of time.monotonic by the clock on the wall."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)


def tracing_to(endpoint: str) -> Tracing:
    """Tracing over OTLP with HTTP and protobuf, in batches, from a thread of its own."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
