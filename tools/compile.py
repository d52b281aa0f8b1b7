"""A copy of this checkout in which scheduling and the simulator are compiled by mypyc, to see what that brings.

    python tools/compile.py build/compiled
    python benchmarks/simulator_ab.py . build/compiled
    python tools/compile.py build/compiled --run benchmarks/paper/ecoserve.py --only goodput

With `--run` nothing is compiled: a script of this checkout runs with the modules that are compiled already.

Nothing but speed may differ: `simulator_ab.py` compares what came of every request. A wheel has the compiled modules in
it (CMakeLists.txt runs this with `--package`), an editable install has none, since they would hide the sources that are
edited.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("muxserve/scheduling", "muxserve/simulator")
# Classes that are compiled can be subclassed in compiled modules only.
SUBCLASSES = (Path("benchmarks/paper/stock.py"), Path("benchmarks/paper/split.py"))
# What refers to numpy or is no part of a step stays as it is.
LEFT = {"__init__", "alone", "micro_batches", "modes", "result", "timeline"}
SETUP = """
import sys
from mypyc.build import mypycify
from setuptools import setup
modules = mypycify(["--config-file=pyproject.toml", *sys.argv[1:]], opt_level="3", group_name="muxserve_compiled")
setup(name="compiled", packages=[], ext_modules=modules, script_args=["-q", "build_ext", "--inplace"])
"""
# The installed package is this checkout's, whatever the directory; and `benchmarks/placement.py` is not `placement`.
RUN = """
import os, runpy, sys
target, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path[:0] = [target, os.path.join(target, "benchmarks", "paper")]
import placement.cluster, split
sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
runpy.run_path(script, run_name="__main__")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path, help="directory to make; what is there is removed")
    parser.add_argument("--package", action="store_true", help="only what a wheel has: no benchmarks, no tests")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="a script and its arguments")
    given = parser.parse_args()
    target = given.target.resolve()
    if given.run:
        sys.exit(subprocess.run([sys.executable, "-c", RUN, str(target), *given.run]).returncode)
    shutil.rmtree(target, ignore_errors=True)
    for name in ("muxserve", "placement") if given.package else ("muxserve", "placement", "benchmarks", "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "results", "*.so"))
    # Without what setuptools would read of it.
    config = (ROOT / "pyproject.toml").read_text()
    (target / "pyproject.toml").write_text(config[config.index("[tool.mypy]") : config.index("[tool.pytest")])
    modules = [
        str(path.relative_to(target))
        for package in PACKAGES
        for path in sorted((target / package).glob("*.py"))
        if path.stem not in LEFT
    ]
    if not given.package:
        modules += map(str, SUBCLASSES)
    done = subprocess.run([sys.executable, "-c", SETUP, *modules], cwd=target, env={**os.environ, "CFLAGS": "-w"})
    if done.returncode:
        sys.exit(done.returncode)
    # They are imported from beside the scripts, not from where their names as modules say.
    for source in SUBCLASSES:
        for library in target.glob(f"{source.stem}.*.so"):
            library.rename(target / source.parent / library.name)
    if not given.package:  # what builds a wheel need not have the packages that they import
        sys.exit(subprocess.run([sys.executable, "-c", RUN, str(target), str(SUBCLASSES[-1])], cwd=target).returncode)


if __name__ == "__main__":
    main()
