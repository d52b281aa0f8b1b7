"""An MPS server of our own: started, owned and stopped, with its own directories and no change of compute mode.

NVIDIA, "Multi-Process Service" (docs.nvidia.com/deploy/mps): the control daemon starts a server on behalf of a user;
clients find both through CUDA_MPS_PIPE_DIRECTORY. The daemon runs in the foreground here, below a small process of ours
that ends both when the controller is gone:

    python -m muxserve.gpu.mps --unit-spec FILE

prints `READY <pid of the server>` when clients can come, and ends when daemon or server have ended.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from muxserve.gpu.environment import LOG, PIPE, VISIBLE
from muxserve.gpu.sm import PERCENTAGE

CONTROL = "nvidia-cuda-mps-control"
_NAME = "nvidia-cuda-mps-server"[:15]  # what the kernel keeps of it
DEFAULT_PIPE = "/tmp/nvidia-mps"
# The kernel's limit for Unix sockets is 107 bytes; the daemon's own names below the pipe directory are at most these.
_LONGEST_NAME = "/control_privileged"
_SOCKET_LIMIT = 107
_ANSWER_SECONDS = 10.0
_SERVER_SECONDS = 60.0
_QUIT_SECONDS = 5.0
# How often the server is asked how it is. It does not end when the kernel of a client fails: it refuses clients then.
_STATUS_SECONDS = 1.0
_FAULT = "FAULT"
_TERMINATE_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1


class MpsError(RuntimeError):
    """MPS cannot be used; the message says why."""


def binary() -> str | None:
    """The control program; None if MPS is not installed."""
    return shutil.which(CONTROL) or next(filter(os.path.exists, [f"/usr/local/nvidia/bin/{CONTROL}"]), None)


class MpsServer:
    """One control daemon and its server.

    Args:
        directory: where its pipes and logs go; made if it is not there.
        gpus: UUIDs of the GPUs that it serves.
        control: the control program.
    """

    def __init__(self, directory: Path, gpus: Sequence[str], control: str) -> None:
        self.pipe, self.logs = directory / "pipe", directory / "log"
        if len(os.fsencode(f"{self.pipe}{_LONGEST_NAME}")) > _SOCKET_LIMIT:
            raise MpsError(
                f"{directory} is too long a path for the sockets of MPS; set XDG_RUNTIME_DIR to a shorter one"
            )
        self._control = control
        self._environment = {**os.environ, PIPE: str(self.pipe), LOG: str(self.logs)}
        self._environment[VISIBLE] = ",".join(gpus)
        self._environment.pop(PERCENTAGE, None)
        self._daemon: subprocess.Popen[bytes] | None = None
        self.server_pid = 0

    def start(self) -> None:
        """Start the daemon and the server; returns when clients can come.

        Raises:
            MpsError: it does not start; with the last line of its log.
        """
        # What a killed daemon has left there would be in the way of the next.
        shutil.rmtree(self.pipe, ignore_errors=True)
        for directory in (self.pipe, self.logs):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._daemon = subprocess.Popen(
                [self._control, "-f"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environment,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            raise MpsError(f"{self._control} cannot be started: {error.strerror}") from None
        self._until("does not answer", _ANSWER_SECONDS, lambda: self.command("get_server_list") is not None)
        self.command(f"start_server -uid {os.getuid()}")
        self._until("starts no server", _SERVER_SECONDS, lambda: bool(self._servers()))
        self.server_pid = self._servers()[0]

    def command(self, text: str, seconds: float = _ANSWER_SECONDS) -> str | None:
        """The daemon's answer to a command; None if it does not answer."""
        return _ask(self._control, text, self._environment, seconds)

    def wait(self, wake_fd: int) -> str:
        """Until daemon or server have ended, the server is of no use any more, or `wake_fd` can be read; returns what
        happened ("" for `wake_fd`)."""
        assert self._daemon is not None
        with contextlib.ExitStack() as stack:
            ends = {}
            for pid, what in ((self._daemon.pid, "control daemon"), (self.server_pid, "server")):
                try:
                    fd = os.pidfd_open(pid)
                except ProcessLookupError:
                    return f"the MPS {what} has ended"
                stack.callback(os.close, fd)
                ends[fd] = what
            while not (readable := select.select([wake_fd, *ends], [], [], _STATUS_SECONDS)[0]):
                if _FAULT in (self.command(f"get_server_status {self.server_pid}") or ""):
                    return "a kernel of a client has failed, and the MPS server takes no clients any more (FAULT)"
            return next((f"the MPS {ends[fd]} has ended" for fd in readable if fd in ends), "")

    def stop(self, at_once: bool = False) -> None:
        """Quit, within a few seconds: clients that are still there get `quit -t`'s time, then everything is killed.
        `at_once`: without that time, since clients cannot compute any more."""
        daemon = self._daemon
        if daemon is None:
            return
        if daemon.poll() is None and not at_once:
            self.command(f"quit -t {_QUIT_SECONDS:.0f}", _QUIT_SECONDS + 2)
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(_QUIT_SECONDS)
        # A server is the daemon's child; it may stay when the daemon was killed.
        if self.server_pid:
            _kill_server(self.server_pid)
        if daemon.poll() is None:
            daemon.kill()
        daemon.wait()
        self._daemon = None

    def log_tail_of(self) -> str:
        """The last line of the daemon's or the server's log."""
        for name in ("server.log", "control.log"):
            with contextlib.suppress(OSError):
                lines = (self.logs / name).read_text(errors="replace").splitlines()
                if lines:
                    return lines[-1]
        return ""

    def _servers(self) -> list[int]:
        return _numbers(self.command("get_server_list"))

    def _until(self, failing: str, seconds: float, done: Callable[[], bool]) -> None:
        assert self._daemon is not None
        deadline = time.monotonic() + seconds
        while not done():
            status = self._daemon.poll()
            if status is not None or time.monotonic() > deadline:
                ended = f"ended with status {status}" if status is not None else f"{failing} within {seconds:.0f} s"
                words = self.log_tail_of()
                raise MpsError(f"the MPS control daemon {ended}" + (f": {words}" if words else ""))
            time.sleep(0.05)


def terminate(directory: Path, pids: Collection[int]) -> None:
    """Take those of `pids` that are clients of the server in `directory` off the GPUs, before they are killed.

    MPS wants to be told first, or what a killed client has launched may go on. Does nothing where there is no server;
    takes a few seconds at most.
    """
    control = binary()
    environment = {**os.environ, PIPE: str(directory / "pipe"), LOG: str(directory / "log")}
    if control is None or not (directory / "pipe").is_dir():
        return
    for server in _numbers(_ask(control, "get_server_list", environment, _TERMINATE_SECONDS)):
        clients = _numbers(_ask(control, f"get_client_list {server}", environment, _TERMINATE_SECONDS))
        for client in set(clients).intersection(pids):
            _ask(control, f"terminate_client {server} {client}", environment, _TERMINATE_SECONDS)


def _ask(control: str, text: str, environment: Mapping[str, str], seconds: float) -> str | None:
    """A daemon's answer to a command; None if it does not answer."""
    try:
        done = subprocess.run(
            [control], input=f"{text}\n".encode(), capture_output=True, timeout=seconds, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _numbers(answer: str | None) -> list[int]:
    return [int(word) for word in (answer or "").split() if word.isdigit()]


def probe(gpus: Sequence[str], base: Path) -> str:
    """Whether MPS works here, by starting and stopping it in a directory below `base`: empty if so, else why not."""
    control = binary()
    if control is None:
        return f"{CONTROL} is not installed (it comes with the driver; in a container it must be mounted, too)"
    with tempfile.TemporaryDirectory(prefix="mps-", dir=base) as directory:
        try:
            server = MpsServer(Path(directory), gpus, control)
        except MpsError as error:
            return str(error)
        try:
            server.start()
        except MpsError as error:
            return str(error)
        finally:
            server.stop()
    return ""


def foreign(environ: Mapping[str, str] | None = None, processes: Path = Path("/proc"), ours: Path | None = None) -> str:
    """An MPS server of somebody else on this machine, in words; empty if there is none. Those whose pipes lie below
    `ours` are not somebody else's."""
    environ = os.environ if environ is None else environ
    pipe = Path(environ.get(PIPE, DEFAULT_PIPE))
    named = [p for p in processes.iterdir() if p.name.isdigit() and _name_of(p) == _NAME]
    servers = [p.name for p in named if ours is None or not (where := pipe_of(p)) or ours not in where.parents]
    if servers:
        return f"another MPS server runs here (pid {', '.join(servers)})"
    return f"another MPS control daemon listens in {pipe}" if (pipe / "control").exists() else ""


def pipe_of(process: Path) -> Path | None:
    """The pipe directory in the environment of a process, from its directory below /proc; None if that is not told."""
    with contextlib.suppress(OSError):
        for variable in (process / "environ").read_bytes().split(b"\0"):
            name, _, value = variable.decode(errors="replace").partition("=")
            if name == PIPE:
                return Path(value)
    return None


def _kill_server(pid: int) -> None:
    """Kill an MPS server and wait for its end; nothing if the number is somebody else's by now."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if _name_of(Path(f"/proc/{pid}")) == _NAME:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            select.select([fd], [], [], _QUIT_SECONDS)
    except ProcessLookupError:
        pass
    finally:
        os.close(fd)


def _name_of(process: Path) -> str:
    """The name of a process, from its directory below /proc."""
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return ""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Run an MPS server until told to stop or until it ends."""
    from muxserve.spec import load

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unit-spec", required=True)
    unit_spec = load(parser.parse_args().unit_spec)
    if unit_spec.gpu is None:
        parser.error("the unit has no GPUs")
    control = binary()
    if control is None:
        print(f"{CONTROL} is not installed", file=sys.stderr)
        return 1
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        server = MpsServer(unit_spec.mps_dir, unit_spec.gpu.uuids, control)
        try:
            server.start()
            print(f"READY {server.server_pid}", flush=True)
            ended = server.wait(read)
            server.stop(at_once=bool(ended))
        finally:
            server.stop()
    except MpsError as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    if ended:
        print(ended, server.log_tail_of(), sep=": ", file=sys.stderr, flush=True)
    return 1 if ended else 0


if __name__ == "__main__":
    sys.exit(main())
