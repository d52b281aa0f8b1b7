"""What a unit's host on another machine than the controller's does for its GPUs before it starts anything: which they
are, whether they are as planned, and how they can be shared. On the controller's own machine `deploy` has done that."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from muxserve.cluster import machine
from muxserve.gpu import nvml
from muxserve.gpu.environment import VISIBLE
from muxserve.gpu.sharing import PERCENTAGES_NOTE, MpsWish, SharingError, settle
from muxserve.gpu.unit import GpuPlan, GpuUnit, PoolSizer
from muxserve.spec import UnitSpec, save
from muxserve.spec.run_dir import default_base


class GpuHostError(Exception):
    """The unit cannot be served on the GPUs of this machine; the message says why."""


class UnitGpus(NamedTuple):
    """The unit's spec with its GPUs, what sizes its pools, and what the user should know."""

    unit_spec: UnitSpec
    sizer: PoolSizer
    notes: list[str]


def settle_gpus(unit_spec: UnitSpec, plan: GpuPlan, file: Path, environ: MutableMapping[str, str]) -> UnitGpus:
    """Take the GPUs that CUDA_VISIBLE_DEVICES leaves to this process for the unit, and write down which they are.

    Args:
        file: where the unit's processes read the unit's spec.
        environ: of this process. It names the GPUs by UUID afterwards, since NVML and CUDA may number them otherwise.

    Raises:
        GpuHostError: they are too few, not as planned, or cannot be shared; or what is installed cannot use them.
    """
    if problem := machine.vllm_without_cuda():
        raise GpuHostError(f"{problem} on this machine; pip install '.[gpu]' there, in MuxServe's repository")
    whole = nvml.machine()
    found = machine.fit_for_torch(nvml.visible(whole, environ))
    try:
        gpus = nvml.choose(found, plan.unit.ranks)
    except nvml.GpuChoiceError as error:
        raise GpuHostError(str(error)) from None
    planned = plan.unit.gpus[0]
    if not nvml.same_type(gpus[0], planned):
        raise GpuHostError(
            f"GPU {gpus[0].index} of this machine is a {gpus[0].name}, but the unit is planned for a {planned.name}; "
            "say in cluster.gpu_type which ones to serve on"
        )
    environ[VISIBLE] = ",".join(gpu.uuid for gpu in gpus)
    try:
        here, notes = tried(
            replace(plan.unit, gpus=gpus, elsewhere=False), plan.mps, Path(unit_spec.run_dir), whole, default_base()
        )
    except SharingError as error:
        raise GpuHostError(str(error)) from None
    policy = "fcfs" if here.one_at_a_time else unit_spec.policy
    unit_spec = msgspec.structs.replace(unit_spec, gpu=here.deployed, policy=policy)
    save(unit_spec, file)
    sizer = PoolSizer(plan.on(here, machine.this_machine()), unit_spec, file)
    return UnitGpus(unit_spec, sizer, [*notes, _words(here)])


def tried(
    unit: GpuUnit, wish: MpsWish, directory: Path, whole: nvml.GpuMachine, ours: Path | None = None
) -> tuple[GpuUnit, list[str]]:
    """The unit as its GPUs can be shared on this machine, by what was found here before and by trying MPS.

    Args:
        directory: below which an MPS server is started to try it.
        whole: all GPUs of this machine.
        ours: see `settle`.

    Returns:
        The unit, and what the user should know.

    Raises:
        SharingError: MPS does not work, and it is wanted; or nothing works here.
    """
    found = machine.findings(whole)
    if found is None:
        notes = ["note: these GPUs have not been probed; `muxserve doctor --gpu` does it, in a few minutes"]
        if not unit.named and wish == "auto":
            unit = replace(unit, sharing="off")
            notes[0] += "; until then engines alternate on a GPU: one computes while the others wait"
    elif found.refused:
        raise SharingError(found.cannot_serve)
    else:
        unit = unit.as_found(found)
        notes = found.followed
    no_mps = found is not None and "mps_off" in found.fallbacks
    known = "a probe has found that it does not work (`muxserve doctor --gpu` probes again)" if no_mps else ""
    sharing, more = settle(unit.gpus, wish, unit.sharing, directory, ours, known)
    if not unit.has_percentages:
        more = [note for note in more if note != PERCENTAGES_NOTE]
    return replace(unit, sharing=sharing), [*notes, *more]


def _words(unit: GpuUnit) -> str:
    return replace(unit, notes=()).describe()[0]
