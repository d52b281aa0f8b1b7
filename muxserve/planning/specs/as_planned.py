"""What the GPUs of a unit do otherwise than it was planned, and whether the unit still serves its rates then."""

from __future__ import annotations

from typing import NamedTuple

from muxserve.costs.latency import LatencyModel
from muxserve.gpu.nvml import device_name
from muxserve.gpu.unit import GpuUnit
from muxserve.planning.specs.unit_plan import ResolvedUnit
from muxserve.spec import SHARES_PER_LEASE
from placement.candidates import Candidates
from placement.demand import Member, Mesh
from placement.engines import Engines
from placement.estimator import Estimator, Shares

_PROBE = "`muxserve doctor --gpu` tries what these GPUs can do"


class Unlike(NamedTuple):
    """What is otherwise, in words, and the models that serve their rates as planned but not so, by the estimate."""

    words: str
    short: tuple[str, ...] = ()


def unlike_planned(plan: ResolvedUnit, latency: LatencyModel) -> Unlike | None:
    """What the GPUs of this machine do otherwise than the plan of a unit has it; None: nothing, or the unit has no
    GPUs here. `plan.gpu` is as its GPUs can be shared."""
    gpu, cluster = plan.gpu, plan.fleet.cluster
    if gpu is None or gpu.elsewhere or gpu.alone:
        return None
    beside = plan.policy == "free" and cluster.mps != "off"
    planned = "shares of the SMs" if gpu.has_percentages else "engines side by side" if beside else ""
    if gpu.sharing == "off" and planned:
        words = f"was planned with {planned}; here engines alternate on the whole GPU. {_PROBE}"
        return Unlike(f"{plan.name} {words}; plan again with `cluster.mps: off` for turns", _short(plan, gpu, latency))
    per_lease = cluster.sm_sharing in SHARES_PER_LEASE and plan.policy == "slack" and gpu.ranks == 1
    if per_lease and gpu.sharing not in SHARES_PER_LEASE:
        words = f"was planned with shares of the SMs that follow the load; here engines keep theirs. {_PROBE}"
        return Unlike(f"{plan.name} {words}; plan again with `cluster.sm_sharing: mps` for shares that stay")
    return None


def _short(plan: ResolvedUnit, gpu: GpuUnit, latency: LatencyModel) -> tuple[str, ...]:
    """Models that serve their rates with the planned shares, but not where jobs take turns on the whole GPU."""
    kind = device_name(gpu.gpus[0])
    if kind is None:
        return ()
    memory = {kind: min(each.memory_bytes for each in gpu.gpus)}
    estimator = Estimator(Candidates(Engines(plan.demands, latency, memory, gpu.rules)))
    mesh, members = Mesh(kind, gpu.ranks), tuple(map(Member, range(len(plan.demands))))
    shares = [gpu.shares[demand.name] for demand in plan.demands]
    planned = Shares(min(each.prefill for each in shares), tuple(each.decode for each in shares))
    before, here = (estimator.unit(mesh, members, each) for each in (planned, Shares(1.0, (1.0,) * len(shares))))
    if before is None or here is None:
        return ()
    models = zip(plan.demands, before.models, here.models, strict=True)
    return tuple(demand.name for demand, then, now in models if then.meets_rate and not now.meets_rate)
