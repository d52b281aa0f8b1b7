"""What each model is on each kind of mesh: memory, curves, whether it runs there at all. Cached per fleet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from muxserve.costs.latency import CostError, EngineShape, LatencyModel, Load
from placement.cluster import ShapeName
from placement.curves import CurveLengths, Curves, DecodeCurve, PrefillCurve
from placement.demand import Demand, Mesh, splits_evenly
from placement.memory import MemoryRules, model_bytes, sequence_bytes


class ShareRules(NamedTuple):
    """How engines share a device's compute. They have shares of it on meshes of at most `most_devices` (None: on all),
    and take turns on others. On a single device each has `graph_sets` of CUDA graphs (None: as the memory's rules)."""

    most_devices: int | None = None
    graph_sets: int | None = None


SHARED = ShareRules()


class Footprint(NamedTuple):
    """Bytes on each device of a mesh: `own` before the first token (weights, activations, contexts), `sequence` the KV
    of one request in service."""

    own: int
    sequence: float


class Engines:
    """Models of one fleet on one source of costs.

    Args:
        demands: the fleet's models.
        latency: source of costs.
        memory: bytes of each device type that may be used.
        rules: what of the memory may be used for what, for models of two engines.
        shape: the engines of models for which nobody has chosen them.
        sharing: how they share the compute; None: they take turns.
    """

    def __init__(
        self,
        demands: Sequence[Demand],
        latency: LatencyModel,
        memory: Mapping[str, int],
        rules: MemoryRules | None = None,
        shape: ShapeName = "split",
        sharing: ShareRules | None = SHARED,
    ) -> None:
        self.demands = tuple(demands)
        self.shapes: tuple[ShapeName, ...] = tuple(demand.shape or shape for demand in self.demands)
        self.rules = rules or MemoryRules()
        self._sharing = sharing
        rules = self.rules
        self.memory = {name: int(size * rules.utilisation) - rules.reserve_bytes for name, size in memory.items()}
        self.unknown: dict[str, str] = {}
        self._latency = latency
        self._curves = Curves(latency)
        self._lengths = [lengths_of(demand) for demand in self.demands]
        self._footprints: dict[tuple[int, Mesh], Footprint] = {}
        self._decode: dict[tuple[int, Mesh, float], DecodeCurve | None] = {}
        self._prefill: dict[tuple[int, Mesh, float], PrefillCurve | None] = {}
        self._fits: dict[tuple[int, Mesh], bool] = {}

    def fits(self, model: int, mesh: Mesh) -> bool:
        """Whether the model can run on such a mesh alone: it splits evenly, its weights fit with room for a sequence,
        and its costs are known (`unknown` keeps what the latency model said of those that are not)."""
        key = (model, mesh)
        found = self._fits.get(key)
        if found is None:
            found = self._fits[key] = self._check(model, mesh)
        return found

    def in_turns(self, mesh: Mesh) -> bool:
        """Whether engines on such a mesh take turns on all of its compute."""
        most = 0 if self._sharing is None else self._sharing.most_devices
        return most is not None and mesh.size > most

    def footprint(self, model: int, mesh: Mesh) -> Footprint:
        """Its memory on each device of such a mesh."""
        key = (model, mesh)
        found = self._footprints.get(key)
        if found is None:
            demand = self.demands[model]
            rules = self.rules.of_one_engine() if self.shapes[model] == "one" else self.rules.of(demand)
            if self._sharing is not None and self._sharing.graph_sets is not None and mesh.size == 1:
                rules = replace(rules, graph_sets=self._sharing.graph_sets)
            own = model_bytes(demand, mesh.size, rules)
            found = self._footprints[key] = Footprint(own, sequence_bytes(demand, mesh.size))
        return found

    def decode(self, model: int, mesh: Mesh, share: float) -> DecodeCurve | None:
        """Its decode table with that share; None where its costs are not known."""
        key = (model, mesh, share)
        if key not in self._decode:
            demand = self.demands[model]
            try:
                self._decode[key] = self._curves.decode(
                    demand.architecture, self._shape(demand, mesh, share, demand.ahead), self._lengths[model]
                )
            except CostError as error:
                self.unknown[demand.name] = str(error)
                self._decode[key] = None
        return self._decode[key]

    def prefill(self, model: int, mesh: Mesh, share: float) -> PrefillCurve | None:
        """Its prefill table with that share; None where its costs are not known."""
        key = (model, mesh, share)
        if key not in self._prefill:
            demand = self.demands[model]
            try:
                self._prefill[key] = self._curves.prefill(
                    demand.architecture,
                    self._shape(demand, mesh, share, demand.ahead and self.shapes[model] == "one"),
                    self._lengths[model],
                )
            except CostError as error:
                self.unknown[demand.name] = str(error)
                self._prefill[key] = None
        return self._prefill[key]

    def _shape(self, demand: Demand, mesh: Mesh, share: float, ahead: bool) -> EngineShape:
        alone = mesh.size == 1
        return EngineShape(mesh.device, mesh.size, share, demand.dtype, demand.graphs, ahead=ahead and alone)

    def slowdown(self, mesh: Mesh, mine: Load, others: tuple[Load, ...]) -> float:
        """Factor by which a job is slower beside `others`."""
        return self._latency.slowdowns(mesh.device, (mine, *others))[0]

    def _check(self, model: int, mesh: Mesh) -> bool:
        if mesh.device not in self.memory or not splits_evenly(self.demands[model].architecture, mesh.size):
            return False
        footprint = self.footprint(model, mesh)
        if footprint.own + footprint.sequence > self.memory[mesh.device]:
            return False
        return self.decode(model, mesh, 1.0) is not None and self.prefill(model, mesh, 1.0) is not None


def lengths_of(demand: Demand) -> CurveLengths:
    """What of a demand its curves depend on."""
    return CurveLengths(
        prompt=demand.prompt_tokens,
        steps=demand.decode_steps,
        context=demand.sequence_tokens,
        max_seqs=demand.max_num_seqs,
        max_tokens=demand.max_num_batched_tokens,
    )
