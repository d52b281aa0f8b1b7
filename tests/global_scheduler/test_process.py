"""The global scheduler as a process: real sockets; units, gateways and the controller are played by the test."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import zmq

from muxserve.net import sockets
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.views import InstanceLoad
from muxserve.rolling.rules import RollingRules
from muxserve.spec import FleetSpec, load_fleet, save_fleet
from muxserve.wire import (
    ControllerHello,
    DrainReplicas,
    Loads,
    Message,
    Paired,
    Placed,
    RollingReport,
    RollingRequest,
    SchedulerHello,
    StateReply,
    StateRequest,
    StopReplica,
    Terminating,
    Waits,
    decode,
    encode,
)
from tests.global_scheduler.support import CAPACITY, fleet, load, place
from tests.support.patience import PATIENCE, eventually
from tests.support.ports import free_port

M = TypeVar("M", bound=Message)


class Client:
    """A gateway or the controller."""

    def __init__(self, running: Running, address: str, identity: str) -> None:
        self.running = running
        self.socket = running.context.socket(zmq.DEALER)
        self.socket.identity = identity.encode()
        self.socket.linger = 0
        self.socket.setsockopt(zmq.RECONNECT_IVL, 10)
        sockets.connect(self.socket, address)

    def say(self, message: Message) -> None:
        self.socket.send(encode(message))

    def hear(self, kind: type[M]) -> M:
        """The next message of that kind."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            # On a busy machine a wait may be as long as a unit may be silent.
            self.running.beat()
            if self.socket.poll(500) and isinstance(message := decode(self.socket.recv()), kind):
                return message
        raise AssertionError(f"no {kind.__name__}")

    def asks(self, request_id: str, **more: Any) -> str:
        """Where a request goes, once all that units have said has arrived: it comes on other connections."""
        self.running.beat()
        for unit in self.running.units:
            if unit.last is not None:
                self.running.says(f"unit {unit.name} is up")
        self.say(place(request_id, **more))
        placed = self.hear(Placed)
        assert placed.request_id == request_id
        return placed.unit


class FakeUnit:
    """A unit scheduler's ROUTER."""

    def __init__(self, context: zmq.Context[Any], deployed: FleetSpec, name: str) -> None:
        self.name = name
        self.socket = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        entry = deployed.unit(name)
        if entry.remote:
            assert entry.unit_spec.listen is not None
            assert deployed.keys is not None
            sockets.bind_tcp(self.socket, entry.unit_spec.listen.host, entry.unit_spec.listen.unit_port, deployed.keys)
        else:
            Path(entry.unit_spec.run_dir).mkdir(exist_ok=True)
            sockets.bind_local(self.socket, entry.unit_address)
        self.scheduler = b""
        self.last: list[bytes] | None = None

    def hear(self, kind: type[M]) -> M:
        end = time.monotonic() + PATIENCE
        while (left := end - time.monotonic()) > 0 and self.socket.poll(int(left * 1000) + 1):
            self.scheduler, frame = self.socket.recv_multipart()
            message = decode(frame)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"unit {self.name} heard no {kind.__name__}")

    def report(self, *loads: InstanceLoad, epoch: str = "e1") -> None:
        self.last = [self.scheduler, encode(Loads(self.name, epoch, list(loads)))]
        self.socket.send_multipart(self.last)

    def roll(self, epoch: str = "e1", **what: Any) -> None:
        self.socket.send_multipart([self.scheduler, encode(RollingReport(self.name, epoch, "m", **what))])

    def greeted(self, *loads: InstanceLoad, epoch: str = "e1") -> str:
        """Wait for the greeting and answer it; returns the global scheduler's epoch."""
        hello = self.hear(SchedulerHello)
        assert self.scheduler == f"scheduler/{hello.epoch}".encode()
        self.report(*loads, epoch=epoch)
        return hello.epoch

    def die(self) -> None:
        self.last = None
        self.socket.close()


class Running:
    """A fleet directory, the process, and everyone around it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.log = run_dir / "scheduler.log"
        self.context: zmq.Context[Any] = zmq.Context()
        self.process: subprocess.Popen[bytes] | None = None
        self.fleet: FleetSpec | None = None
        self.units: list[FakeUnit] = []

    def write(self, units: dict[str, list[str]], **changes: Any) -> FleetSpec:
        self.fleet = fleet(units, run_dir=str(self.run_dir), **changes)
        save_fleet(self.fleet)
        return self.fleet

    def start(self) -> None:
        assert self.fleet is not None
        command = [sys.executable, "-m", "muxserve.global_scheduler.process", "--fleet", str(self.fleet.file)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*command, "--die-with-parent"], stderr=log)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait(timeout=PATIENCE), self.log.read_text()

    def says(self, words: str) -> None:
        """Wait until it has said so."""
        eventually(lambda: words in self.log.read_text(), f"it says {words!r}")

    def client(self, identity: str) -> Client:
        assert self.fleet is not None
        return Client(self, self.fleet.scheduler_address, identity)

    def unit(self, name: str) -> FakeUnit:
        assert self.fleet is not None
        made = FakeUnit(self.context, self.fleet, name)
        self.units.append(made)
        return made

    def beat(self) -> None:
        """Every unit says again what it said last."""
        for unit in self.units:
            if unit.last is not None:
                unit.socket.send_multipart(unit.last)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.context.destroy(linger=0)


@pytest.fixture
def running() -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="mux-gs-") as run_dir:
        made = Running(Path(run_dir))
        try:
            yield made
        finally:
            made.close()


TWO = {"u0": ["m"], "u1": ["m"]}


def test_gateways_ask_units_report_and_it_ends_when_told(running: Running) -> None:
    running.write(TWO, migration=MigrationRules())
    u0, u1 = running.unit("u0"), running.unit("u1")
    running.start()
    g0, g1 = running.client("gateway/a"), running.client("gateway/b")
    u0.greeted(load(used=CAPACITY, running=5))
    u1.greeted(load())
    assert u0.hear(Paired).destination == "u1"
    assert g0.asks("r") == g1.asks("r") == "u1"
    # What nobody understands disturbs nobody.
    g0.socket.send(b"\xc1")
    g0.socket.send_multipart([b"a", b"b", b"c"])
    g0.say(SchedulerHello("g"))
    u1.socket.send_multipart([u1.scheduler, b"\xc1"])
    assert g0.asks("s") == "u1"
    code, words = running.stop()
    assert code == 0, words
    assert "Traceback" not in words


def test_killed_and_started_again_it_rebuilds_its_view_from_the_units(running: Running) -> None:
    running.write(TWO, migration=MigrationRules())
    u0, u1 = running.unit("u0"), running.unit("u1")
    running.start()
    gateway, controller = running.client("gateway/a"), running.client("controller")
    controller.say(ControllerHello())
    first = u0.greeted(load(used=CAPACITY, running=5))
    u1.greeted(load())
    assert gateway.asks("r") == "u1"
    running.stop(signal.SIGKILL)
    running.start()
    # The gateways ask again; the answer comes as soon as one unit has reported.
    gateway.say(place("s"))
    second = u1.greeted(load())
    assert second != first
    assert gateway.hear(Placed) == Placed("s", "u1")
    u0.greeted(load(used=CAPACITY, running=5))
    assert u0.hear(Paired).destination == "u1"
    # A replica that was being drained still is.
    controller.say(ControllerHello())
    controller.say(DrainReplicas("u0", ["m"]))
    assert u0.hear(Terminating) == Terminating("m", True)
    u0.report(load(terminating=True))
    assert controller.hear(StopReplica) == StopReplica("m", "u0")


def test_a_rolling_model_is_known_again_by_what_units_report(running: Running) -> None:
    rules = RollingRules(ttft=0.1, tpot=0.01, prefill=((1, 0.001), (1000, 1.0)))
    running.write(TWO, rolling={"m": rules})
    u0, u1 = running.unit("u0"), running.unit("u1")
    running.start()
    assert running.process is not None
    gateway = running.client("gateway/a")
    gateway.say(place("r", demand=61, arrival=time.monotonic() + 60))
    assert gateway.hear(Waits) == Waits("r")
    for unit in (u0, u1):
        unit.hear(SchedulerHello)
        unit.roll(whole=True)
        unit.report(load())
    first = gateway.hear(Placed).unit
    later = time.monotonic() + 3600  # of which nothing becomes overdue
    assert gateway.asks("s", demand=61, arrival=later) != first
    running.stop(signal.SIGKILL)
    running.start()
    # What units have counts, although nobody has placed it.
    for unit in (u0, u1):
        unit.hear(SchedulerHello)
        requests = [RollingRequest("r", 60, 8)] if unit.name == first else []
        unit.roll(whole=True, requests=requests)
        unit.report(load(waiting=len(requests)))
    until(gateway, lambda units: units["u0"]["up"] and units["u1"]["up"])
    assert gateway.asks("s", demand=61, arrival=later) != first
    # Rules that cannot be kept are not taken over, nor anything else of that file.
    running.write({**TWO, "u2": ["m"]}, rolling={"m": msgspec.structs.replace(rules, upper=4)}, generation=2)
    running.process.send_signal(signal.SIGHUP)
    assert gateway.asks("t", demand=11, arrival=later) != first
    until(gateway, lambda units: set(units) == {"u0", "u1"})
    code, words = running.stop()
    assert code == 0
    assert "N_u" in words
    assert "Traceback" not in words


def test_a_unit_that_dies_gets_nothing_from_then_on(running: Running) -> None:
    running.write(TWO)
    u0, u1 = running.unit("u0"), running.unit("u1")
    running.start()
    gateway = running.client("gateway/a")
    u0.greeted(load())
    u1.greeted(load(used=9_000, running=9))
    until(gateway, lambda units: units["u0"]["up"] and units["u1"]["up"])
    assert gateway.asks("r") == "u0"
    u0.die()
    until(gateway, lambda units: not units["u0"]["up"])
    assert gateway.asks("s") == "u1"
    u0 = running.unit("u0")
    u0.greeted(load(), epoch="e2")
    until(gateway, lambda units: units["u0"] == {"up": True, "epoch": "e2"})
    assert gateway.asks("t") == "u0"


def until(client: Client, wanted: Any) -> None:
    """Ask for the state until its units are as wanted."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        client.say(StateRequest())
        units: Any = client.hear(StateReply).state["units"]
        if wanted(units):
            return
    raise AssertionError(f"never as wanted: {units}")


def test_the_fleet_file_is_read_again(running: Running) -> None:
    deployed = running.write({"u0": ["m"]})
    u0 = running.unit("u0")
    running.start()
    assert running.process is not None
    gateway = running.client("gateway/a")
    u0.greeted(load(used=9_000, running=9))
    assert gateway.asks("r") == "u0"
    # A file that is none changes nothing.
    deployed.file.write_text("{")
    running.process.send_signal(signal.SIGHUP)
    running.says("going on with the one before")
    assert gateway.asks("s") == "u0"
    running.write({**TWO, "u2": ["n"]}, generation=2)
    running.process.send_signal(signal.SIGHUP)
    running.unit("u1").greeted(load())
    running.unit("u2").greeted(load("n"))
    until(gateway, lambda units: len(units) == 3 and all(unit["up"] for unit in units.values()))
    assert gateway.asks("t") == "u1"
    assert gateway.asks("u", name="n") == "u2"
    running.write({"u0": ["m"]}, generation=3)
    running.process.send_signal(signal.SIGHUP)
    until(gateway, lambda units: len(units) == 1)
    assert gateway.asks("v") == "u0"
    code, words = running.stop()
    assert code == 0, words
    assert "fleet file 3" in words


def test_units_of_other_machines_are_reached_with_keys(running: Running) -> None:
    deployed = running.write({"u0": ["m"]}, hosts={"u0": "127.0.0.1"}, keys=sockets.new_keys())
    deployed.file.write_text(deployed.file.read_text().replace("7001", str(free_port())))
    running.fleet = load_fleet(deployed.file)
    u0 = running.unit("u0")
    running.start()
    gateway = running.client("gateway/a")
    u0.greeted(load())
    assert gateway.asks("r") == "u0"


def test_it_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'vllm', 'transformers', 'numpy', 'pydantic'}"
    code = f"import muxserve.global_scheduler.process, sys; print({heavy} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "set()"


@pytest.mark.parametrize(("content", "words"), [(None, "No such file"), ("{}", "not a fleet")])
def test_a_file_that_is_no_fleet_is_told_without_a_traceback(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "fleet.json"
    if content is not None:
        path.write_text(content)
    command = [sys.executable, "-m", "muxserve.global_scheduler.process", "--fleet", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_address_that_cannot_be_bound_is_told_without_a_traceback(running: Running) -> None:
    deployed = running.write(TWO)
    text = deployed.file.read_text()
    path = running.run_dir / "other.json"
    path.write_text(text.replace(f'"run_dir": "{running.run_dir}"', '"run_dir": "/nowhere/at/all"'))
    command = [sys.executable, "-m", "muxserve.global_scheduler.process", "--fleet", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 3
    assert "cannot listen on ipc:///nowhere/at/all/scheduler.sock" in ended.stderr
    assert "Traceback" not in ended.stderr
