"""Runs the tests that need a GPU: `python -m tests.gpu.run [--out FILE] [pytest arguments]`; ends with a short table.

Without a GPU it says so and ends well.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENABLED = "MUXSERVE_GPU_TESTS"
NATIVE = "muxserve.memory._native"
# Whether the driver is a stand-in (`tests/cuda_stub`), over which kernels compute nothing: tokens mean nothing there.
STAND_INS = "FAKE_CUDA_DEVICES" in os.environ


def no_gpu() -> str:
    """Why nothing can be run here; empty if it can."""
    from muxserve.gpu import nvml

    found = nvml.visible(nvml.machine(), os.environ)
    return "" if found.gpus else found.why_none or "no GPU is visible"


def about() -> dict[str, Any]:
    """What the tests ran on."""
    from muxserve.gpu import nvml

    found = nvml.machine()
    versions = {}
    for name in ("torch", "vllm", "triton"):
        if importlib.util.find_spec(name) is not None:
            versions[name] = str(getattr(__import__(name), "__version__", "unknown"))
    return {
        "command": "make gpu-test",
        "date": time.strftime("%Y-%m-%d"),
        "gpus": [gpu.name for gpu in found.gpus],
        "driver": found.driver_version,
        "cuda": found.cuda_version,
        "python": platform.python_version(),
        **versions,
    }


def way_of_sharing(pid: int) -> str:
    """How the engines of the fleet whose controller has this pid share its GPUs: `mps`, `green_contexts` or `off`, in
    which case they alternate. `deploy` may have taken another way than the fleet file names."""
    import psutil

    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if "--unit-spec" in line:
                spec = json.loads((Path(line[line.index("--unit-spec") + 1]).parent / "unit.json").read_text())
                return str(spec["gpu"]["sm_sharing"])
    raise LookupError(f"process {pid} has no unit below it")


def build() -> None:
    """Build the native module beside the sources if this Python has none."""
    try:
        if importlib.util.find_spec(NATIVE) is not None:
            return
    except ModuleNotFoundError:
        pass
    print("building the memory manager (about a minute)", flush=True)
    target = ROOT / "build/gpu-site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--upgrade", "--target", str(target), str(ROOT)], check=True)
    for source in [*(target / "muxserve/memory").glob("_native*.so"), target / "muxserve/memory/bin"]:
        link = ROOT / "muxserve/memory" / source.name
        if not link.exists():
            link.symlink_to(source)


def results(report: Path) -> list[dict[str, Any]]:
    """What pytest wrote: name, outcome, seconds and the reason of a failure or skip."""
    found = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        outcome, why = "passed", ""
        for kind in ("failure", "error", "skipped"):
            element = case.find(kind)
            if element is not None:
                outcome, why = kind, (element.get("message") or "").splitlines()[0][:200]
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        found.append({"test": name, "outcome": outcome, "seconds": float(case.get("time", 0)), "why": why})
    return found


def main() -> int:
    """Exit code 0 if all went well or there is no GPU, 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(os.environ.get("OUT", ROOT / "benchmarks/results/gpu")) / "gpu_test.json"
    parser.add_argument("--out", type=Path, default=default)
    options, others = parser.parse_known_args()
    why = no_gpu()
    if why:
        print(f"no GPU tests were run: {why}")
        return 0
    build()
    print("what these GPUs can do:", flush=True)
    subprocess.run([sys.executable, "-m", "muxserve.cli.app", "doctor", "--gpu"], cwd=ROOT)
    report = ROOT / "build/gpu_test.xml"
    report.parent.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-rA", f"--junitxml={report}", "-p", "no:cacheprovider"]
    environment = {**os.environ, ENABLED: "1", "PYTHONPATH": path}
    code = subprocess.run([*command, "-o", "timeout=900", *others], cwd=ROOT, env=environment).returncode
    cases = results(report) if report.exists() else []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**about(), "tests": cases}, indent=1) + "\n")
    print()
    for case in cases:
        print(f"{case['outcome']:8s} {case['seconds']:7.1f} s  {case['test']}  {case['why']}")
    print(f"{sum(c['outcome'] == 'passed' for c in cases)} of {len(cases)} passed; written to {options.out}")
    return 0 if code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
