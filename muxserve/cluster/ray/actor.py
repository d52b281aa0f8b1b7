"""The far end of a unit on Ray: an actor on the unit's node that starts the unit's host as a process and watches it.

The actor chooses the unit's directory and ports on its node, and tells the host which GPUs Ray has given to it. The
controller speaks to the host itself (`muxserve.cluster.host_link`). The host ends when its input does, and so with the
actor's process. Ray starts the actor again when that dies: on the same node, where it takes up directory and ports
again so that the unit's addresses stay, or on another one.

What passes between controller and actor are numbers, text and JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from muxserve.cluster.events import HOST, PartId
from muxserve.cluster.ray.orphans import end_orphans
from muxserve.cluster.watch import Watch
from muxserve.cluster.watchdog import Finding, Liveness
from muxserve.net.sockets import NetworkError, free_port
from muxserve.spec import Listen, UnitSpec, save
from muxserve.spec.run_dir import LOCK, RunDirError, claim, default_base

# A unit on GPUs gives its engines, and then MPS, some time each.
STOP_SECONDS = 60.0
_LISTEN_FILE, _GPU_PLAN_FILE = "listen.json", "gpu_plan.json"


class UnitActor:
    """Runs one unit's host on this node. Methods are called by Ray, several at once, from its threads.

    Args:
        unit_spec: the unit's spec as JSON; `run_dir` and `listen` are put in here.
        arguments: of the host's command line, besides the unit's file.
        host: this node's address, under which the others reach it; by default the one that Ray uses.
        command: what starts the host, if not `python -m muxserve.cluster.unit_host`.
        gpu_plan: what the host has to know of a unit on GPUs, as JSON.
        gpus: the GPUs of this node that the unit has, in words of CUDA_VISIBLE_DEVICES; by default those that Ray has
            given to the actor.
    """

    def __init__(
        self,
        unit_spec: bytes,
        arguments: list[str],
        host: str = "",
        command: list[str] | None = None,
        gpu_plan: bytes = b"",
        gpus: str = "",
    ) -> None:
        self._finished = threading.Event()
        self._hung = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._node = ""
        self._problem = ""
        self._note = ""
        # Tells this life of the actor from the one before a restart.
        self._life = f"{os.getpid()}-{time.time_ns()}"
        wanted = msgspec.json.decode(unit_spec, type=UnitSpec)
        try:
            if not host:
                host, self._node, gpus = _node()
            _check(wanted, host)
            # The last part of the controller's directory is the fleet's; short, since paths of sockets are.
            run_dir = default_base() / f"{Path(wanted.run_dir).parent.name[:8]}-{wanted.unit}"
            lock = _take(run_dir, STOP_SECONDS)
            self._unit_spec = _placed(wanted, run_dir, host)
            if gpu_plan:
                arguments = [*arguments, "--gpu-plan", str(_written(gpu_plan, run_dir / _GPU_PLAN_FILE))]
            program = command or [sys.executable, "-m", "muxserve.cluster.unit_host"]
            self._start(program, arguments, lock, _environment(gpus if gpu_plan else ""))
        except (OSError, ValueError, RunDirError, NetworkError) as error:
            # Ray would make a traceback of it, and the controller tells its user in words.
            self._unit_spec = wanted
            self._problem = str(error)

    # ------------------------------------------------------------ called by the controller

    def place(self) -> dict[str, Any]:
        """Where the unit is: this life of the actor, Ray's name of the node, the unit's spec as it is here; a problem
        in words if there is no unit, and a note if it is not as it should be."""
        return {
            "life": self._life,
            "node": self._node,
            "unit_spec": msgspec.json.encode(self._unit_spec).decode(),
            "problem": self._problem,
            "note": self._note,
        }

    def watch(self, seconds: float) -> dict[str, Any]:
        """How the host is, once it has ended or `seconds` have passed: the actor's life; `ended`, the host's return
        code or None; `hung`, why it was killed."""
        ended = None
        if self._problem:
            ended = 2
        elif self._process is not None and self._finished.wait(seconds):
            ended = self._process.returncode
        return {"life": self._life, "ended": ended, "hung": self._hung}

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End the unit, in order if that takes no longer than `seconds`, and remove its directory."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if not self._problem:
            shutil.rmtree(self._unit_spec.run_dir, ignore_errors=True)
            _forget_shared(self._unit_spec)

    # ------------------------------------------------------------ inside

    def _start(self, command: list[str], arguments: list[str], lock: int, environment: dict[str, str]) -> None:
        unit_spec = self._unit_spec
        unit_spec.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = Path(unit_spec.run_dir) / "unit.json"
        save(unit_spec, file)
        with (unit_spec.log_dir / "host.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--unit-spec", str(file), *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(lock,),
                # Its own group: a signal for the actor is none for the unit, which is told to stop in order.
                start_new_session=True,
            )
        os.close(lock)
        self._note = _usual_priority(self._process.pid)
        threading.Thread(target=self._collect, args=(self._process,), name="host", daemon=True).start()
        threading.Thread(target=self._end_if_hung, args=(self._process,), name="watchdog", daemon=True).start()

    def _collect(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._finished.set()

    def _end_if_hung(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a host that hangs; whoever starts the unit again learns of that as of any end."""
        watch = Watch(self._unit_spec.watchdog, self._unit_spec.run_dir)

        def found(finding: Finding[PartId]) -> None:
            if finding.state is Liveness.HUNG:
                self._hung = f"hung: no sign of life for {finding.silence:.0f} s"
                process.kill()

        watch.begin(HOST, process.pid, found, begun=False)
        while not self._finished.wait(watch.period):
            watch.look()


def _placed(unit_spec: UnitSpec, run_dir: Path, host: str) -> UnitSpec:
    """The spec with that directory and ports of this node, those of an earlier life where they are still free."""
    before = _listened(run_dir)
    ports = before if before and all(_is_free(host, port) for port in before) else [free_port(host) for _ in range(3)]
    (run_dir / _LISTEN_FILE).write_text(json.dumps(ports))
    return msgspec.structs.replace(unit_spec, run_dir=str(run_dir), listen=Listen(host, *ports))


def _take(run_dir: Path, seconds: float) -> int:
    """Make the directory ours and empty but for the ports; returns the lock's descriptor.

    The host has the lock, too: while it stops because its actor has died, the next actor waits. Where the host was
    killed as well, what it has left behind (an MPS server above all, which holds the GPUs) is ended here.

    Raises:
        ValueError: the host before has not ended in time.
    """
    claim(run_dir.parent)
    run_dir.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(lock)
                raise ValueError(
                    f"an earlier life of this unit on {socket.gethostname()} has not ended within {seconds:g} s; end "
                    f"the processes that use {run_dir} there"
                ) from None
            time.sleep(0.05)
    end_orphans(run_dir)
    for entry in run_dir.iterdir():
        if entry.name not in (LOCK, _LISTEN_FILE):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return lock


def _node() -> tuple[str, str, str]:
    """Address and Ray's name of this node, and the GPUs of it that this actor has."""
    import ray

    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    return str(ray.util.get_node_ip_address()), str(context.get_node_id()), ",".join(map(str, gpus))


def _listened(run_dir: Path) -> list[int]:
    with contextlib.suppress(OSError, ValueError):
        ports = json.loads((run_dir / _LISTEN_FILE).read_text())
        if isinstance(ports, list) and len(ports) == 3 and all(isinstance(port, int) for port in ports):
            return ports
    return []


def _is_free(host: str, port: int) -> bool:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((host, port))
    except OSError:
        return False
    return True


def _check(unit_spec: UnitSpec, host: str) -> None:
    """Whether this node has what the unit reads.

    Raises:
        ValueError: it has not; the message says what, where, and what to do.
    """
    for model in unit_spec.models:
        if not Path(model.path).is_dir():
            raise ValueError(
                f"{model.name}: {model.path} is no directory on node {socket.gethostname()} ({host}); checkpoints have "
                "to lie under the same path on every node that units may run on"
            )
    profile = "" if unit_spec.simulated is None else unit_spec.simulated.profile
    if profile and not Path(profile).is_file():
        raise ValueError(
            f"{profile} is no file on node {socket.gethostname()} ({host}); the profile of a simulated fleet has to be "
            "under the same path on every node that units may run on"
        )


def _forget_shared(unit_spec: UnitSpec) -> None:
    """Remove the file that a fleet's units share on this node, if it has no unit here any more."""
    device = unit_spec.shared_device
    if {device}.issuperset(device.parent.glob(f"{device.name.rpartition('-')[0]}-*")):
        device.unlink(missing_ok=True)


def _usual_priority(pid: int) -> str:
    """Give the host the priority of the node's raylet: Ray lets its workers, and so what they start, give way to
    everything else on the machine. Returns what to do if that is not allowed."""
    wanted = os.getpriority(os.PRIO_PROCESS, os.getppid())
    try:
        if os.getpriority(os.PRIO_PROCESS, pid) > wanted:
            os.setpriority(os.PRIO_PROCESS, pid, wanted)
    except PermissionError:
        return "on this node units give way to every other program; start Ray there with RAY_worker_niceness=0"
    except ProcessLookupError:
        pass  # it has ended, and says why itself
    return ""


def _environment(gpus: str) -> dict[str, str]:
    """Ours without what Ray sets for its workers and engines must not see: it limits OpenMP to the CPUs of the actor's
    own. The host sees the GPUs that the unit was given, also where Ray was told not to set that."""
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")}
    return kept | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})


def _written(data: bytes, path: Path) -> Path:
    path.write_bytes(data)
    return path
