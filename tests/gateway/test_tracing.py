"""Spans of requests: their times and names, and what an OTLP collector receives of a real gateway."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from muxserve.gateway.http.http_request import HttpRequest
from muxserve.gateway.routing.requests import Tracked
from muxserve.gateway.status.tracing import HttpTrace, Tracing
from muxserve.wire import RequestTrace, TraceStage
from tests.gateway.playing import play
from tests.gateway.rig import Rig, Running
from tests.gateway.unit_specs import fleet_of, model
from tests.support.patience import PATIENCE
from tests.support.ports import free_port
from tests.support.requests import asking
from tests.support.tiny_checkpoint import tiny_checkpoint

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())]


def request_of(trace: HttpTrace, now: float) -> Tracked:
    http = HttpRequest(now - 1.0, trace=trace)
    request = Tracked(
        "gw-1",
        front_id="front",
        spec=asking("m", 20, 8, traced=True),
        arrival=now - 1.0,
        context=http,
    )
    request.emitted = [1, 2, 3]
    request.first_token_at, request.last_token_at, request.cached_tokens = now - 0.6, now - 0.2, 16
    return request


def spans(exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in sorted(exporter.get_finished_spans(), key=lambda each: each.start_time or 0):
        found.setdefault(span.name, []).append(span)
    return found


def seconds(span: ReadableSpan) -> float:
    assert span.end_time is not None
    assert span.start_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_request_and_what_it_went_through() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    now = time.monotonic()
    trace = tracing.begin(HEADERS, "/v1/chat/completions", now - 1.0)
    assert trace is not None
    request = request_of(trace, now)
    tracing.submitted(request, now - 0.9)
    trace.repeated("engine_lost")
    trace.moved("u0", "u1")
    request.attempt = 1
    tracing.ended(request, "completed", now - 0.1)
    trace.finish("m", "team", 200, now)
    # The units tell after the end of it, each of its own.
    first = [("queue", 0.9), ("prefill", 0.8)]
    second = [("queue", 0.7), ("prefill", 0.65), ("prefill", 0.63), ("hand_over", 0.6), ("decode", 0.5), ("move", 0.5)]
    for unit, attempt, stages in (("u0", 0, first), ("u1", 1, second)):
        tracing.left_unit(unit, RequestTrace("gw-1", attempt, 0, [TraceStage(n, ago) for n, ago in stages]), now)
    tracing.left_unit("u0", RequestTrace("nobody's", 0, 0, [TraceStage("queue", 1.0)]), now)
    found = spans(exporter)
    (root,) = found["chat m"]
    assert root.parent is not None
    assert (f"{root.parent.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
    assert seconds(root) == pytest.approx(1.0, abs=0.01)
    told = dict(root.attributes or {})
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "m"
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (20, 3)
    assert told["gen_ai.usage.cache_read.input_tokens"] == 16
    assert told["gen_ai.server.time_to_first_token"] == pytest.approx(0.4)
    assert told["gen_ai.server.time_per_output_token"] == pytest.approx(0.2)
    assert told["gen_ai.server.request.duration"] == pytest.approx(0.9)
    assert (told["muxserve.tenant"], told["muxserve.attempts"], told["http.response.status_code"]) == ("team", 2, 200)
    assert [event.name for event in root.events] == ["repetition", "move", "first token"]
    assert {name: len(each) for name, each in found.items() if name != "chat m"} == {
        "admission": 1,
        "serve": 1,
        "serve again": 1,
        "queue": 2,
        "prefill": 3,
        "hand_over": 1,
        "decode": 1,
        "move": 1,
    }
    assert all(seconds(each) >= 0 for each in exporter.get_finished_spans())
    assert seconds(found["hand_over"][0]) == pytest.approx(0.1, abs=0.01)
    assert (seconds(found["decode"][0]), seconds(found["move"][0])) == (0, pytest.approx(0.5, abs=0.01))
    (again,) = found["serve again"]
    assert root.context is not None
    assert again.context is not None
    assert again.parent is not None
    assert again.parent.span_id == root.context.span_id
    assert [e.parent.span_id for e in found["prefill"] if e.parent][1:] == [again.context.span_id] * 2
    assert (again.attributes or {})["muxserve.unit"] == "u1"
    assert {each.context.trace_id for each in exporter.get_finished_spans() if each.context} == {int(TRACE, 16)}


@pytest.mark.parametrize(("status", "error"), [(500, "500"), (0, "disconnected"), (429, None)])
def test_what_failed(status: int, error: str | None) -> None:
    exporter = InMemorySpanExporter()
    trace = Tracing(SimpleSpanProcessor(exporter)).begin([], "/v1/embeddings", time.monotonic())
    assert trace is not None
    trace.finish("", "", status, time.monotonic())
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.parent) == ("embeddings", None)
    assert (span.attributes or {}).get("error.type") == error
    assert (span.status.status_code is StatusCode.ERROR) is (error is not None)


def test_the_client_that_samples_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    tracing = Tracing(SimpleSpanProcessor(InMemorySpanExporter()))
    unsampled = [(b"traceparent", f"00-{TRACE}-{PARENT}-00".encode())]
    assert tracing.begin(unsampled, "/v1/completions", time.monotonic()) is None
    assert tracing.begin([(b"traceparent", b"nonsense")], "/v1/completions", time.monotonic()) is not None


class Collector:
    """An OTLP endpoint over HTTP, which keeps what it receives."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.came = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                message = ExportTraceServiceRequest.FromString(body)
                with collector.came:
                    for resource in message.resource_spans:
                        named = {each.key: each.value.string_value for each in resource.resource.attributes}
                        collector.services.add(named["service.name"])
                        for scope in resource.scope_spans:
                            collector.spans += scope.spans
                    collector.came.notify_all()
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def wait(self, *names: str) -> dict[str, Any]:
        """The spans of these names, when all are there."""

        def there() -> bool:
            return {*names} <= {span.name for span in self.spans}

        with self.came:
            assert self.came.wait_for(there, PATIENCE), [span.name for span in self.spans]
            return {span.name: span for span in self.spans}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        collector.thread.join()
        collector.server.server_close()


def test_a_collector_receives_the_spans_of_a_gateway(rig: Rig, gateway: Running, collector: Collector) -> None:
    directory = rig.directory / "traced"
    directory.mkdir()
    running = rig.start(
        fleet_of(directory, [model("alpha", tiny_checkpoint())], unit="traced", port=free_port()),
        OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        OTEL_BSP_SCHEDULE_DELAY="50",
    )
    running.engines()
    with httpx.Client(base_url=running.url, timeout=PATIENCE) as http:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"model": "alpha", "prompt": play("traced"), "max_tokens": 20}
        answer = http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert http.get("/health").status_code == 200  # of this there is no span
    found = collector.wait("text_completion alpha", "admission", "serve", "queue", "prefill")
    root = found["text_completion alpha"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    told = {each.key: each.value for each in root.attributes}
    usage = answer.json()["usage"]
    assert told["gen_ai.usage.input_tokens"].int_value == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"].int_value == usage["completion_tokens"]
    assert told["gen_ai.server.time_to_first_token"].double_value > 0
    assert found["serve"].parent_span_id == root.span_id
    assert found["prefill"].parent_span_id == found["serve"].span_id
    assert collector.services == {"muxserve"}
    assert not [name for name in found if "health" in name]
    running.terminate()
    assert running.exit_status() == 0
