"""Memory-greedy placement, the baseline of MuxServe's figure 8 (arXiv:2404.02015, section 4.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from scenarios import DEVICE

from muxserve.costs import LatencyModel
from muxserve.costs.devices import device
from placement.candidates import Candidates
from placement.cluster import Cluster
from placement.demand import Demand, Member, Mesh
from placement.engines import Engines
from placement.estimator import Estimator
from placement.greedy import kinds
from placement.layout import Layout, Unit, joined
from placement.meshes import Machines
from placement.planner import ClusterPlan, PlanOptions, describe
from placement.values import IMPOSSIBLE, Values


def plan_memory_greedy(demands: Sequence[Demand], cluster: Cluster, latency: LatencyModel) -> ClusterPlan:
    """The baseline's plan; it knows of no replicas."""
    options = PlanOptions()
    alone = [replace(demand, least=1, most=None) for demand in demands]
    engines = Engines(alone, latency, {DEVICE: device(DEVICE).memory_bytes}, options.rules)
    values = Values(Estimator(Candidates(engines, options.shares)), options.objective)
    layout = memory_greedy(values, Machines(cluster))
    return describe(values, layout, options, layout.value)


def memory_greedy(values: Values, machines: Machines) -> Layout:
    """The model with the highest rate first, each onto the mesh with the most free memory per device.

    Machines start whole. A mesh that nobody uses yet is cut down to the smallest kind on which the model meets its rate
    alone, or on which it serves most; what is cut off is a mesh again.
    """
    meshes = kinds(values, machines)
    order = sorted(range(len(values.demands)), key=lambda m: (-values.demands[m].rate, m))
    open_: list[Unit] = [Unit(Mesh(device, size), ()) for device, sizes in machines.nodes.items() for size in sizes]
    for model in order:
        member = Member(model)
        found = values.estimator.candidates.all(member, meshes)
        if not found:
            continue
        wanted = {
            device: min(
                (c for c in found if c.mesh.device == device),
                key=lambda c: (not c.meets, c.mesh.size if c.meets else -c.throughput),
                default=None,
            )
            for device in machines.nodes
        }
        for index in sorted(range(len(open_)), key=lambda i: (-_free(values, open_[i]), i)):
            mesh, members = open_[index]
            choice = wanted[mesh.device]
            if not members:
                if choice is None or choice.mesh.size > mesh.size:
                    continue
                rest = mesh.size - choice.mesh.size
                open_[index] = Unit(choice.mesh, (member,))
                if rest:
                    open_.append(Unit(Mesh(mesh.device, rest), ()))
                break
            if values.of(mesh, joined(members, (member,))) != IMPOSSIBLE:
                open_[index] = Unit(mesh, joined(members, (member,)))
                break
    used = [unit for unit in open_ if unit.members]
    assert machines.fits(Counter(unit.mesh for unit in used)), "meshes were cut out of machines"
    return Layout(values, machines, used)


def _free(values: Values, unit: Unit) -> float:
    """The part of each device's memory that is not taken by weights."""
    if not unit.members:
        return 1.0
    return values.estimator.room(unit.mesh, unit.members) / values.estimator.engines.memory[unit.mesh.device]
