"""The probes of a GPU machine, one after another, each in child processes of its own with a time limit.

A probe that fails is tried again in other ways, if it has any: the first that works is what `deploy` does then. Nothing
is changed on the GPUs, and the MPS server that is started is stopped at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from muxserve.gpu import mps
from muxserve.gpu.environment import LOG, PIPE, VISIBLE
from muxserve.gpu.findings import GRAPHS, GREEN, PERCENTAGES, SHAPES, Fallback, ProbeFinding
from muxserve.gpu.nvml import Gpu
from muxserve.gpu.sm import PERCENTAGE
from muxserve.gpu.weight_server import WeightServer
from muxserve.probes.shape import AttentionShape

CHILD = (sys.executable, "-m", "muxserve.probes.child")
# Importing torch and making a context take some seconds, compiling kernels some more.
LIMIT = 120.0
_TOLERANCE = 0.15  # of a share of SMs, which GPUs divide only so finely
_SAID = 400


class ProbeFailed(Exception):  # noqa: N818 -- a finding, not an error of ours
    """What was tried does not work; the message says what came instead."""


class NotTried(Exception):  # noqa: N818
    """There is nothing to try here; the message says why."""


@dataclass
class ProbeProcess:
    """A process of a probe. It prints one line of JSON for each thing that it has done."""

    role: str
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    until: float
    _buffer: bytes = b""

    def answer(self) -> dict[str, Any]:
        """The next thing that it says.

        Raises:
            ProbeFailed: it ended, or said nothing in time; with the last it wrote.
        """
        stdout = self.process.stdout
        assert stdout is not None
        while b"\n" not in self._buffer:
            left = self.until - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                raise ProbeFailed(f"{self.role} did not end in time")
            got = os.read(stdout.fileno(), 65536)
            if not got:
                raise ProbeFailed(f"{self.role} ended with status {self.process.wait()}: {self._last_words()}")
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            said: dict[str, Any] = json.loads(line)
        except ValueError:
            return self.answer()  # a library wrote there
        if "error" in said:
            raise ProbeFailed(f"{self.role}: {said['error']}"[:_SAID])
        return said

    def _last_words(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:_SAID] if lines else "it wrote nothing"

    def go(self) -> None:
        """Have it go on, if it waits for a line of input."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: its next answer says how
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        """End it with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            if stream is not None:
                stream.close()


@dataclass
class Lab:
    """Where probes are made.

    Args:
        gpus: all of one unit.
        directory: short, for sockets.
        control: the program that controls MPS; None without.
        command: what runs a role; it gets its name and arguments.
        limit: seconds for one child; one that compiles with the CUDA toolkit has more.
    """

    gpus: Sequence[Gpu]
    directory: Path
    control: str | None
    command: Sequence[str] = CHILD
    limit: float = field(default_factory=lambda: LIMIT)
    # When children are ended whatever their limit.
    until: float = float("inf")
    # What is done differently by now.
    fallbacks: set[Fallback] = field(default_factory=set)
    _server: mps.MpsServer | None = None
    _why_no_server: str = ""

    def begin(self) -> None:
        """Start an MPS server, if that works."""
        if self.control is None:
            self._why_no_server = f"{mps.CONTROL} is not installed (it comes with the driver)"
            return
        try:
            self._server = mps.MpsServer(self.directory / "mps", [gpu.uuid for gpu in self.gpus], self.control)
            self._server.start()
        except mps.MpsError as error:
            self._why_no_server = str(error)
            self.end()

    def end(self) -> None:
        """Stop the MPS server."""
        if self._server is not None:
            self._server.stop()
            self._server = None

    def refresh(self) -> None:
        """After a probe that failed, begin with a new server: a failed kernel leaves one that refuses all clients."""
        if self._server is not None:
            self._server.stop(at_once=True)
            self._server = None
            self.begin()

    def needs_mps(self) -> mps.MpsServer:
        """The MPS server.

        Raises:
            NotTried: engines do without.
        """
        if self._server is None or "mps_off" in self.fallbacks:
            raise NotTried("engines do without MPS")
        return self._server

    @property
    def why_no_mps(self) -> str:
        """Why there is no MPS server; empty if there is one."""
        return self._why_no_server if self._server is None else ""

    def client(self, percentage: int | None = None, count: int | None = None) -> dict[str, str]:
        """The environment of an engine on the first `count` GPUs (all by default), under MPS if that works."""
        visible = {VISIBLE: ",".join(gpu.uuid for gpu in self.gpus[:count])}
        if self._server is None or "mps_off" in self.fallbacks:
            return visible
        share = {} if percentage is None else {PERCENTAGE: str(percentage)}
        return {**visible, PIPE: str(self._server.pipe), LOG: str(self._server.logs), **share}

    def keeper(self) -> dict[str, str]:
        """That of a process that keeps memory for engines, on the first GPU."""
        if "keepers_in_mps" in self.fallbacks:
            return self.client(count=1)
        return {VISIBLE: self.gpus[0].uuid, PIPE: str(self.directory / "none")}

    @contextlib.contextmanager
    def child(self, role: str, *arguments: object, environment: Mapping[str, str]) -> Iterator[ProbeProcess]:
        """Run a role meanwhile, until the time limit at most."""
        inherited = {name: value for name, value in os.environ.items() if name not in (PERCENTAGE, PIPE, LOG)}
        errors = tempfile.TemporaryFile(dir=self.directory)  # noqa: SIM115 -- closed with the child
        process = subprocess.Popen(
            [*self.command, role, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**inherited, **environment},
            start_new_session=True,
        )
        child = ProbeProcess(role, process, errors, min(time.monotonic() + self.limit, self.until))
        try:
            yield child
        finally:
            child.kill()

    def ask(self, role: str, *arguments: object, environment: Mapping[str, str]) -> dict[str, Any]:
        """What a role has to say.

        Raises:
            ProbeFailed: see `Child.answer`.
        """
        with self.child(role, *arguments, environment=environment) as child:
            return child.answer()


@dataclass(frozen=True)
class Probe:
    """`attempt` says in words what it found, or raises `ProbeFailed` or `NotTried`. `ways` are fallbacks with which it
    is tried again; `otherwise` is done if none of them helps."""

    name: str
    attempt: Callable[[Lab], str]
    otherwise: Fallback
    ways: tuple[tuple[Fallback, ...], ...] = ()


def run(
    lab: Lab,
    probes: Sequence[Probe],
    tell: Callable[[str], None] = lambda _: None,
    seconds: float = float("inf"),
) -> list[ProbeFinding]:
    """Make all probes; one that breaks has failed. After one because of which nothing can be served there are no
    others.

    Args:
        tell: hears which one is made.
        seconds: for all of them together. Those for which that is too short count as not tried.
    """
    findings = []
    lab.until = time.monotonic() + seconds
    lab.begin()
    try:
        for probe in probes:
            before = set(lab.fallbacks)
            if time.monotonic() < lab.until:
                tell(probe.name)
                found = _find(lab, probe)
                if found.verdict != "failed" or time.monotonic() < lab.until:
                    findings.append(found)
                    if "refuse" in found.fallbacks:
                        break
                    continue
            lab.fallbacks = before
            findings.append(ProbeFinding(probe.name, "not tried", f"{seconds:.0f} s were too short for it"))
    finally:
        lab.end()
    return findings


def _find(lab: Lab, probe: Probe) -> ProbeFinding:
    began = time.monotonic()
    before, first = set(lab.fallbacks), ""
    for way in ((), *probe.ways):
        lab.fallbacks = before | set(way)
        try:
            detail = probe.attempt(lab)
        except NotTried as why:
            lab.fallbacks = before
            return ProbeFinding(probe.name, "not tried", str(why), time.monotonic() - began)
        except Exception as error:
            first = first or (str(error) if isinstance(error, ProbeFailed) else f"{type(error).__name__}: {error}")
            lab.refresh()
            continue
        if not way:
            return ProbeFinding(probe.name, "ok", detail, time.monotonic() - began)
        return ProbeFinding(probe.name, "failed", f"{first}; so: {detail}", time.monotonic() - began, way)
    lab.fallbacks = before | {probe.otherwise}
    return ProbeFinding(probe.name, "failed", first, time.monotonic() - began, (probe.otherwise,))


# ------------------------------------------------------------ the probes


def _computes(lab: Lab) -> str:
    said = lab.ask("compute", environment={VISIBLE: lab.gpus[0].uuid, PIPE: str(lab.directory / "none")})
    major, minor = said["capability"]
    if (major, minor) < (8, 0):
        raise ProbeFailed(f"compute capability {major}.{minor}; FlashAttention needs 8.0 or later")
    return f"torch {said['torch']} (CUDA {said['cuda']}) computes on {said['name']}, capability {major}.{minor}"


def _shares(lab: Lab) -> str:
    if lab.why_no_mps:
        raise ProbeFailed(lab.why_no_mps)
    server_sms = {p: lab.ask("compute", environment=lab.client(p, 1))["sms"] for p in (50, 100)}
    half, whole = server_sms[50], server_sms[100]
    if abs(half / whole - 0.5) > _TOLERANCE:
        raise ProbeFailed(f"a client with 50% sees {half} of {whole} SMs")
    return f"a client with 50% sees {half} of {whole} SMs"


def _weights(lab: Lab) -> str:
    if lab.fallbacks.isdisjoint({"ipc_legacy", "keepers_in_mps"}):
        return _exported_weights(lab)
    with lab.child("keep", environment=lab.keeper()) as keeper:
        handle = keeper.answer()["handle"]
        seen = lab.ask("map", handle, environment=lab.client(50, 1))
    if not seen["same"]:
        raise ProbeFailed("what a client reads in another process's memory is not what was written there")
    where = "inside" if "keepers_in_mps" in lab.fallbacks or lab.why_no_mps else "outside"
    return f"a client maps memory of a process {where} MPS"


def _exported_weights(lab: Lab) -> str:
    path = str(lab.directory / "weights.sock")
    server = WeightServer(path, on_lost=lambda reason: None)
    try:
        lab.ask("export", path, lab.gpus[0].uuid, environment=lab.keeper())
        seen = lab.ask("map-exported", path, environment=lab.client(50, 1))
    finally:
        server.close()
    if not seen["same"]:
        raise ProbeFailed("what a client reads in memory that was kept is not what was written there")
    return f"a client maps memory of a process that has ended{', for reading only' * seen['read_only']}"


def _pool(lab: Lab) -> str:
    ipc = "legacy" if "ipc_legacy" in lab.fallbacks else "vmm"
    with lab.child("manage", lab.directory / "pool", lab.gpus[0].uuid, ipc, environment=lab.keeper()) as manager:
        socket = manager.answer()["socket"]
        lab.ask("write-page", socket, environment=lab.client(50, 1))
        if not lab.ask("read-page", socket, environment=lab.client(50, 1))["same"]:
            raise ProbeFailed(f"a page written by one client is not what another reads ({ipc})")
    return f"two clients share a pool ({ipc})"


# bfloat16 has a step of 2^-8 at 1.
_MOST_ERROR, _MEAN_ERROR = 4e-2, 2e-3


def _attention(role: str) -> Callable[[Lab], str]:
    def attempt(lab: Lab) -> str:
        said = lab.ask(role, environment=lab.client(None, 1))
        words = f"largest difference from plain attention {said['most']:.2g}, mean {said['mean']:.2g}"
        # Not a number compares with nothing.
        if not (said["most"] <= _MOST_ERROR and said["mean"] <= _MEAN_ERROR):
            raise ProbeFailed(f"{words} (at most {_MOST_ERROR:g} and {_MEAN_ERROR:g}), over {said['cases']} cases")
        return f"{words}, over {said['cases']} cases"

    return attempt


def _communicators(lab: Lab) -> str:
    if len(lab.gpus) < 2:
        raise NotTried("there is one GPU")
    environment = lab.client(50, 2)
    if "nvls_off" in lab.fallbacks:
        environment |= {"NCCL_NVLS_ENABLE": "0"}
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(
                lab.child("reduce", lab.directory / f"store-{pair}-{len(lab.fallbacks)}", rank, environment=environment)
            )
            for pair in range(2)
            for rank in range(2)
        ]
        for child in children:
            if not child.answer()["same"]:
                raise ProbeFailed("a sum over two GPUs is wrong")
    return "two communicators over the same two GPUs reduce side by side"


def _killed(lab: Lab) -> str:
    server = lab.needs_mps()
    with lab.child("spin", environment=lab.client(50, 1)) as spinning:
        spinning.answer()
        mps.terminate(server.pipe.parent, {spinning.process.pid})
    lab.ask("compute", environment=lab.client(50, 1))
    status = (server.command(f"get_server_status {server.server_pid}") or "").strip()
    if "FAULT" in status:
        raise ProbeFailed("the server is in FAULT afterwards")
    return "another client computes after one was killed in the middle of a kernel"


def _green(lab: Lab) -> str:
    lab.needs_mps()
    said = lab.ask("green", environment=lab.client(None, 1))
    beside = _side_by_side(lab, [("prefill", None, 0.6), *[("decode", None, 0.2)] * 2])
    return (
        f"kernels and graphs keep to {said['sms']} of {said['total']} SMs; side by side they take "
        f"{said['slowdown']:.2f} times as long; a switch takes {said['switch_us']:.0f} us; {beside}"
    )


def _percentages(lab: Lab) -> str:
    lab.needs_mps()
    return _side_by_side(lab, [("prefill", 70, None), *[("decode", 10, None)] * 3])


# Seconds for which processes compute beside each other, and pages that each has.
_BESIDE_SECONDS = 3.0
_BESIDE_PAGES = 4096


def _side_by_side(lab: Lab, shares: Sequence[tuple[str, int | None, float | None]]) -> str:
    """Have processes compute steps of a phase with a percentage of MPS or a part of the SMs as a green context, each
    alone and then all at once, on one pool."""
    pages = len(shares) * _BESIDE_PAGES
    with contextlib.ExitStack() as stack:
        ipc = "legacy" if "ipc_legacy" in lab.fallbacks else "vmm"
        directory = lab.directory / f"beside-{len(lab.fallbacks)}-{shares[0][1]}"
        manager = stack.enter_context(
            lab.child("manage", directory, lab.gpus[0].uuid, ipc, pages, environment=lab.keeper())
        )
        socket = manager.answer()["socket"]
        children = [
            stack.enter_context(
                lab.child(
                    "beside", socket, place * _BESIDE_PAGES, phase, _BESIDE_SECONDS, "" if part is None else part,
                    environment=lab.client(percentage, 1),
                )
            )
            for place, (phase, percentage, part) in enumerate(shares)
        ]  # fmt: skip
        for child in children:
            child.answer()
        for child in children:
            child.go()
            child.answer()
        for child in children:
            child.go()
        said = [child.answer() for child in children]
    for (phase, _, _), each in zip(shares, said, strict=True):
        if each["different"]:
            raise ProbeFailed(
                f"{each['different']} of {each['steps']} {phase} steps on {each['sms']} SMs came out otherwise beside "
                "other processes"
            )
    slower = max(each["alone"] / each["rate"] for each in said)
    return (
        f"{sum(each['steps'] for each in said)} steps beside others are those alone, {slower:.2f} times as slow at most"
    )


# Part of the largest value. bfloat16 has a step of 2^-8 at 1, and a sum of thousands of products comes to a few of
# them.
_MOST_SHAPE_ERROR = 3e-2


def shapes_probe(shapes: Mapping[int, Sequence[AttentionShape]]) -> Probe:
    """The probe of these models' shapes, by the percentage of the SMs that their engines would have."""

    def attempt(lab: Lab) -> str:
        lab.needs_mps()
        for percentage, each in shapes.items():
            described = msgspec.json.encode(each).decode()
            said = lab.ask("shapes", described, environment=lab.client(percentage, 1))
            for shape, errors in zip(each, said["errors"], strict=True):
                # Not a number compares with nothing.
                if not all(error <= _MOST_SHAPE_ERROR for error in errors):
                    raise ProbeFailed(
                        f"a model with {shape} comes out wrong with {percentage} % ({said['sms']} SMs): attention by "
                        f"{errors[0]:.2g}, products by {errors[1]:.2g} of the largest value"
                    )
        count = len({shape for each in shapes.values() for shape in each})
        return f"{count} shapes are right with {', '.join(f'{each} %' for each in sorted(shapes))} of the SMs"

    return Probe(SHAPES, attempt, "no_percentages")


PROBES = (
    Probe("CUDA", _computes, "refuse"),
    Probe("SM shares under MPS", _shares, "mps_off"),
    Probe(
        "weights of another process",
        _weights,
        "refuse",
        (("ipc_legacy",), ("keepers_in_mps",), ("mps_off",), ("mps_off", "ipc_legacy")),
    ),
    Probe(
        "pool of another process",
        _pool,
        "refuse",
        (("ipc_legacy",), ("keepers_in_mps",), ("keepers_in_mps", "ipc_legacy"), ("mps_off",)),
    ),
    Probe("attention on one-head pages", _attention("attention"), "refuse"),
    Probe(GRAPHS, _attention("graph"), "piecewise"),
    Probe("communicators side by side", _communicators, "fcfs", (("nvls_off",),)),
    Probe("a client killed in a kernel", _killed, "restart_mps"),
    Probe(GREEN, _green, "no_green_contexts"),
    Probe(PERCENTAGES, _percentages, "no_percentages"),
)

_QUICK = ("CUDA", "SM shares under MPS", "weights of another process", "pool of another process", GREEN)
QUICK = tuple(probe for name in (*_QUICK, "attention on one-head pages") for probe in PROBES if probe.name == name)
"""What decides how engines share a GPU, most decisive first: within a minute where all of it works."""
QUICK_SECONDS = 60.0
