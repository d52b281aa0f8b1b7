"""Servers under a benchmark: start, wait until they answer, stop. Each runs in a process group of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent


class ServerError(RuntimeError):
    """A server did not come up; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Server:
    """A server that answers. `url` has no slash at its end; `start_seconds` is from launch to the first healthy
    answer."""

    url: str
    pid: int
    start_seconds: float

    def metrics(self) -> str:
        """The server's Prometheus text as it is now: a gateway renders it once a second at most."""
        first = text = self._metrics()
        # Two renderings differ in the CPU time of the process at least.
        while text == first:
            time.sleep(0.05)
            text = self._metrics()
        return text

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text: str = answer.read().decode()
        return text

    def pss_bytes(self) -> int:
        """Proportional memory of the server and everything it started."""
        total = 0
        root = psutil.Process(self.pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total

    def pss_by_part(self) -> dict[str, float]:
        """MiB by process title, of all these processes."""
        parts: dict[str, float] = {}
        root = psutil.Process(self.pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                line = process.cmdline() or [process.name()]
                name = line[0] if line[0].startswith("muxserve ") else " ".join(Path(word).name for word in line[1:4])
                if "memory-manager" in line[0]:
                    name = "memory manager"
                parts[name] = parts.get(name, 0.0) + process.memory_full_info().pss / 2**20
        return parts

    def cpu_seconds(self, without: str | None = None) -> float:
        """CPU time that the server and everything it started have used, but for processes with `without` in their
        command line."""
        total = 0.0
        root = psutil.Process(self.pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if without is not None and without in " ".join(process.cmdline()):
                    continue
                times = process.cpu_times()
                total += times.user + times.system
        return total


def end_cleanly() -> None:
    """Let SIGTERM unwind the `with` blocks of this benchmark, so that no server outlives it."""

    def leave(*_: object) -> None:
        # Python drops what is raised within a destructor or a weak reference's callback: then it is raised again.
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGALRM, leave)
    signal.signal(signal.SIGTERM, leave)


def free_port() -> int:
    """A TCP port of the loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_ports(count: int) -> list[int]:
    """So many different ones, for servers that start side by side."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _tail(log: Path, lines: int = 25) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes], first: signal.Signals, grace: float) -> None:
    """Ask, wait, and only then kill the process group that was started here."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    group = process.pid
    if process.poll() is None:
        process.send_signal(first)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def server(
    command: Sequence[str],
    port: int,
    *,
    env: dict[str, str] | None = None,
    stop_signal: signal.Signals = signal.SIGTERM,
    timeout: float = 300.0,
    grace: float = 40.0,
) -> Iterator[Server]:
    """Run `command`, which is to listen on `port` of the loopback, for the length of the block.

    Raises:
        ServerError: it ended, or gave no healthy answer within `timeout` seconds.
    """
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            started = time.monotonic()
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        try:
            while not _healthy(url):
                if process.poll() is not None:
                    raise ServerError(f"the server ended with code {process.returncode}:\n{_tail(log)}")
                if time.monotonic() - started > timeout:
                    raise ServerError(f"no healthy answer within {timeout:.0f} s:\n{_tail(log)}")
                time.sleep(0.2)
            yield Server(url, process.pid, time.monotonic() - started)
        finally:
            _stop(process, stop_signal, grace)


@contextlib.contextmanager
def muxserve_fleet(
    fleet: Path, port: int | None = None, timeout: float = 300.0, options: Sequence[str] = ()
) -> Iterator[Server]:
    """`muxserve deploy FLEET` with `options` for the length of the block; stopped as Ctrl-C would.

    Raises:
        ServerError: the fleet did not become ready.
    """
    port = port or free_port()
    command = [sys.executable, "-m", "muxserve.cli.app", "deploy", str(fleet), "--port", str(port), *options]
    with server(command, port, stop_signal=signal.SIGINT, timeout=timeout) as running:
        yield running


def fleet_with(
    source: Path,
    target: Path,
    models: Sequence[str] | None = None,
    rates: Mapping[str, float] | None = None,
    engine_args: Mapping[str, object] | None = None,
    engines: str | None = None,
    **changes: object,
) -> Path:
    """Write a variant of a fleet file to `target`: only `models`, each expecting its rate of `rates`, with these
    `engine_args` too and `engines` of that shape, and other values for top-level keys. A value that is a mapping is
    merged into the key's own mapping. Model paths become absolute. All requests are served, however late: systems that
    are compared do the same work."""
    fleet = yaml.safe_load(source.read_text())
    for key, value in changes.items():
        fleet[key] = {**fleet.get(key, {}), **value} if isinstance(value, dict) else value
    if models is not None:
        fleet["models"] = [model for model in fleet["models"] if model["name"] in models]
    for model in fleet["models"]:
        model["limits"] = {"max_wait": "none", **model.get("limits", {})}
        if rates is not None:
            model["rate"] = rates[model["name"]]
        if engine_args is not None:
            model["engine_args"] = {**model.get("engine_args", {}), **engine_args}
        if engines is not None:
            model["engines"] = engines
        if "path" in model:
            model["path"] = str((source.parent / model["path"]).resolve())
    target.write_text(yaml.safe_dump(fleet, sort_keys=False))
    return target
