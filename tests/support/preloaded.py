"""A process of the test session that has imported vLLM; what else would import it is forked from it.

Importing takes ten seconds of a core, and most tests that start a fleet or a unit are not about that. For them `start`
is `subprocess.Popen([sys.executable, "-m", MODULE, ...])` without it: the module's `main` runs in a fork, and so does
that of the parents of engines which it starts in turn. These come from a fork of its own that waits beside it, so that
processes have the session, the group and the parent that they would have.

What stock vLLM answers is made by programs that are forked, too, from one that has imported nothing but vLLM.

    python -m tests.support.preloaded FD STOCK_FD     the process itself; orders come on these sockets
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from tests.support.patience import PATIENCE

# What starts processes that import vLLM, and these.
_STARTS = ("muxserve.cli.app", "muxserve.cluster.unit_host")
_IMPORTS = ("muxserve.forks.machine_parent", "muxserve.forks.warm_parent")
_START_SECONDS = 3 * PATIENCE
_MAX_MESSAGE = 1 << 18
_MAX_FDS = 16
# Descriptors come in above those that they are to have.
_HIGH = 400


class Forked:
    """A process that was forked, as `subprocess.Popen` shows one."""

    def __init__(self, reply: socket.socket, stdout: IO[bytes] | None) -> None:
        self._reply = reply
        self.stdout = stdout
        self.pid = int(self._next(_START_SECONDS))
        self.returncode: int | None = None

    def _next(self, seconds: float | None) -> str:
        self._reply.settimeout(seconds)
        told = self._reply.recv(64).decode()
        assert told, "what forks has ended"
        return told

    def poll(self) -> int | None:
        """The return code as in `subprocess`, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The return code, when it has ended.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        if self.returncode is None:
            try:
                self.returncode = int(self._next(timeout))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None
            self._reply.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Orders:
    """The asking end of a process that forks."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def give(
        self,
        argv: Sequence[str],
        stdout: int,
        stderr: int,
        pass_fds: Collection[int],
        *,
        environment: Mapping[str, str],
        directory: str,
        session: bool = False,
        keeps: bool = True,
    ) -> socket.socket:
        """Have `argv` (python, -m, module, arguments) run in a fork; where its pid comes and then, if what forks it
        `keeps` it as a child, its return code. It leads a session or a group of its own."""
        reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {
            "argv": list(argv),
            "fds": list(pass_fds),
            "environment": dict(environment),
            "directory": directory,
            "session": session,
            "keeps": keeps,
        }
        with theirs:
            socket.send_fds(self._socket, [json.dumps(order).encode()], [theirs.fileno(), stdout, stderr, *pass_fds])
        return reply

    def close(self) -> None:
        """What forks ends for it."""
        self._socket.close()


def serve(orders: socket.socket) -> None:
    """Fork as ordered, until nobody can order any more."""
    while True:
        data, fds, _, _ = socket.recv_fds(orders, _MAX_MESSAGE, _MAX_FDS)
        if not data:
            return
        if os.fork() == 0:
            orders.close()
            _between(json.loads(data), fds)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _between(order: dict[str, Any], fds: list[int]) -> None:
    """The parent of what is forked: waits for it, or leaves it to whoever adopts orphans. Returns never; in the process
    itself `main` ends in SystemExit."""
    reply = socket.socket(fileno=fds[0])
    pid = os.fork()
    if pid == 0:
        reply.close()
        _become(order, fds[1:])
    for fd in fds[1:]:
        os.close(fd)
    reply.send(str(pid).encode())
    if order["keeps"]:
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # nobody asks any more
            reply.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(order: dict[str, Any], fds: list[int]) -> NoReturn:
    """The process that was ordered."""
    import setproctitle

    if order["session"]:
        os.setsid()
    else:
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    argv = order["argv"]
    setproctitle.setproctitle(" ".join(argv))
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["directory"])
    # Out of the way first: one's number may be what another has come in under.
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, (1, 2, *order["fds"]), strict=True):
        os.dup2(fd, number)
        os.close(fd)
    module = importlib.import_module(argv[2])
    if argv[2] in _STARTS:
        _have_forked(_beside())
    sys.argv = argv[2:]
    sys.exit(module.main())


def _beside() -> _Orders:
    """A fork of this process as it is now, which forks others."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return _Orders(ours)
    ours.close()
    import setproctitle

    setproctitle.setproctitle("forks what has vLLM imported")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(os.devnull, "r+b") as nowhere:
        for number in (1, 2):
            os.dup2(nowhere.fileno(), number)
    serve(theirs)
    os._exit(0)


def _have_forked(orders: _Orders) -> None:
    """Where this process would start what imports vLLM, have it forked."""
    from muxserve.cli import app
    from muxserve.cluster import fleet_starts, launcher
    from muxserve.cluster.processes import Process, spawn

    def spawned(
        argv: Sequence[str],
        log: Path,
        pass_fds: Sequence[int] = (),
        pipe_stdout: bool = False,
        environment: Mapping[str, str] | None = None,
        held: Collection[signal.Signals] = (),
    ) -> Process:
        if argv[1] != "-m" or argv[2] not in _IMPORTS:
            return spawn(argv, log, pass_fds, pipe_stdout, environment, held)
        there = {**os.environ, **(environment or {})}
        with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
            to = output.fileno()
            reply = orders.give(argv, to, to, pass_fds, environment=there, directory=os.getcwd(), keeps=False)
        with reply:
            return Process(int(reply.recv(64)))

    fleet_starts.spawn = launcher.spawn = spawned  # type: ignore[attr-defined]
    # Nothing was inherited but what was passed.
    app.close_inherited = lambda given=(): None  # type: ignore[attr-defined]


@functools.cache
def _started() -> tuple[_Orders, _Orders]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stock_ours, stock_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds = [theirs.fileno(), stock_theirs.fileno()]
    with theirs, stock_theirs, tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.preloaded", *map(str, fds)],
            pass_fds=fds,
            stdout=said,
            stderr=said,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )

    def end() -> None:
        for orders in each:
            orders.close()
        process.wait(PATIENCE)

    each = _Orders(ours), _Orders(stock_ours)
    atexit.register(end)
    return each


_starting = threading.Lock()


def _of_session(stock: bool) -> _Orders:
    """That of this test session, started when it is first needed; or the one that is `stock` vLLM."""
    with _starting:  # programs beside the tests are started by another thread
        preloaded, of_stock = _started()
    return of_stock if stock else preloaded


def start(
    argv: Sequence[str],
    *,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    pass_fds: Collection[int] = (),
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] = ".",
    start_new_session: bool = False,
    stock: bool = False,
) -> Forked:
    """As `subprocess.Popen` with these arguments, for `argv` of [python, -m, module, ...]: its `main` is run. `stock`:
    by a process that has imported vLLM and nothing of ours."""
    with contextlib.ExitStack() as stack:
        read = None
        if stdout == subprocess.PIPE:
            ours, theirs = os.pipe()
            read = open(ours, "rb")  # noqa: SIM115
            stack.callback(os.close, theirs)
            out = theirs
        else:
            out = stdout if isinstance(stdout, int) else stdout.fileno()
        err = out if stderr == subprocess.STDOUT else stderr if isinstance(stderr, int) else stderr.fileno()
        reply = _of_session(stock).give(
            argv,
            out,
            err,
            pass_fds,
            environment=os.environ if env is None else env,
            directory=os.path.abspath(cwd),
            session=start_new_session,
        )
    return Forked(reply, read)


def main() -> None:
    """Import, and fork as ordered."""
    from muxserve.forks import machine_parent, warm_parent

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(warm_parent.environment())
    orders, of_stock = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    if os.fork() == 0:
        orders.close()
        serve(of_stock)
        os._exit(0)
    of_stock.close()
    machine_parent.preload("cpu")
    import muxserve.cli.app
    import muxserve.cluster.unit_host  # noqa: F401

    with orders:
        serve(orders)


if __name__ == "__main__":
    main()
