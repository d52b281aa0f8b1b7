"""tools/setup.py: what `make setup` looks at before it downloads, and what it shows while it installs."""

from __future__ import annotations

import fcntl
import os
import pty
import runpy
import shutil
import struct
import subprocess
import sys
import termios
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUP = ROOT / "tools/setup.py"


@pytest.fixture
def setup() -> dict[str, Any]:
    return runpy.run_path(str(SETUP))


def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SETUP), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def test_this_machine_will_do(setup: dict[str, Any]) -> None:
    assert list(setup["problems"](ROOT)) == []
    assert run("check").returncode == 0


def test_a_compiler_is_needed(tmp_path: Path) -> None:
    without = run("check", PATH=str(tmp_path))
    assert without.returncode == 1
    assert "error: there is no C++ compiler: apt-get install g++ (or set CXX)" in without.stderr
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'unrecognized option -std=c++17' >&2\nexit 1\n")
    broken.chmod(0o755)
    old = run("check", PATH=f"{tmp_path}:/bin:/usr/bin")
    assert old.returncode == 1
    assert f"error: {broken} cannot compile C++17: unrecognized option -std=c++17" in old.stderr


def test_room_is_needed_for_what_is_not_there(
    setup: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(9 * 10**9, 8 * 10**9, 10**9))
    monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "cache"))
    (said,) = setup["problems"](tmp_path)
    assert said == f"{tmp_path} has 1.0 GB of disk free, and about 5.0 GB are needed"
    (tmp_path / ".venv/lib/python3.11/site-packages/torch").mkdir(parents=True)
    assert list(setup["problems"](tmp_path)) == []


def test_little_memory_is_said(setup: dict[str, Any]) -> None:
    assert setup["usable_memory"]() > 0
    setup["notes"].__globals__["usable_memory"] = lambda: 2 * 10**9
    assert list(setup["notes"]()) == ["this machine has 2.0 GB of memory; the quickstart takes up to 4.0 GB"]


def test_how_far_pip_is(setup: dict[str, Any], tmp_path: Path) -> None:
    pip = setup["Installing"](3, tmp_path)
    for line in (
        "Collecting PuLP==3.3.2 (from -r requirements/cpu.txt (line 5))",
        "  Downloading pulp-3.3.2-py3-none-any.whl (16.4 MB)",
        "Collecting torch==2.13.0",
        "  Using cached https://example.org/whl/torch-2.13.0-cp311-cp311-linux_x86_64.whl (1.2 GB)",
    ):
        pip.take(line)
    assert str(pip) == "downloading: 2 of 3 packages, 1.2 GB (torch)"
    (tmp_path / "pulp-3.3.2.dist-info").mkdir()
    pip.take("Installing collected packages: pulp, torch")
    assert str(pip) == "unpacking: 1 of 3 packages"


PIP = """#!/bin/sh
# In place of Python with pip: keeps its arguments and the file of -r, and does as a test says.
echo "$@" >> {directory}/calls
for last; do :; done
cat "$last" >> {directory}/asked; echo >> {directory}/asked
{does}
"""
CUDA = "mkdir -p {site}/torch/lib && touch {site}/torch/lib/libtorch_cuda.so"


def torch_by(directory: Path, does: str, pins: str) -> tuple[subprocess.CompletedProcess[str], list[str], list[str]]:
    """How `torch` ended with a pip that `does` so; pip's options of each call, and the lines that it was asked for."""
    python = directory / "bin/python"
    python.parent.mkdir()
    site = directory / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    python.write_text(PIP.format(directory=directory, does=does.format(site=site)))
    python.chmod(0o755)
    (directory / "pins.txt").write_text(pins)
    ended = run("torch", directory / "pins.txt", python)
    asked = (directory / "asked").read_text().split("\n")
    return ended, (directory / "calls").read_text().splitlines(), [each for each in asked if each]


def test_torch_comes_from_where_it_is_built_for_cpus(tmp_path: Path) -> None:
    ended, calls, asked = torch_by(tmp_path, "", "pulp==3.3.2\ntorch==2.13.0\ntorch-like==1.0\n")
    assert (ended.returncode, ended.stdout) == (0, "")
    (call,) = calls
    assert "--no-deps --retries 1 --timeout 30 --extra-index-url https://download.pytorch.org/whl/cpu -r" in call
    assert asked == ["torch==2.13.0"]


def test_torch_of_a_lock_has_its_hashes(tmp_path: Path) -> None:
    line = "torch==2.13.0+cpu --hash=sha256:ab  # BSD"
    ended, (call,), asked = torch_by(tmp_path, "", f"{line}\n")
    assert ended.returncode == 0
    assert "--require-hashes" in call
    assert asked == [line]


def test_a_torch_for_cuda_gets_its_libraries(tmp_path: Path) -> None:
    ended, calls, asked = torch_by(tmp_path, CUDA, "torch==2.13.0\n")
    assert ended.returncode == 0
    assert "the torch here is PyPI's, which is built for CUDA" in ended.stdout
    assert len(calls) == 2
    assert "--extra-index-url" not in calls[1]
    libraries = (ROOT / "requirements/cuda-libraries.txt").read_text().splitlines()
    assert asked == ["torch==2.13.0", *libraries]


def test_without_torch_there_is_an_error(tmp_path: Path) -> None:
    ended, calls, _ = torch_by(tmp_path, "echo no network; exit 1", "torch==2.13.0\n")
    assert ended.returncode == 1
    assert len(calls) == 1
    assert ended.stdout == "no network\n"
    where = "https://download.pytorch.org/whl/cpu"
    assert ended.stderr == f"error: pip cannot install torch==2.13.0; its builds for CPUs are at {where}\n"


def test_how_far_a_build_is(setup: dict[str, Any]) -> None:
    build = setup["Building"]()
    assert str(build) == "building: preparing"
    build.take("  [7/21] Building CXX object CMakeFiles/core.dir/pool.cpp.o\n")
    assert str(build) == "building: step 7 of 21"


def test_what_fails_says_its_last_lines_and_fails() -> None:
    script = "print('compiling'); print('error: no room'); raise SystemExit(3)"
    ended = run("build", sys.executable, "-c", script)
    assert (ended.returncode, ended.stdout) == (3, "compiling\nerror: no room\n")
    fine = run("build", sys.executable, "-c", "print('much that nobody reads')")
    assert (fine.returncode, fine.stdout) == (0, "")


def test_on_a_terminal_one_line_changes() -> None:
    """Which is gone at the end."""
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    # It ends when its line has been seen.
    script = "print('[3/4] Linking', flush=True); input()"
    command = [sys.executable, str(SETUP), "build", sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside) as process:
        os.close(inside)
        seen = b""
        while b"building: step 3 of 4, " not in seen:
            seen += os.read(terminal, 4096)
        os.write(terminal, b"\n")
        assert process.wait() == 0
        rest = os.read(terminal, 4096)
    os.close(terminal)
    assert rest.endswith(b"\r\x1b[K")
