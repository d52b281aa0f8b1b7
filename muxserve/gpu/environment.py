"""What a process must find in its environment before it touches a GPU, and whether it has touched one.

The CUDA driver reads its variables when it is initialised (`cuInit`), torch and NCCL theirs a little later. A process
that has initialised the driver cannot fork children that use it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, MutableMapping
from typing import Self

from muxserve.gpu.sm import PERCENTAGE, has_share, percentage, share_of
from muxserve.spec import UnitSpec

VISIBLE = "CUDA_VISIBLE_DEVICES"
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
LOG = "CUDA_MPS_LOG_DIRECTORY"
# torch has read the former since 2.9 and the latter always.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments"
# Kernels of a client wait for those of clients with a lower number. All of ours have the same.
PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
# Has vLLM sample with torch.
_SAMPLER_OFF = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
_DEEP_GEMM = "VLLM_USE_DEEP_GEMM"
_TOOLKIT = "/usr/local/cuda"
# Each communicator takes slots of the NVSwitch for these, and there are (holder + engines) x models of them on a GPU.
_WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


def client_environment(unit_spec: UnitSpec) -> dict[str, str]:
    """What every process of the unit needs to be a client of the unit's own MPS server; nothing without one.

    Green contexts need it, too: without it kernels of different processes alternate, whatever their SMs. The server
    numbers its GPUs anew, so that the user's numbers would mean others: clients name the unit's by UUID.
    """
    if unit_spec.gpu is None or unit_spec.gpu.sm_sharing == "off":
        return {}
    pipes = {PIPE: str(unit_spec.mps_dir / "pipe"), LOG: str(unit_spec.mps_dir / "log")}
    return {VISIBLE: ",".join(unit_spec.gpu.uuids), **pipes}


def keeper_environment(unit_spec: UnitSpec) -> dict[str, str]:
    """What a process needs that keeps memory for others (weights, pools).

    It stays outside MPS, so that its memory survives the failure of a kernel, which ends every client of the server:
    the driver goes on without MPS where nobody listens in the pipe directory.
    """
    if unit_spec.gpu is None or unit_spec.gpu.sm_sharing == "off":
        return {}
    if unit_spec.gpu.keepers_in_mps:
        return client_environment(unit_spec)
    return {VISIBLE: ",".join(unit_spec.gpu.uuids), PIPE: str(unit_spec.mps_dir / "none")}


def parent_environment(unit_spec: UnitSpec, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the warm parent of a unit on GPUs has before anything touches one; what it forks inherits it.

    Args:
        environ: the environment so far. What the user has set there of NCCL and vLLM counts.
    """
    environ = os.environ if environ is None else environ
    gpu = unit_spec.gpu
    if gpu is None:
        return {}
    # Engines, their workers and the holders of weights number the unit's GPUs by rank.
    chosen = {VISIBLE: ",".join(gpu.uuids), **client_environment(unit_spec), **_allocator(environ)}
    if unit_spec.ranks > unit_spec.stages and (len(unit_spec.models) > 1 or not gpu.nvls):
        chosen.update({name: value for name, value in _WITHOUT_MULTICAST.items() if name not in environ})
    chosen.update({name: value for name, value in without_compiler(environ).items() if name not in environ})
    if gpu.sm_sharing == "green_contexts":
        # FlashInfer chooses the device anew and counts all of its SMs; that stream would be one of the whole GPU.
        chosen.update(_SAMPLER_OFF | {"VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1"})
    return chosen


def without_compiler(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What keeps vLLM from kernels that are compiled with the CUDA toolkit when they are called first, where there is
    none: an engine would end at its warm-up. vLLM has others for all of them.

    Args:
        environ: says where the toolkit is, in the variables that these libraries read.
    """
    environ = os.environ if environ is None else environ
    path = environ.get("PATH")
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    compiler = os.path.join(home or _TOOLKIT, "bin", "nvcc")
    compiles = os.access(compiler, os.X_OK) or (home is None and shutil.which("nvcc", path=path) is not None)
    # FlashInfer wants ninja, too, or the package that has everything compiled.
    cached = importlib.util.find_spec("flashinfer_jit_cache") is not None
    samples = cached or (compiles and shutil.which("ninja", path=path) is not None)
    return {**({} if samples else _SAMPLER_OFF), **({} if compiles else {_DEEP_GEMM: "0"})}


def _allocator(environ: Mapping[str, str]) -> dict[str, str]:
    """torch's allocator with memory that CUDA IPC can share, whatever its default is; the user's other options stay."""
    given = next((environ[name] for name in _ALLOCATOR if environ.get(name)), "")
    kept = [option for option in given.split(",") if option.strip() and not option.strip().startswith(_EXPANDABLE)]
    return dict.fromkeys(_ALLOCATOR, ",".join([*kept, f"{_EXPANDABLE}:False"]))


def prepare(unit_spec: UnitSpec, model: str, phase: str, environ: MutableMapping[str, str] | None = None) -> None:
    """Set this process's place and share in its environment. Before anything in it touches CUDA.

    A weight holder, and one engine of both phases with a share of 1, get no limit. A percentage or priority that came
    from outside is removed: without MPS it would act under somebody else's server.

    Raises:
        KeyError: no such model.
    """
    environ = os.environ if environ is None else environ
    if unit_spec.gpu is None:
        return
    environ.pop(PERCENTAGE, None)
    environ.pop(PRIORITY, None)
    environ.update(keeper_environment(unit_spec) if phase == "weights" else client_environment(unit_spec))
    if unit_spec.gpu.sm_sharing == "mps" and has_share(unit_spec, model, phase):
        environ[PERCENTAGE] = str(percentage(share_of(unit_spec, model, phase)))


def refuse_cuda(after: str = "") -> None:
    """Go on only in a process that has not touched CUDA, and so can fork.

    Args:
        after: what is known of who has (see `ImportsThatTouchCuda`).

    Raises:
        RuntimeError: it has.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        how = "torch has initialised it"
    elif driver_is_initialised():
        how = "something has called cuInit, such as a library that asks for the GPU's capability"
    else:
        return
    where = f" {after}" if after else ""
    raise RuntimeError(
        f"this process has touched CUDA and cannot fork: {how}{where}; it was imported or asked too early"
    )


def driver_is_initialised(driver: str = "libcuda.so.1") -> bool:
    """Whether this process has called cuInit: only then the driver counts its GPUs.

    A driver that is not loaded yet stays so. Open devices say nothing: NVML opens them, too, by driver and version.
    """
    try:
        library = ctypes.CDLL(driver, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return bool(library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0)


class ImportsThatTouchCuda:
    """While it is entered, notes after which import the driver was initialised first.

    A finder that finds nothing: Python asks it at each import, and what was imported last is known then.
    """

    def __init__(self) -> None:
        self._last = ""
        self.after = ""
        """In words for `refuse_cuda`; empty while nothing has been seen."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if not self.after and driver_is_initialised():
            self.after = f"after the import of {self._last}" if self._last else f"before that of {name}"
        self._last = name

    def __enter__(self) -> Self:
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.meta_path.remove(self)
        self.find_spec("what follows")
