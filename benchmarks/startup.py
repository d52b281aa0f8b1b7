"""Start-up of the quickstart fleet, from `muxserve deploy` to ready, and the memory of all its processes.

    python benchmarks/startup.py [--runs N] [--out FILE]

PSS counts a page shared by n processes as 1/n page in each, so the sum is what the fleet takes from the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
FLEET = ROOT / "configs/quickstart.yaml"
TARGET_SECONDS = 45.0
TARGET_PSS_GIB = 4.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def pss_by_part(session: int) -> dict[str, float]:
    """MiB by process title, of every process of the session."""
    parts: dict[str, float] = {}
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) != session:
                continue
            line = process.cmdline()
            if not line:
                continue
            name = line[0] if line[0].startswith("muxserve ") else " ".join(line[1:4])
            if "memory-manager" in line[0]:
                name = "memory manager"
            parts[name] = parts.get(name, 0.0) + process.memory_full_info().pss / 2**20
        except (psutil.Error, ProcessLookupError):
            continue
    return parts


def run() -> tuple[float, dict[str, float]]:
    port = free_port()
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        deploy = subprocess.Popen(
            [sys.executable, "-m", "muxserve.cli.app", "deploy", str(FLEET), "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while not healthy(port):
                if deploy.poll() is not None or time.monotonic() - began > 180:
                    log.seek(0)
                    raise SystemExit(f"the fleet did not start:\n{log.read().decode()[-3000:]}")
                time.sleep(0.05)
            seconds = time.monotonic() - began
            return seconds, pss_by_part(deploy.pid)
        finally:
            deploy.send_signal(signal.SIGINT)
            deploy.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/startup.json")
    args = parser.parse_args()
    seconds, parts = [], {}
    for index in range(args.runs):
        took, parts = run()
        seconds.append(round(took, 2))
        print(f"run {index + 1}: ready after {took:.1f} s, PSS {sum(parts.values()) / 1024:.2f} GiB", flush=True)
    total = sum(parts.values()) / 1024
    for name, mib in sorted(parts.items(), key=lambda item: -item[1]):
        print(f"  {mib:7.0f} MiB  {name}")
    args.out.write_text(
        json.dumps(
            {
                "command": "python benchmarks/startup.py",
                "machine": f"{os.cpu_count()} cores, {platform.machine()}, no GPU",
                "seconds_to_ready": seconds,
                "median_seconds": statistics.median(seconds),
                "target_seconds": TARGET_SECONDS,
                "pss_gib": round(total, 2),
                "target_pss_gib": TARGET_PSS_GIB,
                "pss_mib_by_part": {name: round(mib) for name, mib in sorted(parts.items())},
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
