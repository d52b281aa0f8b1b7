"""What `make setup` does before and while it installs: looks whether this machine can build and has room, and shows how
far it is. Standard library only; it runs with the Python that the environment is made of.

    python tools/setup.py check                       before anything is downloaded
    python tools/setup.py torch PINS PYTHON           installs PyTorch's build for CPUs, as PINS (a file) has it
    python tools/setup.py install COUNT COMMAND...    runs pip, which installs COUNT packages
    python tools/setup.py build COMMAND...            runs a build
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

GB = 10**9
# What an environment takes, and what pip keeps of it in its cache (measured on x86-64, Python 3.11).
ENVIRONMENT_BYTES, CACHE_BYTES = 3 * GB, 2 * GB
# What the quickstart takes.
MEMORY_BYTES = 4 * GB
LINE_SECONDS = 10.0
# Where PyTorch has its builds for CPUs. PyPI's is for CUDA, and cannot be imported without NVIDIA's libraries.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "--no-deps")
_MEGABYTES = re.compile(r"^ *(?:Downloading|Using cached) (?:\S*/)?(\S+?)-\S+ \(([\d.]+) (kB|MB|GB)\)")
_STEP = re.compile(r"\[(\d+)/(\d+)\]")


# ---------------------------------------------------------------- before


def problems(root: Path) -> Iterator[str]:
    """Why nothing can be installed in `root`, and what to do about it."""
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        yield f"Python's headers are missing: apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev"
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        yield "there is no C++ compiler: apt-get install g++ (or set CXX)"
    elif said := _cannot_compile(compiler):
        yield f"{compiler} cannot compile C++17: {said}"
    if not any((root / ".venv").glob("lib/*/site-packages/torch")):  # what is there already needs no room
        yield from _without_room(root)


def notes() -> Iterator[str]:
    """What will be tight."""
    memory = usable_memory()
    if memory < MEMORY_BYTES:
        yield f"this machine has {_size(memory)} of memory; the quickstart takes up to {_size(MEMORY_BYTES)}"


def usable_memory() -> int:
    """Bytes of the machine, or of its container."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found.append(int(Path(limit).read_text()))
        except (OSError, ValueError):  # "max"
            continue
    return min(found)


def _cannot_compile(compiler: str) -> str:
    """What the compiler says of a program of C++17; empty if it is content."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "try.cpp"
        source.write_text("#include <optional>\nint main() { return std::optional<int>(0).value(); }\n")
        tried = subprocess.run(
            [compiler, "-std=c++17", str(source), "-o", str(source.with_suffix(""))], capture_output=True, text=True
        )
    lines = (tried.stderr or tried.stdout).strip().splitlines()
    return "" if tried.returncode == 0 else (lines or ["it says nothing"])[0]


def _without_room(root: Path) -> Iterator[str]:
    cache = Path(os.environ.get("PIP_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "pip")
    needs: dict[int, tuple[Path, int]] = {}
    for place, size in ((root, ENVIRONMENT_BYTES), (cache.expanduser(), CACHE_BYTES)):
        there = next(each for each in (place, *place.absolute().parents) if each.exists())
        disk = there.stat().st_dev
        first, before = needs.get(disk, (there, 0))
        needs[disk] = first, before + size
    for place, size in needs.values():
        if (free := shutil.disk_usage(place).free) < size:
            yield f"{place} has {_size(free)} of disk free, and about {_size(size)} are needed"


def _size(count: float) -> str:
    return f"{count / GB:.1f} GB"


# ---------------------------------------------------------------- meanwhile


class Shown:
    """One line that changes, on a terminal; elsewhere a line now and then. `words` says what goes on."""

    def __init__(self, words: Callable[[], str]) -> None:
        self._words = words
        self._ended = threading.Event()
        self._terminal = sys.stdout.isatty()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Shown:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._terminal:
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()

    def _show(self) -> None:
        began = time.monotonic()
        while not self._ended.wait(0.5 if self._terminal else LINE_SECONDS):
            line = f"  {self._words()}, {time.monotonic() - began:.0f} s"
            width = shutil.get_terminal_size().columns
            sys.stdout.write(f"\r\x1b[K{line[: width - 1]}" if self._terminal else f"{line}\n")
            sys.stdout.flush()


class Installing:
    """How far pip is, by what it says, and by what has come into the environment."""

    def __init__(self, packages: int, site: Path) -> None:
        self._packages = packages
        self._site = site
        self._downloaded = 0.0
        self._seen = 0
        self._last = ""
        self._unpacking = False

    def take(self, line: str) -> None:
        """A line of pip's."""
        if line.startswith("Installing collected packages"):
            self._unpacking = True
        elif line.startswith("Collecting "):
            self._seen += 1
        elif match := _MEGABYTES.match(line):
            self._last, size, unit = match.groups()
            self._downloaded += float(size) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]

    def __str__(self) -> str:
        if self._unpacking:
            there = sum(1 for _ in self._site.glob("*.dist-info"))
            return f"unpacking: {min(there, self._packages)} of {self._packages} packages"
        what = f" ({self._last})" if self._last else ""
        return f"downloading: {self._seen} of {self._packages} packages, {_size(self._downloaded)}{what}"


class Building:
    """How far a build is, by the steps that ninja counts."""

    def __init__(self) -> None:
        self._step = "preparing"

    def take(self, line: str) -> None:
        """A line of the build's."""
        if match := _STEP.search(line):
            self._step = f"step {match[1]} of {match[2]}"

    def __str__(self) -> str:
        return f"building: {self._step}"


def run(command: Sequence[str], progress: Installing | Building) -> int:
    """Run `command` and show `progress`; the end of what it says if it fails. Returns its exit code."""
    said: deque[str] = deque(maxlen=40)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            with Shown(lambda: str(progress)):
                for line in process.stdout:
                    said.append(line)
                    progress.take(line)
        except KeyboardInterrupt:
            process.wait()
            return 130
    if process.returncode:
        sys.stdout.writelines(said)
    return process.returncode


# ---------------------------------------------------------------- PyTorch


def install_torch(root: Path, pins: Path, python: str) -> int:
    """Install the torch of `pins` from PyTorch's index; from PyPI with NVIDIA's libraries where that is out of reach.

    Only torch is looked up there: pip asks every index it knows for every package. Returns an exit code.
    """
    lines = [line for line in pins.read_text().splitlines() if line.startswith("torch=")]
    options = ["--retries", "1", "--timeout", "30", "--extra-index-url", TORCH_INDEX]
    if any("--hash" in line for line in lines):
        options.append("--require-hashes")
    if _pip(python, lines, options):
        print(
            f"error: pip cannot install {lines[0].split()[0]}; its builds for CPUs are at {TORCH_INDEX}",
            file=sys.stderr,
        )
        return 1
    if not (_site(python) / "torch/lib/libtorch_cuda.so").exists():
        return 0
    print(f"note: the torch here is PyPI's, which is built for CUDA: it was there before, or {TORCH_INDEX}")
    print("is out of reach. It computes on a CPU too, beside NVIDIA's libraries: installing these (3 GB more on disk)")
    return _pip(python, (root / "requirements/cuda-libraries.txt").read_text().splitlines(), [])


def _pip(python: str, lines: Sequence[str], options: Sequence[str]) -> int:
    """Install what the lines of a requirements file say."""
    packages = sum(not line.startswith("#") for line in lines)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(lines))
        file.flush()
        return run([python, *PIP, *options, "-r", file.name], Installing(packages, _site(python)))


def _site(python: str) -> Path:
    """Where packages of this environment are, of the Python that runs this."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return Path(python).parent.parent / "lib" / version / "site-packages"


def main(words: Sequence[str]) -> int:
    """Do what the words say; returns the exit code."""
    root = Path(__file__).resolve().parents[1]
    match list(words):
        case ["check"]:
            for note in notes():
                print(f"note: {note}")
            found = list(problems(root))
            for problem in found:
                print(f"error: {problem}", file=sys.stderr)
            return 1 if found else 0
        case ["torch", pins, python]:
            return install_torch(root, Path(pins), python)
        case ["install", packages, *command]:
            return run(command, Installing(int(packages), _site(command[0])))
        case ["build", *command]:
            return run(command, Building())
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
