"""A Ray cluster: how this process joins it, and what GPUs its nodes have.

Which GPUs a unit gets is up to Ray when it places it. What the nodes have is asked beforehand, for planning: types,
memory, and whether nodes must be told apart.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from muxserve.cluster.events import HOST
from muxserve.cluster.machine import this_machines_gpus
from muxserve.cluster.supervision import GaveUp
from muxserve.config import Fleet
from muxserve.costs.devices import device
from muxserve.costs.latency import CostError
from muxserve.gpu import nvml

log = logging.getLogger(__name__)

THE_CLUSTER = "the Ray cluster"
# Ray starts a process on each node to ask there.
_LOOK_SECONDS = 60.0
# Ray's resource for nodes with GPUs of a type; a unit takes a trace of it, so that there is always enough.
_TYPE, _TRACE = "accelerator_type:", 0.001


@dataclass(frozen=True)
class NodeGpus:
    """What one node has. `type_resource` is Ray's own name for nodes of its kind; empty if it has none."""

    node: str
    address: str
    type_resource: str
    found: nvml.GpuMachine


# By Ray's name of the node, which no other ever gets. How full its GPUs are changes, but nothing relies on that.
_known: dict[str, NodeGpus] = {}
_one_at_a_time = threading.Lock()


def join(address: str, start: bool = True) -> Any:
    """Join the cluster, if this process has not; returns the module `ray`.

    Args:
        start: whether "auto" starts a cluster on this machine if there is none.

    Raises:
        GaveUp: Ray is not installed, or no cluster answers.
    """
    try:
        import ray
    except ImportError:
        raise GaveUp(HOST, "units on Ray need it: pip install '.[ray]' in MuxServe's repository") from None
    if not ray.is_initialized():
        try:
            _join(ray, address, start)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise GaveUp(
                HOST,
                f"no Ray cluster answers at {address!r} ({first_line(error)}); start one with "
                "`ray start --head` here and `ray start --address=...` on the other machines",
            ) from None
    return ray


def gpus_for(fleet: Fleet, start: bool = False) -> Callable[[], nvml.GpuMachine]:
    """What tells the GPUs that a fleet can be served on: those of this machine, or with `launcher: ray` those of all
    nodes of the cluster as if they were one machine's. `start` is that of `join`."""
    if fleet.cluster.launcher != "ray":
        return this_machines_gpus

    def ask() -> nvml.GpuMachine:
        try:
            nodes = survey(join(fleet.cluster.ray.address, start))
        except GaveUp as error:
            return nvml.GpuMachine(why_none=str(error), where=THE_CLUSTER)
        return eligible(merged(nodes), fleet.cluster.gpu_type, fleet.cluster.gpus)

    return ask


def survey(ray: Any) -> list[NodeGpus]:
    """The nodes that have GPUs. A node that cannot be asked has none, for a reason."""
    with _one_at_a_time:
        return _survey(ray)


def _survey(ray: Any) -> list[NodeGpus]:
    nodes = {node["NodeID"]: node for node in alive(ray) if node["Resources"].get("GPU")}
    asked = ask_nodes(ray, [name for name in nodes if name not in _known], look)
    told = {}
    for name, node in nodes.items():
        kind = next((each for each in sorted(node["Resources"]) if each.startswith(_TYPE)), "")
        answer = asked.get(name, b"")
        if isinstance(answer, str):
            told[name] = NodeGpus(name, node["NodeManagerAddress"], kind, nvml.GpuMachine(why_none=answer))
            continue
        if answer:
            found = msgspec.json.decode(answer, type=nvml.GpuMachine)
            # Ray may have been told to leave some of them alone.
            found = replace(found, gpus=found.gpus[: int(node["Resources"]["GPU"])])
            _known[name] = NodeGpus(name, node["NodeManagerAddress"], kind, found)
        told[name] = _known[name]
    return list(told.values())


def alive(ray: Any) -> list[dict[str, Any]]:
    """The nodes of the cluster, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def ask_nodes(ray: Any, names: Sequence[str], question: Callable[[], bytes]) -> dict[str, bytes | str]:
    """Have a function of ours run on each node, by Ray's names of them; its answers, or why there is none in words."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {}
    for name in names:
        there = NodeAffinitySchedulingStrategy(name, soft=False)
        asked[name] = ray.remote(question).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote()
    answers: dict[str, bytes | str] = {}
    for name, reference in asked.items():
        try:
            answers[name] = ray.get(reference, timeout=_LOOK_SECONDS)
        except ray.exceptions.RayError as error:
            answers[name] = why(error)
    return answers


def look() -> bytes:
    """Runs on a node: its GPUs, as JSON."""
    return msgspec.json.encode(nvml.machine())


def merged(nodes: Sequence[NodeGpus]) -> nvml.GpuMachine:
    """The GPUs of all nodes, numbered through."""
    gpus = [gpu for node in nodes for gpu in node.found.gpus]
    reasons = [f"{node.address}: {node.found.why_none}" for node in nodes if not node.found.gpus]
    why_none = "; ".join(reasons) or "no node has GPUs (`ray start --num-gpus=...` tells Ray of them)"
    numbered = tuple(replace(gpu, index=number) for number, gpu in enumerate(gpus))
    return nvml.GpuMachine(numbered, why_none="" if numbered else why_none, where=THE_CLUSTER)


def eligible(found: nvml.GpuMachine, gpu_type: str | None, count: int) -> nvml.GpuMachine:
    """Those of the type that the fleet file says. If there are none, `count` as the data sheet has them: a cluster that
    adds machines by itself may have some when they are needed."""
    if gpu_type is None:
        return found
    try:
        wanted = device(gpu_type)
    except CostError:
        return found
    gpus = tuple(gpu for gpu in found.gpus if nvml.device_name(gpu) == wanted.name)
    if not gpus:
        gpus = tuple(nvml.Gpu(number, f"to-come-{number}", wanted.name, wanted.memory_bytes) for number in range(count))
    return replace(found, gpus=gpus, why_none="")


def type_resources(nodes: Sequence[NodeGpus], planned: nvml.Gpu) -> dict[str, float]:
    """What a unit that is planned for such GPUs asks of its node besides GPUs, so that it does not come to others.
    Nothing where all are alike, or Ray does not tell them apart; the unit's host then refuses others."""
    good = [node for node in nodes if any(nvml.same_type(gpu, planned) for gpu in node.found.gpus)]
    kinds = {node.type_resource for node in good}
    others = any(node not in good for node in nodes)
    return {kinds.pop(): _TRACE} if others and len(kinds) == 1 and "" not in kinds else {}


def why(error: BaseException) -> str:
    """What Ray says, for people."""
    if "No module named 'muxserve" in str(error):
        return "a node of the Ray cluster has no MuxServe; install the same version on every node"
    return first_line(error)


def first_line(error: BaseException) -> str:
    """The first words of an error, which may be a page long."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _join(ray: Any, address: str, start: bool) -> None:
    _keep_quiet(ray)
    options = {"namespace": "muxserve", "log_to_driver": False, "configure_logging": False}
    try:
        ray.init(address=address, **options)
    except ConnectionError:
        if address != "auto" or not start:
            raise
        ray.init(address="local", include_dashboard=False, **options)


def _keep_quiet(ray: Any) -> None:
    """Ray prints what its raylets complain of on our standard output, in between the progress of the fleet."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    worker: Any = getattr(ray._private, "worker", None)
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda said, **_: log.info("Ray: %s", " ".join(said.get("lines", ())))
