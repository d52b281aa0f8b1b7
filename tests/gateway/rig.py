"""The tests' side of a running gateway and its fake unit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from muxserve import spec
from muxserve.spec import FleetSpec, ModelSpec, UnitSpec
from tests.support import preloaded
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0

Event = dict[str, Any]


class Channel:
    """Sends commands to one process and collects its events, whether anyone waits for them or not."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.events: list[Event] = []
        self._changed = threading.Condition()
        self._gone = False
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, op: str, **fields: Any) -> None:
        self.ours.send(json.dumps({"op": op, **fields}).encode())

    def close(self) -> None:
        """Tell the process to end."""
        self.ours.shutdown(socket.SHUT_RDWR)

    def mark(self) -> int:
        """Where the events of now begin, for `wait`."""
        return len(self.events)

    def since(self, mark: int, event: str | None = None) -> list[Event]:
        """Events so far."""
        return [e for e in self.events[mark:] if event in (None, e["event"])]

    def wait(
        self, event: str, mark: int = 0, when: Callable[[Event], bool] = lambda _: True, seconds: float = PATIENCE
    ) -> Event:
        """The first such event at or after `mark`; waits for it."""
        at = mark

        def found() -> Event | None:
            nonlocal at
            for each in self.events[at:]:
                at += 1
                if each["event"] == event and when(each):
                    return each
            return None

        result: list[Event] = []
        with self._changed:
            came = self._changed.wait_for(lambda: self._keep(result, found()) or self._gone, seconds)
        if not result:
            why = f"no {event} within {seconds} s" if not came else f"the process ended without a {event}; see its log"
            raise AssertionError(f"{why}; there came {self.events[mark:]}")
        return result[0]

    @staticmethod
    def _keep(result: list[Event], found: Event | None) -> bool:
        if found is not None:
            result.append(found)
        return bool(result)

    def _read(self) -> None:
        while True:
            try:
                data = self.ours.recv(1 << 20)
            except OSError:
                data = b""
            with self._changed:
                if data:
                    self.events.append(json.loads(data))
                else:
                    self._gone = True
                self._changed.notify_all()
            if not data:
                return


class Rig:
    """A process family: spawner, fake unit, and gateways as they are asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.spawner = Channel()
        self.unit = Channel()
        fds = (self.spawner.theirs.fileno(), self.unit.theirs.fileno())
        log = (directory / "spawner.log").open("w")
        self.process = preloaded.start(
            [sys.executable, "-m", "tests.gateway.spawner", *map(str, fds), str(directory)],
            pass_fds=fds,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        log.close()
        self.spawner.theirs.close()
        self.unit.theirs.close()

    def ready(self) -> Event:
        """Wait until gateways can be forked."""
        return self.spawner.wait("ready", seconds=START_SECONDS)

    def serve(self, unit_spec: UnitSpec) -> None:
        """Start a unit unless there is one of that name."""
        path = self.directory / f"{unit_spec.unit}.json"
        spec.save(unit_spec, path)
        if not any(e["event"] == "serving" and e["unit"] == unit_spec.unit for e in self.unit.since(0)):
            self.unit.send("serve", unit_spec=str(path))
            self.unit.wait("serving", when=lambda e: e["unit"] == unit_spec.unit)

    def start(self, fleet: FleetSpec, index: int = 0, **environment: str) -> Running:
        """Start a gateway and the units that there are not yet."""
        for unit in fleet.units:
            self.serve(unit.unit_spec)
        spec.save_fleet(fleet)
        mark = self.spawner.mark()
        log = f"gateway-{Path(fleet.run_dir).name}-{index}.log"
        self.spawner.send("fork", fleet=str(fleet.file), index=index, log=log, environment=environment)
        pid = self.spawner.wait("forked", mark)["pid"]
        self.spawner.wait("up", mark, lambda e: e["pid"] == pid, START_SECONDS)
        return Running(self, fleet, pid, self.directory / log)

    def close(self) -> None:
        """End everything."""
        self.spawner.close()
        self.unit.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Running:
    """A running gateway."""

    def __init__(self, rig: Rig, fleet: FleetSpec, pid: int, log_file: Path) -> None:
        self.rig = rig
        self.fleet = fleet
        self.unit_spec = fleet.units[0].unit_spec
        self.pid = pid
        self.log_file = log_file
        self.url = f"http://127.0.0.1:{fleet.gateway.port}"

    @property
    def log(self) -> str:
        """What it wrote so far."""
        return self.log_file.read_text()

    def change(self, fleet: FleetSpec) -> None:
        """Let it know that the fleet is another; units that there are not yet are started."""
        for unit in fleet.units:
            self.rig.serve(unit.unit_spec)
        spec.save_fleet(fleet)
        self.fleet = fleet
        self.signal()

    def signal(self) -> None:
        """Let it look at the fleet's file again."""
        os.kill(self.pid, signal.SIGHUP)

    def mark(self) -> int:
        """Where the unit's events of now begin. All that it has told by now is there: what is read late, as on a busy
        machine, would be taken for something that came after the mark."""
        before = self.rig.unit.mark()
        self.tell_unit("sync")
        self.wait("synced", before)
        return self.rig.unit.mark()

    def wait(self, event: str, mark: int = 0, when: Callable[[Event], bool] = lambda _: True) -> Event:
        """An event of this gateway's unit."""
        return self.rig.unit.wait(event, mark, lambda e: e["unit"] == self.unit_spec.unit and when(e))

    def events(self, mark: int, event: str) -> list[Event]:
        """Events so far of this gateway's unit, all that it has told by now."""
        self.mark()
        return [e for e in self.rig.unit.since(mark, event) if e["unit"] == self.unit_spec.unit]

    def tell_unit(self, op: str, **fields: Any) -> None:
        """Command the fake unit."""
        self.rig.unit.send(op, unit=self.unit_spec.unit, **fields)

    def engines(self, **up: bool) -> None:
        """Set which models' engines the unit reports as up; all others are."""
        state = unit_state(self.unit_spec, up)
        mark = self.mark()
        self.tell_unit("state", state=state)
        self.wait("state_set", mark)

    def terminate(self) -> None:
        """Ask it to drain."""
        os.kill(self.pid, signal.SIGTERM)

    def cut_lifeline(self) -> None:
        """Do as if the controller had died."""
        self.rig.spawner.send("cut", pid=self.pid)

    def exit_status(self) -> int:
        """Wait for its end."""
        status = self.rig.spawner.wait("exited", when=lambda e: e["pid"] == self.pid)["status"]
        assert isinstance(status, int)
        return status


LEARNT = {"factors": [2.0, 2.0, 2.0], "ratio": 2.25, "error": 0.05, "steps": 123}


def unit_state(unit_spec: UnitSpec, up: dict[str, bool]) -> dict[str, Any]:
    """A unit's state in the shape that the unit scheduler gives it."""
    phase = {
        "jobs": 7,
        "tokens": 70,
        "busy_seconds": 0.5,
        "lease_waits": 1,
        "lease_wait_seconds": 0.01,
        "share": 0.5,
    }
    return {
        "policy": unit_spec.policy,
        "epoch": "unit",
        "models": {
            model.name: {
                "queued": 2,
                "prefilling": 0,
                "handed": 0,
                "decoding": 1,
                "finished": 3,
                "returned": 0,
                "lost": 0,
                "quota_pages": model.quota_pages,
                "used_pages": 12,
                "cached_pages": 4,
                "phases": dict.fromkeys(model.engines, phase),
                "costs": {"decode": LEARNT},
                **({"phase_switches": 5, "phase_switch_seconds": 0.75, "bubbles": [0.25, 1.5]} if both(model) else {}),
            }
            for model in unit_spec.models
        },
        "pools": {pool.name: {"total_pages": pool.num_pages, "free_pages": 100} for pool in unit_spec.pools},
        "engines": {
            f"{model.name}/{name}": {"up": up.get(model.name, True), "pid": 1}
            for model in unit_spec.models
            for name in model.engines
        },
    }


def both(model: ModelSpec) -> bool:
    """Whether one engine does both phases."""
    return model.engines == ("both",)
