"""What the planner works with and what it answers: clusters, and the units placed on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# A model's engines: one for prefill and one for decode, or one of both phases.
ShapeName = Literal["split", "one"]
ROLLING = "rolling"


@dataclass(frozen=True, slots=True)
class Node:
    """One machine: `count` devices of one type (a name of `muxserve.costs.devices`)."""

    device: str
    count: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines. Devices are numbered through: those of node 0 first, then those of node 1, and so on."""

    nodes: tuple[Node, ...]

    @property
    def devices(self) -> int:
        """All devices together."""
        return sum(node.count for node in self.nodes)


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """One replica of a model in a unit, with engines of a `shape`. It takes `rate` requests per second of the model's
    load. Shares are of the compute of each device of the unit; quotas and floors are left to the unit's own plan."""

    model: str
    rate: float
    prefill_share: float
    decode_share: float
    shape: ShapeName = "split"


@dataclass(frozen=True, slots=True)
class PlacedUnit:
    """Models colocated on one mesh, `devices` (numbers in the cluster) of one type; every model is split over all of
    them (tensor parallel). `kv_bytes` is what each device has left for the page pool.

    The only model of a unit may have its layers in `stages`, each on as many devices, which split its tensors; on a
    CPU, where a unit is one device, each is a process. `policy` is that of the unit's scheduler (`rolling`: of a
    replica over which prefill rolls), where it is not the fleet file's.
    """

    name: str
    device: str
    devices: tuple[int, ...]
    models: tuple[PlacedModel, ...]
    kv_bytes: int
    stages: int = 1
    policy: str = ""

    @property
    def rolls(self) -> bool:
        """Whether prefill rolls over this replica and others."""
        return self.policy == ROLLING

    def shape_of(self, model: str) -> ShapeName:
        """The engines of one of its models."""
        return next(each.shape for each in self.models if each.model == model)

    @property
    def alone(self) -> bool:
        """Whether the unit is for the one engine of its only model."""
        return len(self.models) == 1 and not self.split

    @property
    def has_shares(self) -> bool:
        """Whether some job has a part of the compute only."""
        return any(min(model.prefill_share, model.decode_share) < 1.0 for model in self.models)

    @property
    def split(self) -> bool:
        """Whether every model has an engine for prefill and one for decode."""
        return all(model.shape == "split" for model in self.models)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where every replica of a fleet runs. `notes` says in words what was decided and what limits it."""

    cluster: Cluster
    units: tuple[PlacedUnit, ...]
    notes: tuple[str, ...] = ()
