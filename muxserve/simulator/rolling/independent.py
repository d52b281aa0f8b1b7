"""Instances that know nothing of each other: separate batching with prefill priority (vLLM without chunked prefill), or
hybrid batching of chunks (Sarathi-Serve). A request goes where the fewest tokens are."""

from __future__ import annotations

from muxserve.costs import LatencyModel
from muxserve.simulator.instances.setup import InstanceSpec
from muxserve.simulator.rolling.chunked import ChunkedEngine
from muxserve.simulator.rolling.clock import Arrangement
from muxserve.simulator.rolling.engine import Engine
from muxserve.simulator.rolling.requests import PhasedRequest


class Independent(Arrangement):
    """`instances` of them. With a `budget` (tokens per step) prompts are cut in chunks, without they go first."""

    def __init__(self, spec: InstanceSpec, latency: LatencyModel, instances: int, budget: int | None = None) -> None:
        super().__init__(spec, latency)
        for number in range(1, instances + 1):
            name = f"i{number}"
            if budget is None:
                self.add(Engine(name, number, spec, self.costs, self))
            else:
                self.add(ChunkedEngine(name, number, spec, self.costs, self, budget))

    def place(self, request: PhasedRequest, now: float) -> None:
        """See `Arrangement.place`."""
        engine = min(self.engines.values(), key=lambda each: each.load)
        engine.enqueue(request)
        self.kick(engine, now)
