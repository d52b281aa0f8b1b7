"""What the steps of the trial need, and what to do where it is missing. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Collection
from pathlib import Path

from muxserve.cluster.machine import this_machines_gpus, vllm_without_cuda
from muxserve.gpu import mps
from tests.gpu import stock
from tests.gpu.run import NATIVE


def _gpu() -> str:
    found = this_machines_gpus()
    usable = [gpu for gpu in found.gpus if not (gpu.fault or gpu.modes.mig)]
    return "" if usable else found.why_none or "no GPU is whole and sound (`muxserve doctor` says more)"


def _mps() -> str:
    return "" if mps.binary() else f"{mps.CONTROL} is not installed; it comes with the driver"


def _vllm() -> str:
    if not _found("vllm"):
        return "vLLM is not installed; carry its wheels and put where they are unpacked on PYTHONPATH"
    return vllm_without_cuda()


def _native() -> str:
    if _found(NATIVE):
        return ""
    return "the memory manager is not built; `make gpu-native NATIVE_PYTHON=...` builds it elsewhere for this Python"


def _compiler() -> str:
    if not any(map(shutil.which, ("gcc", "cc", "clang"))):
        return "there is no C compiler, with which Triton compiles its launchers"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.exists() else f"{header} is missing (python3-dev), which Triton's launchers include"


def _fleet() -> str:
    lacking = [name for name in ("openai", "httpx", "psutil", "yaml", "zmq", "uvicorn") if not _found(name)]
    return f"not installed, and fleets need them: {', '.join(lacking)}" if lacking else ""


def _pytest() -> str:
    return "" if _found("pytest") else "pytest is not installed"


def _models() -> str:
    lacking = [model for model in stock.MODELS if not list(stock.checkpoint(model).glob("*.safetensors"))]
    return f"no weights in configs/models of {', '.join(lacking)}" if lacking else ""


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


NEEDS: dict[str, Callable[[], str]] = {
    "gpu": _gpu,
    "mps": _mps,
    "vllm": _vllm,
    "native": _native,
    "compiler": _compiler,
    "fleet": _fleet,
    "pytest": _pytest,
    "models": _models,
}


def missing(names: Collection[str]) -> dict[str, str]:
    """The needs that are not met, and why."""
    found = {}
    for name, need in NEEDS.items():
        if name not in names:
            continue
        try:
            why = need()
        except (OSError, subprocess.SubprocessError) as error:
            why = f"{name} could not be looked for: {error}"
        if why:
            found[name] = why
    return found
