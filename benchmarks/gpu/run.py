"""Every benchmark that needs a GPU, one after another: `python benchmarks/gpu/run.py [--seconds 540]`.

Ends with a short table; each writes its JSON to $OUT or benchmarks/results/gpu. Without a GPU it says so and ends well.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# By importance; each with the least time that makes sense of it, seconds.
BENCHMARKS = (("attention", [], 30), ("sharing", [], 60), ("wakes", [], 120), ("serving", ["--quick"], 120))


def main() -> int:
    """Exit code 0 if all that ran went well, or there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time for all of them together")
    parser.add_argument("--only", nargs="+", choices=[name for name, _, _ in BENCHMARKS])
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from muxserve.gpu import nvml

    found = nvml.visible(nvml.machine(), os.environ)
    if not found.gpus:
        print(f"no GPU benchmarks were run: {found.why_none or 'no GPU is visible'}")
        return 0
    end = time.monotonic() + options.seconds
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    said = []
    failed = False
    for name, arguments, least in BENCHMARKS:
        left = end - time.monotonic()
        if options.only and name not in options.only:
            continue
        if left < least:
            said.append(f"{name:10s} left out: {left:.0f} s are left")
            continue
        began = time.monotonic()
        command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path},
                timeout=left if left < float("inf") else None,
            ).returncode
            words = "done" if code == 0 else f"failed with code {code}"
        except subprocess.TimeoutExpired:
            code, words = 1, "out of time"
        failed = failed or code != 0
        said.append(f"{name:10s} {words} in {time.monotonic() - began:.0f} s")
    print("\n" + "\n".join(said))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
