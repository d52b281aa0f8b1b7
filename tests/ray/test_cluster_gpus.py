"""What is made of the GPUs of a cluster's nodes, without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from muxserve.cluster.events import HOST
from muxserve.cluster.ray import cluster
from muxserve.cluster.ray.cluster import NodeGpus, eligible, gpus_for, merged, type_resources
from muxserve.cluster.supervision import GaveUp
from muxserve.config import parse_fleet
from muxserve.gpu.nvml import Gpu, GpuChoiceError, GpuMachine, choose

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
H200 = ("NVIDIA H200", 140)
L40S = ("NVIDIA L40S", 45)


def node(name: str, kind: tuple[str, int], count: int = 2, resource: str = "") -> NodeGpus:
    gpus = tuple(Gpu(i, f"GPU-{name}-{i}", kind[0], kind[1] * GIB, i * GIB) for i in range(count))
    return NodeGpus(name, f"10.0.0.{name}", resource, GpuMachine(gpus))


def test_the_gpus_of_all_nodes_are_numbered_through() -> None:
    found = merged([node("1", H200), node("2", L40S, 1)])
    assert [(gpu.index, gpu.uuid) for gpu in found.gpus] == [(0, "GPU-1-0"), (1, "GPU-1-1"), (2, "GPU-2-0")]
    with pytest.raises(GpuChoiceError, match="3 GPUs of one type are wanted, the Ray cluster has 2 NVIDIA H200, 1"):
        choose(found, 3)


def test_why_there_are_none() -> None:
    mute = NodeGpus("1", "10.0.0.1", "", GpuMachine(why_none="the NVIDIA driver is not loaded"))
    assert merged([mute]).why_none == "10.0.0.1: the NVIDIA driver is not loaded"
    assert "ray start --num-gpus" in merged([]).why_none
    assert merged([mute, node("2", H200)]).why_none == ""


def test_the_type_that_the_fleet_file_says() -> None:
    found = merged([node("1", H200), node("2", L40S)])
    assert [gpu.uuid for gpu in eligible(found, "L40S", 2).gpus] == ["GPU-2-0", "GPU-2-1"]
    assert eligible(found, None, 2) == found
    # What has never been heard of is told elsewhere, and what may still come is planned by its data sheet.
    assert eligible(found, "X1", 2) == found
    to_come = choose(eligible(found, "A100-80GB", 2), 2)
    assert [(gpu.name, gpu.memory_bytes // GIB) for gpu in to_come] == [("A100-80GB", 80)] * 2


def test_nodes_are_told_apart_where_they_differ() -> None:
    planned = Gpu(7, "x", *H200)
    alike = [node("1", H200, resource="accelerator_type:H200"), node("2", H200, resource="accelerator_type:H200")]
    other = node("3", L40S, resource="accelerator_type:L40S")
    assert type_resources(alike, planned) == {}
    assert type_resources([*alike, other], planned) == {"accelerator_type:H200": 0.001}
    # A node that does not say what it is would be left out: its units are refused there, if it comes to that.
    assert type_resources([*alike, node("4", H200), other], planned) == {}
    assert type_resources([other], planned) == {}


def test_a_cluster_that_does_not_answer_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(address: str, start: bool) -> object:
        raise GaveUp(HOST, f"no Ray cluster answers at {address!r} ({start})")

    monkeypatch.setattr(cluster, "join", join)
    text = "cluster: {gpus: 1, launcher: ray}\nmodels: [{name: m, path: models/arithmetic}]"
    fleet = parse_fleet(text, "f", ROOT / "configs", {})
    with pytest.raises(GpuChoiceError, match=r"the Ray cluster has no usable GPU: no Ray cluster answers at 'auto'"):
        choose(gpus_for(fleet)(), 1)
