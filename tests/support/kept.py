"""Results that are kept from one run of the tests to the next, in build/kept: what stock vLLM answers.

It answers the same as long as nothing has changed that it was asked with. Beside a result stands what that was: the
program and its arguments, the packages that are installed, the processor, vLLM's settings in the environment, the
models in the repository, and every module of this repository that a process of the program had loaded. Where one of
them is another now, the program runs again. `make clean` forgets all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "kept"
_OURS = ("muxserve", "placement", "tests")
# Lines of /proc/cpuinfo: what x86-64 and what arm64 say of the kind of processor.
_PROCESSOR = ("vendor_id", "model", "stepping", "flags", "CPU ", "Features")
# As this process was started with them: importing vLLM changes some. How much the tests try says nothing of an answer.
_SETTINGS = sorted(
    (name, value)
    for name, value in os.environ.items()
    if name.startswith(("VLLM_", "TORCH", "OMP_", "MUXSERVE_", "HF_")) and name != "MUXSERVE_TESTS"
)
# No session lasts as long.
_DAY = 24 * 3600.0
_LOADED = "loaded"


def note(directory: Path) -> None:
    """Called by each process of a program that has written its result into `directory`: say what it was made by."""
    files = {
        str(module.__file__)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _OURS and getattr(module, "__file__", None)
    }
    (directory / _LOADED).mkdir(exist_ok=True)
    (directory / _LOADED / str(os.getpid())).write_text("\n".join(sorted(files)))


class Kept:
    """The result of one program with these arguments, a directory.

    Args:
        name: of the result.
        command: the program's module and its arguments.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        asked = hashlib.sha256(json.dumps([name, *command]).encode()).hexdigest()[:16]
        self._name = f"{name}-{asked}"
        self._pointer = KEPT / f"{self._name}.json"
        self._stay: set[Path] = set()

    def found(self) -> Path | None:
        """Where it is, if it was made of what is there now."""
        try:
            told = json.loads(self._pointer.read_text())
            directory = Path(told["directory"])
            same = told["around"] == _around() and told["files"] == _hashes(told["files"])
        except (OSError, ValueError, KeyError):
            return None
        return directory if same and directory.is_dir() else None

    def new(self) -> Path:
        """A directory for it, whose name stays."""
        KEPT.mkdir(parents=True, exist_ok=True)
        for old in set(KEPT.glob(f"{self._name}-*/")) - {self._directory()}:
            with contextlib.suppress(OSError):
                if old.stat().st_mtime < time.time() - _DAY:
                    shutil.rmtree(old)
        return Path(tempfile.mkdtemp(prefix=f"{self._name}-", dir=KEPT))

    def keep(self, directory: Path) -> None:
        """The program has ended well, and has written into that directory. Another session may have kept the same in
        the meantime, or may be reading what this replaces: both stay (`new` removes them when they are old)."""
        files = {line for each in directory.glob(f"**/{_LOADED}/*") for line in each.read_text().splitlines()}
        told = {"directory": str(directory), "around": _around(), "files": _hashes(files)}
        with open(KEPT / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.found() is not None:
                return
            scratch = directory / "made-of.json"
            scratch.write_text(json.dumps(told))
            scratch.replace(self._pointer)
            self._stay.add(directory)

    def forget(self, directory: Path) -> None:
        """Remove what was not kept."""
        if directory not in self._stay:
            shutil.rmtree(directory, ignore_errors=True)

    def _directory(self) -> Path | None:
        try:
            return Path(json.loads(self._pointer.read_text())["directory"])
        except (OSError, ValueError, KeyError):
            return None


def _around() -> str:
    """A digest of what answers depend on beside our own modules."""
    with open("/proc/cpuinfo") as file:
        processor = file.read().partition("\n\n")[0].splitlines()
    models = (path for path in (ROOT / "configs/models").rglob("*") if path.is_file())
    there = [
        sorted(path.name for path in Path(sysconfig.get_path("purelib")).glob("*.dist-info")),
        [line for line in processor if line.startswith(_PROCESSOR)],
        os.cpu_count(),
        _SETTINGS,
        _hashes(map(str, models)),
    ]
    return hashlib.sha256(json.dumps(there).encode()).hexdigest()


def _hashes(files: Iterable[str]) -> dict[str, str]:
    return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in sorted(files)}
