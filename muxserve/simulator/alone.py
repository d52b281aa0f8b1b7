"""What a request takes with devices of its own: the unit of SLO scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from muxserve.costs import EngineCosts, LatencyModel
from muxserve.metrics.definitions import Reference
from muxserve.metrics.records import RequestRecord
from muxserve.simulator.setup import SimModel, SimUnit


def steps_seconds(costs: EngineCosts, context: int, steps: int) -> float:
    """Seconds of `steps` decode steps of one sequence, the first at `context` tokens."""
    seconds = 0.0
    while steps > 0:
        cost = costs.decode(1, context)
        here = steps
        if cost.until < context + steps:
            here = max(1, min(steps, int(cost.until - context) + 1))
        seconds += cost.run(1, context, here)
        context += here
        steps -= here
    return seconds


def prefill_seconds(costs: EngineCosts, tokens: int, most: int) -> float:
    """Seconds of the prefill of one prompt, at most `most` tokens in a step."""
    seconds, computed = 0.0, 0
    while computed < tokens:
        chunk = min(tokens - computed, most)
        seconds += costs.prefill(chunk, chunk * computed + chunk * (chunk + 1) // 2, 1)
        computed += chunk
    return seconds


class AloneSimulation:
    """Gives the latency of each record's request, were it alone on the devices of the first unit that serves its model,
    with all of their compute. Stages of a pipeline are one after the other, which together are the whole model on the
    devices of one. Pass it to `muxserve.metrics` as the reference.

    Raises:
        CostError: the latency model does not know a model or shape.
    """

    def __init__(self, units: Sequence[SimUnit], latency: LatencyModel) -> None:
        self._costs: dict[str, tuple[EngineCosts, int]] = {}
        self._pooling = frozenset(model.name for unit in units for model in unit.models if model.profile.pooling)
        for unit in units:
            for model in unit.models:
                if model.name not in self._costs:
                    self._costs[model.name] = _costs(unit, model, latency)
        self._known: dict[tuple[str, int, int], Reference] = {}

    @property
    def models(self) -> Mapping[str, tuple[EngineCosts, int]]:
        """Costs and largest step of each model."""
        return self._costs

    def __call__(self, record: RequestRecord) -> Reference:
        """The reference of one request; one of a model that no unit serves has whatever it takes (infinity)."""
        return self.of(record.model, record.prompt_tokens, record.output_tokens)

    def of(self, model: str, prompt: int, output: int) -> Reference:
        """The reference of a request of those lengths."""
        key = (model, prompt, output)
        known = self._known.get(key)
        if known is None:
            costs_of = self._costs.get(model)
            if costs_of is None:
                return Reference(float("inf"))
            costs, most = costs_of
            ttft = prefill_seconds(costs, prompt, most)
            if model in self._pooling:
                found = self._known[key] = Reference(ttft, ttft)
                return found
            steps = max(0, output - 1)
            decode = steps_seconds(costs, prompt + 1, steps)
            # An answer of one token has no time per token; what its next one would take stands for it.
            tpot = decode / steps if steps else steps_seconds(costs, prompt + 1, 1)
            known = self._known[key] = Reference(ttft + decode, ttft, tpot)
        return known


def _costs(unit: SimUnit, model: SimModel, latency: LatencyModel) -> tuple[EngineCosts, int]:
    return latency.engine(model.architecture, unit.shape_of(model, 1.0)), model.profile.engines.max_num_batched_tokens
