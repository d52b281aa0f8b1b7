"""Our own MPS server, over a stand-in for NVIDIA's control program that notes what it is told."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from muxserve.gpu import mps
from muxserve.gpu.mps import MpsError, MpsServer
from muxserve.spec import GpuSpec, save
from tests.cluster.conftest import ROOT, alive, fake_unit_spec
from tests.support.patience import PATIENCE

GPUS = ["GPU-a", "GPU-b"]


class Fake:
    """The directory with the stand-in, and what that has noted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.control = directory / mps.CONTROL
        script = Path(__file__).with_name("fake_mps_control.py")
        self.control.write_text(f'#!/bin/sh\nexec {sys.executable} {shlex.quote(str(script))} "$@"\n')
        self.control.chmod(0o755)

    def tell(self, name: str) -> None:
        (self.directory / name).touch()

    def journal(self) -> list[str]:
        file = self.directory / "journal"
        return file.read_text().splitlines() if file.exists() else []

    def pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.journal() if line.startswith(("pid", "server"))]

    def server(self, directory: Path) -> MpsServer:
        return MpsServer(directory, GPUS, str(self.control))


@pytest.fixture
def fake(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Fake:
    directory = tmp_path_factory.mktemp("m")
    monkeypatch.setenv("FAKE_MPS", str(directory))
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    return Fake(directory)


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("p")


def test_it_starts_serves_its_gpus_and_quits(fake: Fake, place: Path) -> None:
    server = fake.server(place)
    server.start()
    assert alive(server.server_pid)
    assert (place / "pipe").stat().st_mode & 0o777 == 0o700
    server.stop()
    journal = fake.journal()
    assert journal[0] == "daemon GPU-a,GPU-b None"  # a percentage from outside would limit all clients
    assert journal[2] == f"start_server -uid {os.getuid()}"
    assert journal[-1] == "quit -t 5"
    assert not any(alive(pid) for pid in fake.pids())
    server.stop()  # again, for nothing


def test_one_that_does_not_quit_is_killed_with_its_server(
    fake: Fake, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "_QUIT_SECONDS", 0.2)
    fake.tell("deaf")
    server = fake.server(place)
    server.start()
    server.stop()
    assert len(fake.pids()) == 2
    assert not any(alive(pid) for pid in fake.pids())


def test_a_daemon_that_ends_at_once_says_why(fake: Fake, place: Path) -> None:
    fake.tell("broken")
    server = fake.server(place)
    with pytest.raises(MpsError, match="ended with status 3: Failed to start: no GPU is fit for MPS"):
        server.start()
    server.stop()


def test_a_server_that_does_not_come(fake: Fake, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mps, "_SERVER_SECONDS", 0.2)
    fake.tell("refuse-start")
    server = fake.server(place)
    with pytest.raises(MpsError, match="starts no server within 0 s"):
        server.start()
    server.stop()
    assert not any(alive(pid) for pid in fake.pids())


@pytest.mark.parametrize(("victim", "what"), [(0, "control daemon"), (1, "server")])
def test_the_end_of_either_is_noticed(fake: Fake, place: Path, victim: int, what: str) -> None:
    server = fake.server(place)
    server.start()
    os.kill(fake.pids()[victim], signal.SIGKILL)
    read, write = os.pipe()
    try:
        assert server.wait(read) == f"the MPS {what} has ended"
    finally:
        server.stop()
        os.close(read)
        os.close(write)
    assert not any(alive(pid) for pid in fake.pids())


def test_a_server_in_fault_is_as_good_as_dead(fake: Fake, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed kernel leaves it running, but it refuses all clients."""
    monkeypatch.setattr(mps, "_STATUS_SECONDS", 0.05)
    server = fake.server(place)
    server.start()
    read, write = os.pipe()
    # Who does not ask the server would wait without end.
    end = threading.Timer(PATIENCE, os.write, [write, b"x"])
    end.start()
    try:
        threading.Timer(0.2, fake.tell, ["fault"]).start()
        assert "FAULT" in server.wait(read)
    finally:
        end.cancel()
        end.join()
        server.stop(at_once=True)
        os.close(read)
        os.close(write)
    assert not any(line.startswith("quit") for line in fake.journal())  # no time for clients that cannot compute
    assert not any(alive(pid) for pid in fake.pids())


class TestTerminate:
    def test_the_server_is_told_of_clients_that_are_killed(self, fake: Fake, place: Path) -> None:
        server = fake.server(place)
        server.start()
        (fake.directory / "clients").write_text("77\n78\n79\n")
        mps.terminate(place, {78, 79, 1234})
        told = {line for line in fake.journal() if line.startswith("terminate_client")}
        assert told == {f"terminate_client {server.server_pid} {pid}" for pid in (78, 79)}
        server.stop()

    def test_without_a_server_there_is_nobody_to_tell(self, fake: Fake, place: Path) -> None:
        mps.terminate(place, {78})
        assert fake.journal() == []


def test_it_starts_again_where_one_was_killed(fake: Fake, place: Path) -> None:
    first = fake.server(place)
    first.start()
    os.kill(fake.pids()[0], signal.SIGKILL)
    first.stop()
    again = fake.server(place)
    again.start()
    assert alive(again.server_pid)
    again.stop()
    assert not any(alive(pid) for pid in fake.pids())


def test_paths_must_be_short(fake: Fake) -> None:
    with pytest.raises(MpsError, match="too long a path"):
        fake.server(Path("/tmp/" + "x" * 90))


class TestProbe:
    def test_that_it_works(self, fake: Fake, place: Path) -> None:
        assert mps.probe(GPUS, place) == ""
        assert not any(alive(pid) for pid in fake.pids())
        assert list(place.iterdir()) == []

    def test_why_it_does_not(self, fake: Fake, place: Path) -> None:
        fake.tell("broken")
        assert "no GPU is fit for MPS" in mps.probe(GPUS, place)

    def test_not_installed(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mps, "binary", lambda: None)
        assert "nvidia-cuda-mps-control is not installed" in mps.probe(GPUS, place)


def test_somebody_elses_server_is_seen(place: Path) -> None:
    environ, processes = {"CUDA_MPS_PIPE_DIRECTORY": str(place)}, place / "proc"
    for pid, name in (("1", "init"), ("22", "nvidia-cuda-mps"), ("self", "x")):
        (processes / pid).mkdir(parents=True)
        (processes / pid / "comm").write_text(f"{name}\n")
    assert mps.foreign(environ, processes) == "another MPS server runs here (pid 22)"
    (processes / "22" / "comm").unlink()  # it has just ended
    assert mps.foreign(environ, processes) == ""
    (place / "control").touch()
    assert mps.foreign(environ, processes) == f"another MPS control daemon listens in {place}"


class TestProcess:
    """`python -m muxserve.gpu.mps`, as the controller starts it."""

    def start(self, place: Path, code: str | None = None) -> subprocess.Popen[str]:
        unit_spec = msgspec.structs.replace(fake_unit_spec(place), gpu=GpuSpec(GPUS))
        save(unit_spec, place / "unit.json")
        command = [sys.executable, "-m", "muxserve.gpu.mps", "--unit-spec", str(place / "unit.json")]
        if code is not None:
            command = [sys.executable, "-c", code, *command]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)

    def test_it_says_ready_and_ends_with_sigterm(self, fake: Fake, place: Path) -> None:
        process = self.start(place)
        assert process.stdout is not None
        assert process.stdout.readline() == f"READY {fake.pids()[1]}\n"
        process.terminate()
        assert process.wait(PATIENCE) == 0
        assert fake.journal()[-1] == "quit -t 5"
        assert not any(alive(pid) for pid in fake.pids())

    def test_it_ends_with_the_server(self, fake: Fake, place: Path) -> None:
        process = self.start(place)
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(fake.pids()[1], signal.SIGKILL)
        _, said = process.communicate(timeout=PATIENCE)
        assert (process.returncode, said.split(":")[0]) == (1, "the MPS server has ended")
        assert not any(alive(pid) for pid in fake.pids())

    def test_it_says_why_it_does_not_start(self, fake: Fake, place: Path) -> None:
        fake.tell("broken")
        _, said = self.start(place).communicate(timeout=PATIENCE)
        assert said == "the MPS control daemon ended with status 3: Failed to start: no GPU is fit for MPS\n"

    def test_it_dies_with_its_parent(self, fake: Fake, place: Path) -> None:
        host = "import subprocess, sys, signal; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); p.wait()"
        process = self.start(place, host)
        assert process.stdout is not None
        first, second = process.stdout.readline(), process.stdout.readline()
        pid = int(first if first.strip().isdigit() else second)
        fd = os.pidfd_open(pid)
        process.kill()

        assert select.select([fd], [], [], PATIENCE)[0]
        os.close(fd)
        process.communicate()
        assert fake.journal()[-1] == "quit -t 5"
        assert not any(alive(each) for each in fake.pids())
