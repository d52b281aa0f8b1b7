"""Environments in which vLLM's CUDA build runs without a GPU: `python -m tests.cuda_stub.stand_ins COMMAND ...` runs a
command in one, with two GPUs that allocate, copy and share memory and launch nothing, and MPS.

    make cuda-stub
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
WHEELS = ROOT / os.environ.get("CUDA_STUB_WHEELS", "build/cuda-stub")
# Parts of the CUDA toolkit, as two of the wheels bring them.
HEADERS = (WHEELS / "nvidia/cu13/include", WHEELS / "triton/backends/nvidia/include")
DRIVER = ROOT / "memory_manager/tests/fake_cuda/fake_cuda.cpp"

Environment = dict[str, str]


def compile_library(library: Path, *arguments: str | Path) -> None:
    _compile("-shared", "-o", library, *arguments, "-ldl")


def compile_object(made: Path, *arguments: str | Path) -> None:
    _compile("-c", "-o", made, *arguments)


def _compile(*arguments: str | Path) -> None:
    compiler = shutil.which("c++")
    assert compiler is not None
    subprocess.run([compiler, "-fPIC", "-w", *arguments], check=True)


def without_gpus(directory: Path) -> Environment:
    """In which CUDA says when it is initialised, and has no GPU."""
    compile_library(directory / "libcuda.so.1", "-x", "c", HERE / "libcuda.c")
    return _environment(directory)


def make_driver(directory: Path) -> None:
    """A driver whose GPU has memory that is allocated, copied and shared, and launches nothing."""
    # What several define is the first one's.
    objects = []
    sources = (("c", HERE / "launching.c"), ("c++", HERE / "streams.cpp"), ("c++", DRIVER), ("c", HERE / "libcuda.c"))
    for language, source in sources:
        objects.append(directory / f"{source.stem}.o")
        renamed = [f"-DcuCtx{name}=fakeCtx{name}" for name in ("GetCurrent", "SetCurrent") if source == DRIVER]
        compile_object(objects[-1], *renamed, "-x", language, source)
    compile_library(directory / "libcuda.so.1", *objects, "-Wl,--allow-multiple-definition")


def with_a_gpu(directory: Path) -> Environment:
    """In which GPUs are those of `make_driver`."""
    make_driver(directory)
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


def with_mps(base: Environment, directory: Path) -> Environment:
    """As `base` with a stand-in of MPS, whose notes are below `mps` (`tests/gpu_control/fake_mps_control.py`), and with
    a place of its own for what `doctor --gpu` finds."""
    control = directory / "mps" / "nvidia-cuda-mps-control"
    control.parent.mkdir()
    script = shlex.quote(str(ROOT / "tests/gpu_control/fake_mps_control.py"))
    control.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    control.chmod(0o755)
    environment = {
        **base,
        "CUDA_STUB_TRACE": str(directory / "trace"),
        "XDG_CACHE_HOME": str(directory / "cache"),
        "PATH": f"{control.parent}:{base['PATH']}",
        "FAKE_MPS": str(control.parent),
        "FAKE_CUDA_MEMORY": str(32 << 30),
        # As in our image (deploy/docker/Dockerfile.gpu) there is no CUDA toolkit.
        "CUDA_HOME": str(directory),
    }
    del environment["CUDA_VISIBLE_DEVICES"]
    return environment


def _environment(directory: Path) -> Environment:
    compile_library(directory / "libnvidia-ml.so.1", "-x", "c", HERE / "libnvml.c")
    shutil.copy(HERE / "sitecustomize.py", directory)
    # The wheels are installed without bytecode: every process that is started would otherwise compile them anew.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **inherited,
        "LD_LIBRARY_PATH": str(directory),
        "PYTHONPATH": f"{directory}:{WHEELS}:{ROOT}",
        # Else vLLM leaves FlashInfer alone, which initialises CUDA when it is imported.
        "VLLM_HAS_FLASHINFER_CUBIN": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="mux-stub-") as name:
        directory = Path(name)
        environment = with_mps(with_a_gpu(directory), directory)
        return subprocess.run(sys.argv[1:], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
