"""The families of forked processes: how parents and children talk to the controller.

    controller ── control socket ── machine parent (vLLM imported)
        │              │                ├── gateway, one or several
        │              └── (inherited) ─┘
        │                               ├── spare machine parent, which takes its place when it dies
        │                               └── warm parent, one per unit
        └── control socket per unit ───────┤   └── model parent, one per model (weights loaded)
                       │                   │           ├── prefill engine
                       └── (inherited) ────┴───────────└── decode engine

A unit that is alone on its machine has a warm parent that has imported vLLM itself. Where a model runs on GPUs or in
several ranks, its engines are forked from the warm parent directly, and on GPUs a holder of its weights too: a process
that has touched CUDA cannot be forked, and weights in worker processes are not inherited.

All of a family inherit its control socket (SEQPACKET, JSON) and send their events on it directly; only its first parent
reads it. A parent stays single-threaded, since only the forking thread lives on in a child.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from muxserve.gpu.environment import refuse_cuda
from muxserve.net.heartbeat import PERIOD_SECONDS, Heartbeat
from muxserve.net.logs import own_log
from muxserve.net.process import die_with, set_title
from muxserve.spec import UnitSpec

MAX_MESSAGE = 1 << 16
MAX_FDS = 4
# What is left for a directory that vLLM makes sockets in: 107 bytes less a slash and a UUID.
_LONGEST_DIRECTORY = 107 - 1 - 36


# Titles of the process that imports vLLM once on a machine, and of the one that waits to take its place.
VLLM_PARENT_TITLE = "vLLM parent"
SPARE_PARENT_TITLE = f"spare {VLLM_PARENT_TITLE}"


class Control:
    """This process's end of the control socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def event(self, event: str, **fields: Any) -> None:
        """Tell the controller; silently nothing when it is gone (the process is about to end then)."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps({"event": event, **fields}).encode())

    def receive(self) -> dict[str, Any] | None:
        """The next command; None when the other side is gone. Descriptors that came with it are its `fds`, which the
        receiver closes."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE, MAX_FDS)
        except ConnectionResetError:  # it has gone without reading all that it was told
            return None
        if not data:
            return None
        command: dict[str, Any] = json.loads(data)
        return {**command, "fds": fds} if fds else command

    def close(self) -> None:
        """Close this process's end."""
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()


class ForkingParent:
    """Waits for commands and dead children, and forks.

    Args:
        commands: where commands come from.
        control: where events go.
        handle: called with each command.
        on_exit: called with pid and wait status of each child that died.
        heartbeat: where it beats while it serves.
    """

    def __init__(
        self,
        commands: Control,
        control: Control,
        handle: Callable[[dict[str, Any]], None],
        on_exit: Callable[[int, int], None] | None = None,
        heartbeat: Path | None = None,
    ) -> None:
        self.commands = commands
        self.control = control
        self._handle = handle
        self._on_exit = on_exit
        self._heartbeat = None if heartbeat is None else Heartbeat(heartbeat)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._selector = selectors.DefaultSelector()

    def _forget(self) -> None:
        """In a child: let go of what is the parent's alone."""
        for mine in (self._wake_read, self._wake_write, self._selector):
            mine.close()
        if self._heartbeat is not None:
            self._heartbeat.close()

    def run(self) -> None:
        """Serve until the command side closes."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        with self._selector as selector:
            selector.register(self.commands, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            self._reap()
            while True:
                if self._heartbeat is not None:
                    self._heartbeat.beat()
                for key, _ in selector.select(PERIOD_SECONDS):
                    if key.fileobj is self._wake_read:
                        self._drain_wakeups()
                        self._reap()
                        continue
                    command = self.commands.receive()
                    if command is None:
                        return
                    self._handle(command)

    def fork(self, name: str, log_file: Path, child: Callable[[], None], die_with_parent: bool = True) -> int:
        """Fork a child that runs `child` with its output in `log_file`; returns its pid in the parent.

        Raises:
            RuntimeError: this process has touched CUDA, which a child could not use any more.
        """
        refuse_cuda()
        # What is here now stays: without the collector's touch its pages remain shared with the children.
        gc.collect()
        gc.freeze()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._forget()
            if die_with_parent:
                die_with(parent)
            redirect_output(log_file)
            set_title(name)
            child()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Not sys.exit: the clean-up that the parent registered is the parent's.
            os._exit(status)

    def _drain_wakeups(self) -> None:
        try:
            while self._wake_read.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.control.event("exited", pid=pid, status=os.waitstatus_to_exitcode(status))
            if self._on_exit:
                self._on_exit(pid, status)


def file_name(model: str) -> str:
    """A model's name in those of files."""
    return model.replace("/", "_")


def engine_log(unit_spec: UnitSpec, model: str, phase: str) -> Path:
    """Where an engine and its workers write."""
    return unit_spec.log_dir / f"engine-{file_name(model)}-{phase}.log"


@contextmanager
def temporary_files_in(run_dir: str) -> Iterator[None]:
    """What vLLM makes as temporary files goes with the run directory: a store where ranks meet, and the sockets of
    their message queues, also those that workers make later."""
    if len(run_dir) <= _LONGEST_DIRECTORY:
        os.environ["VLLM_RPC_BASE_PATH"] = run_dir
    before, tempfile.tempdir = tempfile.tempdir, run_dir
    try:
        yield
    finally:
        tempfile.tempdir = before


def redirect_output(log_file: Path) -> None:
    """Append stdout and stderr to `log_file`."""
    fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    own_log.write_to(log_file)
