"""Small fleets with a latency model that can be worked out by hand, and engines that do not leap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from muxserve.costs import Decode, EngineShape, LatencyModel, Load, ModelArchitecture
from muxserve.scheduling.types import ModelProfile, PoolProfile
from muxserve.simulator.batch import DecodeBatch
from muxserve.simulator.leased import PhaseEngine
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.result import UnitResult
from muxserve.simulator.scheduler import EngineTypes
from muxserve.simulator.setup import Options, SimModel, SimUnit
from muxserve.simulator.unit import SimulatedUnit
from muxserve.workload.trace import TraceRequest
from tests.costs.models import llama

# The shape of a 14B model.
LARGE = llama(
    name="large", layers=48, heads=40, kv_heads=8, hidden=5120, intermediate=13824, vocab=152064, max_len=32768,
    dtype="bfloat16",
)  # fmt: skip


@dataclass(frozen=True)
class Linear:
    """Costs that are linear in everything; the decode cost changes at `bend` tokens of context."""

    prefill_fixed: float = 0.001
    prefill_token: float = 0.00005
    decode_fixed: float = 0.004
    decode_sequence: float = 0.0001
    decode_token: float = 0.000001
    bend: float = float("inf")
    bandwidth: float = 0.0

    def prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        return self.prefill_fixed + self.prefill_token * tokens

    def decode(self, batch: int, context: int) -> Decode:
        fixed = self.decode_fixed + self.decode_sequence * batch
        if context <= self.bend:
            return Decode(fixed, self.decode_token, self.bend)
        return Decode(fixed - self.bend * self.decode_token, 2 * self.decode_token)

    def prefill_load(self, tokens: int, pairs: int, sequences: int) -> Load:
        return Load(self.bandwidth / 2, 0.8)

    def decode_load(self, batch: int, context: int) -> Load:
        return Load(self.bandwidth + 0.01 * batch if self.bandwidth else 0.0, 0.1)


class Analytic:
    """A latency model out of `Linear` costs; jobs share the bandwidth. `skew` makes engines differ a little, so that
    nothing happens at the same moment by chance."""

    def __init__(self, costs: Linear | None = None, skew: float = 0.0) -> None:
        self.costs = costs or Linear()
        self.skew = skew

    def engine(self, architecture: ModelArchitecture, shape: EngineShape) -> Linear:
        factor = (1.0 + self.skew * architecture.vocab) / shape.share**0.5
        c = self.costs
        return Linear(
            c.prefill_fixed * factor,
            c.prefill_token * factor,
            c.decode_fixed * factor,
            c.decode_sequence * factor,
            c.decode_token * factor,
            c.bend,
            c.bandwidth,
        )

    def slowdowns(self, device: str, loads: Sequence[Load]) -> list[float]:
        return [max(1.0, sum(each.bandwidth for each in loads))] * len(loads)


def architecture(number: int = 0) -> ModelArchitecture:
    sizes = {"layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 64, "hidden": 128, "intermediate": 512}
    return llama(name="Test", vocab=number, dtype="float32", **sizes)


def unit(profiles: list[ModelProfile], pages: int, policy: str = "adbs", **changes: object) -> SimUnit:
    values: dict[str, object] = {
        "name": "unit0",
        "device": "A100-80GB",
        "devices": (0,),
        "models": tuple(SimModel(p, architecture(i), "float32") for i, p in enumerate(profiles)),
        "pools": (PoolProfile("pool", pages),),
        "policy": policy,
    }
    return SimUnit(**{**values, **changes})  # type: ignore[arg-type]


def run(unit: SimulatedUnit, load: list[TraceRequest]) -> UnitResult:
    """One unit, on a clock of its own."""
    arrivals = (SimRequest.of(each, number) for number, each in enumerate(load))
    unit.clock.run(arrivals, unit.arrive, unit.machine.overheads.request)
    return unit.result()


def requests(*rows: tuple[float, str, int, int]) -> list[TraceRequest]:
    return [TraceRequest(*row) for row in rows]


# ------------------------------------------------------------ step by step


class CountingBatch(DecodeBatch):
    """Everything by looking at every sequence, as often as asked."""

    def next_end(self) -> int:
        return min((request.ends_at for request in self.running), default=1 << 60)

    def ended(self) -> list[SimRequest]:
        return [request for request in self.running if request.ends_at <= self.counter]

    def growth(self, first: int, end: int) -> int:
        found = 0
        for request in self.running:
            for step in range(first, end):
                filled, rest = divmod(request.base + step, self.block_tokens)
                if not rest:
                    found += self.counts.held(filled + 1, request) - self.counts.held(filled, request)
        return found

    def done_by(self, now: float) -> int:
        counter = self.floor
        while self.time_of(counter + 1) <= now:
            counter += 1
        return counter

    def blocks(self) -> int:
        """What its sequences hold at a boundary."""
        return sum(-(-(request.base + self.counter) // self.block_tokens) for request in self.running)

    def tokens(self) -> int:
        return sum(request.base + self.counter + 1 for request in self.running)


class Stepping:
    """Looks at every step, and counts everything anew."""

    batch: CountingBatch
    order: int

    def make_batch(self, block_tokens: int) -> CountingBatch:
        return CountingBatch(block_tokens, self.order << 40)

    def _leap(self, end: int) -> None:
        super()._leap(self.batch.counter + 1)  # type: ignore[misc]

    def _arrive(self, counter: int, now: float) -> None:
        assert counter == self.batch.counter + 1
        super()._arrive(counter, now)  # type: ignore[misc]
        assert self.batch.context == self.batch.tokens()


class SteppingEngine(Stepping, PhaseEngine):  # type: ignore[misc]
    pass


STEPPING = EngineTypes(SteppingEngine)


def stepping(simulated: SimUnit, latency: LatencyModel, options: Options | None = None) -> SimulatedUnit:
    """The unit with engines that take every step one by one."""
    return SimulatedUnit(simulated, latency, options, engine_types=STEPPING)


def one_engine(simulated: SimUnit, policy: str = "free", **changes: object) -> SimUnit:
    """The unit with one engine of both phases for each model."""
    models = tuple(replace(m, profile=m.profile.with_engines(both=True, elastic=False)) for m in simulated.models)
    return replace(simulated, models=models, policy=policy, **changes)  # type: ignore[arg-type]
