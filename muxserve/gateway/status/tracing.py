"""Traces over OTLP: a span for each request, with what it went through as children. Off unless the environment names an
endpoint (`OTEL_EXPORTER_OTLP_ENDPOINT`); then nothing of this is built, and requests carry no trace.

Names are those of OpenTelemetry's semantic conventions for generative AI where these have one. Unit schedulers report
the stages of traced requests (`muxserve.wire.RequestTrace`), mostly after the answer has ended; so the children of a
span may come after it."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from importlib.metadata import version

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from muxserve.gateway.routing.requests import Tracked
from muxserve.metrics import time_per_token
from muxserve.wire import RequestTrace

log = logging.getLogger(__name__)

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
# Requests that units may still report.
MOST_FOLLOWED = 10_000
_W3C = TraceContextTextMapPropagator()


def otlp() -> SpanProcessor:
    """Sends spans in batches to the endpoint that the environment names, over HTTP.

    Raises:
        ImportError: the exporter is not installed.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return BatchSpanProcessor(OTLPSpanExporter())


def nanoseconds(seconds: float) -> int:
    """The time of day, as spans have it, of seconds of the monotonic clock."""
    return time.time_ns() - round((time.monotonic() - seconds) * 1e9)


class HttpTrace:
    """The span of one HTTP request, until it is answered."""

    __slots__ = ("_completion_tokens", "_prompt_tokens", "_span", "context", "operation")

    def __init__(self, span: trace.Span, operation: str) -> None:
        self._span = span
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self.operation = operation
        self.context = trace.set_span_in_context(span, otel_context.Context())

    def ended(self, request: Tracked, outcome: str, now: float) -> None:
        """One of its answers has ended."""
        self._prompt_tokens += request.spec.prompt_tokens if request.choice == 0 else 0
        self._completion_tokens += len(request.emitted)
        attributes: dict[str, str | int | float] = {
            "gen_ai.usage.input_tokens": self._prompt_tokens,
            "gen_ai.usage.output_tokens": self._completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
            "gen_ai.server.request.duration": now - request.arrival,
            "muxserve.outcome": outcome,
            "muxserve.attempts": request.attempt + 1,
        }
        if request.spec.max_tokens:
            attributes["gen_ai.request.max_tokens"] = request.spec.max_tokens
        if request.first_token_at is not None and request.last_token_at is not None:
            attributes["gen_ai.server.time_to_first_token"] = request.first_token_at - request.arrival
            tpot = time_per_token(request.first_token_at, request.last_token_at, len(request.emitted))
            if tpot is not None:
                attributes["gen_ai.server.time_per_output_token"] = tpot
            self._span.add_event("first token", timestamp=nanoseconds(request.first_token_at))
        self._span.set_attributes(attributes)

    def repeated(self, why: str) -> None:
        """It is served again from where it was."""
        self._span.add_event("repetition", {"muxserve.reason": why})

    def moved(self, source: str, destination: str) -> None:
        """Another unit has taken it over."""
        self._span.add_event("move", {"muxserve.source": source, "muxserve.destination": destination})

    def finish(self, model: str, tenant: str, status: int, now: float) -> None:
        """The HTTP request is answered."""
        span = self._span
        if model:
            span.update_name(f"{self.operation} {model}")
            span.set_attributes({"gen_ai.request.model": model, "gen_ai.response.model": model})
        if tenant:
            span.set_attribute("muxserve.tenant", tenant)
        if status:
            span.set_attribute("http.response.status_code", status)
        if status >= 500 or not status:
            span.set_attribute("error.type", str(status) if status else "disconnected")
            span.set_status(Status(StatusCode.ERROR))
        span.end(nanoseconds(now))


class Tracing:
    """The spans of one gateway.

    Args:
        processor: takes the spans.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "muxserve"}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("muxserve.gateway", version("muxserve"))
        # By the ids under which units know them, the oldest first.
        self._followed: OrderedDict[str, HttpTrace] = OrderedDict()

    def begin(self, headers: Iterable[tuple[bytes, bytes]], path: str, arrival: float) -> HttpTrace | None:
        """An HTTP request for `path` has come; None if it is not sampled. `headers` may have a W3C trace context."""
        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name in (b"traceparent", b"tracestate")
        }
        operation = OPERATIONS.get(path, path.rsplit("/", 1)[-1])
        span = self._tracer.start_span(
            operation,
            _W3C.extract(carrier, otel_context.Context()),
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, "gen_ai.provider.name": "muxserve", "url.path": path},
            start_time=nanoseconds(arrival),
        )
        return HttpTrace(span, operation) if span.is_recording() else None

    def submitted(self, request: Tracked, now: float) -> None:
        """A traced request is sent to a unit."""
        parent = self._follow(request)
        if parent is not None:
            span = self._tracer.start_span("admission", parent.context, start_time=nanoseconds(request.arrival))
            span.end(nanoseconds(now))

    def ended(self, request: Tracked, outcome: str, now: float) -> None:
        """A traced request has ended."""
        parent = self._follow(request)
        if parent is not None:
            parent.ended(request, outcome, now)

    def left_unit(self, unit: str, message: RequestTrace, now: float) -> None:
        """A request has left a unit, after these stages. Times are ages, so that clocks may differ."""
        parent = self._followed.get(message.request_id)
        if parent is None or not message.stages:
            return
        left = nanoseconds(now)
        begins = [left - round(stage.ago * 1e9) for stage in message.stages]
        name = "serve again" if message.attempt else "serve"
        attributes: dict[str, str | int] = {
            "muxserve.unit": unit,
            "muxserve.attempt": message.attempt,
            "muxserve.moves": message.moves,
            "muxserve.request_id": message.request_id,
        }
        span = self._tracer.start_span(name, parent.context, attributes=attributes, start_time=begins[0])
        inside = trace.set_span_in_context(span, parent.context)
        ends = [*begins[1:], left]
        for stage, begin, end in zip(message.stages, begins, ends, strict=True):
            self._tracer.start_span(stage.name, inside, start_time=begin).end(end)
        span.end(ends[-1])

    def close(self) -> None:
        """Send what there is."""
        self._provider.shutdown()

    def _follow(self, request: Tracked) -> HttpTrace | None:
        http = request.context
        if http is None or http.trace is None:
            return None
        found: HttpTrace = http.trace
        self._followed[request.request_id] = found
        self._followed.move_to_end(request.request_id)
        if len(self._followed) > MOST_FOLLOWED:
            self._followed.popitem(last=False)
        return found
