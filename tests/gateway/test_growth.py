"""A gateway keeps nothing of models that were removed: stock front ends that come, answer and go."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import weakref
from types import SimpleNamespace
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import SchedulerStats

from muxserve.gateway.front_end.served_models import OfferedModels
from muxserve.gateway.http.errors import App, Message
from muxserve.gateway.limits.concurrency_limiter import ConcurrencyLimiter
from muxserve.gateway.routing.requests import RequestTable, Tracked
from muxserve.gateway.status.measure import Measures
from muxserve.gateway.status.vllm_metrics import JoinedMetrics, Lean
from muxserve.spec import FleetSpec, GatewaySpec
from tests.gateway.unit_specs import model
from tests.support.thoroughness import examples
from tests.support.tiny_checkpoint import tiny_checkpoint

# The first rounds fill what is bounded.
SETTLED = 3
# Seconds until threads have ended on a machine that is busy.
PATIENCE = 30.0
# Objects that a round may add: the lines and warnings that pytest keeps are some. A front end has 6,000.
KEPT = 20


class AnsweringBroker:
    """Answers every request at once with two tokens."""

    def __init__(self) -> None:
        self.table = RequestTable("epoch")
        self.router = SimpleNamespace(placing=SimpleNamespace(replicas=lambda name: []))
        self._front_ends: dict[str, Any] = {}

    def attach(self, name: str, front_end: Any) -> None:
        self._front_ends[name] = front_end

    def detach(self, name: str) -> None:
        del self._front_ends[name]

    def cancel(self, *_: object) -> None:
        pass

    def submit(self, request: Tracked) -> None:
        output = EngineCoreOutput(request.front_id, [70, 71], finish_reason=FinishReason.LENGTH)
        self._front_ends[request.model].deliver(EngineCoreOutputs(scheduler_stats=SchedulerStats()), 1, [output])


class NoGrammars:
    async def admit(self, *_: object) -> None:
        pass


async def post(app: App, path: str, body: dict[str, Any]) -> None:
    """Ask, and look that it was answered."""
    content = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if content:
            return content.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "client": ("c", 1),
        "server": ("s", 1), "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    await app(scope, receive, send)
    assert sent[0]["status"] == 200, sent


async def test_models_that_come_and_go_leave_nothing() -> None:
    measures = Measures([], CollectorRegistry())
    limiter = ConcurrencyLimiter([], 0, 1, measures)
    gone = asyncio.Event()
    broker: Any = AnsweringBroker()
    grammars: Any = NoGrammars()
    images: Any = SimpleNamespace()
    empty = FleetSpec("", GatewaySpec("127.0.0.1", 0), [], [])
    offered = OfferedModels(empty, broker, limiter, grammars, images, gone.set, 0, None)

    async def round_of(number: int) -> dict[str, weakref.ref[Any]]:
        """Add a model, ask it, remove it; what stood for it."""
        spec = model(f"m{number}", path=tiny_checkpoint(), max_len=256)
        limiter.add(spec)
        measures.add(spec)
        offered.learn(msgspec.structs.replace(empty, models=[spec]))
        await offered.build(spec)
        app = offered.models[spec.name].app
        await post(app, "/v1/completions", {"model": spec.name, "prompt": "hello", "max_tokens": 2})
        messages = [{"role": "user", "content": "hello"}]
        await post(app, "/v1/chat/completions", {"model": spec.name, "messages": messages, "max_tokens": 2})
        generate_latest(Lean(JoinedMetrics(offered.registries)))
        front_end = offered._front_ends[spec.name]
        llm = front_end.llm
        parts = {
            "front end": front_end.client, "engine": llm, "app": app, "registry": front_end.registry,
            "tokenizer": llm.renderer.tokenizer, "configuration": llm.vllm_config,
        }  # fmt: skip
        seen = {name: weakref.ref(part) for name, part in parts.items()}
        del app, front_end, llm, parts
        gone.clear()
        offered.learn(empty)
        await gone.wait()
        measures.remove(spec.name)
        return seen

    tracked = []
    for number in range(SETTLED + examples(37)):
        left = await round_of(number)
        with contextlib.suppress(TimeoutError):
            # Threads of a front end may end a little later.
            async with asyncio.timeout(PATIENCE):
                while left := {name: part for name, part in left.items() if part() is not None}:
                    await asyncio.sleep(0.01)
        assert not left, f"{[*left]} of model {number} is still there"
        gc.collect()
        tracked.append(len(gc.get_objects()))
    settled = tracked[SETTLED:]
    assert settled[-1] - settled[0] < KEPT * len(settled), f"objects after each round: {tracked}"
