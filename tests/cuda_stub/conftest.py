from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.fleet import Fleet, running
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
WHEELS = ROOT / "build/cuda-stub"
# Of the CUDA toolkit, as two of the wheels bring them.
HEADERS = (WHEELS / "nvidia/cu13/include", WHEELS / "triton/backends/nvidia/include")
DRIVER = ROOT / "memory_manager/tests/fake_cuda/fake_cuda.cpp"

Environment = dict[str, str]
Start = Callable[..., AbstractContextManager[Fleet]]


def compile_library(library: Path, *arguments: str | Path) -> None:
    _compile("-shared", "-o", library, *arguments, "-ldl")


def compile_object(made: Path, *arguments: str | Path) -> None:
    _compile("-c", "-o", made, *arguments)


def _compile(*arguments: str | Path) -> None:
    compiler = shutil.which("c++")
    assert compiler is not None
    subprocess.run([compiler, "-fPIC", "-w", *arguments], check=True)


@pytest.fixture(scope="session")
def without_gpus(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """In which CUDA says when it is initialised, and has no GPU."""
    directory = tmp_path_factory.mktemp("without-gpus")
    compile_library(directory / "libcuda.so.1", "-x", "c", HERE / "libcuda.c")
    return _environment(directory)


@pytest.fixture(scope="session")
def with_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """In which a GPU has memory that is allocated, copied and shared, and launches nothing."""
    directory = tmp_path_factory.mktemp("with-a-gpu")
    # What several define is the first one's.
    objects = []
    sources = (("c", HERE / "launching.c"), ("c++", HERE / "streams.cpp"), ("c++", DRIVER), ("c", HERE / "libcuda.c"))
    for language, source in sources:
        objects.append(directory / f"{source.stem}.o")
        renamed = [f"-DcuCtx{name}=fakeCtx{name}" for name in ("GetCurrent", "SetCurrent") if source == DRIVER]
        compile_object(objects[-1], *renamed, "-x", language, source)
    compile_library(directory / "libcuda.so.1", *objects, "-Wl,--allow-multiple-definition")
    versions = directory / "versions"
    versions.write_text("libcudart.so.13 { global: *; };")
    runtime = directory / "libcudart.so.13"
    includes = [word for header in HEADERS for word in ("-I", str(header))]
    options = ["-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={versions}"]
    compile_library(runtime, *includes, *options, "-x", "c", HERE / "libcudart.c")
    nccl, blas = directory / "libnccl.so.2", directory / "libblas.so"
    compile_library(nccl, "-Wl,-soname,libnccl.so.2", "-x", "c", HERE / "libnccl.c")
    compile_library(blas, "-x", "c", HERE / "libcublas.c")
    more = {"LD_PRELOAD": f"{runtime}:{nccl}:{blas}", "FAKE_CUDA_DEVICES": "2", "FAKE_CUDA_MEMORY": str(8 << 30)}
    return {**_environment(directory), **more, "VLLM_NCCL_SO_PATH": str(nccl), "CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.fixture
def with_mps(tmp_path: Path, with_a_gpu: Environment) -> Environment:
    """The same with a stand-in of MPS, whose notes are below `mps` (`tests/gpu_control/fake_mps_control.py`), and with
    a place of its own for what `doctor --gpu` finds."""
    control = tmp_path / "mps" / "nvidia-cuda-mps-control"
    control.parent.mkdir()
    script = shlex.quote(str(ROOT / "tests/gpu_control/fake_mps_control.py"))
    control.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    control.chmod(0o755)
    environment = {
        **with_a_gpu,
        "CUDA_STUB_TRACE": str(tmp_path / "trace"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PATH": f"{control.parent}:{with_a_gpu['PATH']}",
        "FAKE_MPS": str(control.parent),
        "FAKE_CUDA_MEMORY": str(32 << 30),
        # As in our image (deploy/docker/Dockerfile.gpu) there is no CUDA toolkit.
        "CUDA_HOME": str(tmp_path),
    }
    del environment["CUDA_VISIBLE_DEVICES"]
    return environment


@pytest.fixture
def deploy(tmp_path: Path, with_mps: Environment) -> Start:
    """Deploys a fleet on the stand-ins."""

    @contextmanager
    def start(
        *models: dict[str, Any],
        policy: str = "slack",
        lies: Mapping[str, str] | None = None,
        memory: Mapping[str, Any] | None = None,
        **cluster: Any,
    ) -> Iterator[Fleet]:
        path = tmp_path / "fleet.yaml"
        fleet_file = {"policy": policy, "cluster": {"gpu_memory": 0.05, **cluster}, "models": list(models)}
        if memory is not None:
            fleet_file["memory"] = dict(memory)
        path.write_text(yaml.safe_dump(fleet_file))
        # The sockets of MPS want a short path.
        with (
            tempfile.TemporaryDirectory(prefix="m") as short,
            running(path, 10 * PATIENCE, {**with_mps, **(lies or {}), "XDG_RUNTIME_DIR": short}) as fleet,
        ):
            yield fleet

    return start


def _environment(directory: Path) -> Environment:
    compile_library(directory / "libnvidia-ml.so.1", "-x", "c", HERE / "libnvml.c")
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(directory),
        "PYTHONPATH": f"{WHEELS}:{ROOT}",
        # Else vLLM leaves FlashInfer alone, which initialises CUDA when it is imported.
        "VLLM_HAS_FLASHINFER_CUBIN": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
