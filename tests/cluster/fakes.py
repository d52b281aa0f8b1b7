"""Stand-ins for the processes of a deployment: real processes that speak the controller's protocols and nothing else.

    python fakes.py memory|unit|warm DEPLOYMENT [CONTROL_FD LIFELINE_FD]

Files in the run directory change what they do: `die-KIND` (die at once), `fail-NAME` (say that they cannot start),
`slow-gateway` (seconds that draining takes). What they see and do is written to `journal`, one line each.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

SELF = Path(__file__).resolve()


def main() -> None:
    kind, file = sys.argv[1:3]
    run_dir = Path(file).parent
    journal = Journal(run_dir)
    if (run_dir / f"die-{kind}").exists():
        print(f"{kind} dies because the test says so", flush=True)
        sys.exit(7)
    if kind == "warm":
        Warm(run_dir, journal, int(sys.argv[3]), int(sys.argv[4])).run()
        return
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: (journal.write(f"stop {kind}"), os._exit(0)))
    if kind == "memory":
        print("READY 1", flush=True)
        while True:
            signal.pause()
    unit(file, journal)


class Journal:
    def __init__(self, run_dir: Path) -> None:
        self.fd = os.open(run_dir / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, line: str) -> None:
        os.write(self.fd, f"{line}\n".encode())


def die_with_parent(number: int) -> None:
    ctypes.CDLL(None).prctl(1, number)


def unit(file: str, journal: Journal) -> None:
    import zmq

    from muxserve import deployment, wire

    sock = zmq.Context().socket(zmq.ROUTER)
    sock.bind(deployment.load(file).unit_address)
    while True:
        identity, frame = sock.recv_multipart()
        message = wire.decode(frame)
        if isinstance(message, wire.StateRequest):
            sock.send_multipart([identity, wire.encode(wire.UnitState(state={"pid": os.getpid()}))])
        else:
            journal.write(f"unit got {type(message).__name__} {getattr(message, 'model', '')}".rstrip())


class Warm:
    def __init__(self, run_dir: Path, journal: Journal, control: int, lifeline: int) -> None:
        self.run_dir, self.journal, self.lifeline = run_dir, journal, lifeline
        self.control = socket.socket(fileno=control)
        self.children: set[int] = set()

    def event(self, event: str, **fields: Any) -> None:
        self.control.send(json.dumps({"event": event, **fields}).encode())

    def run(self) -> None:
        if (self.run_dir / "fail-warm").exists():
            self.event("failed", kind="warm_parent", model="", phase="", error="no vLLM here")
            sys.exit(1)
        signal.signal(signal.SIGTERM, lambda *_: (self.journal.write("stop warm"), os._exit(0)))
        self.event("ready")
        while True:
            readable = select.select([self.control], [], [], 0.01)[0]
            self.reap()
            if not readable:
                continue
            data = self.control.recv(65536)
            if not data:
                return
            self.fork(json.loads(data))

    def reap(self) -> None:
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self.children.discard(pid)
            self.event("exited", pid=pid, status=os.waitstatus_to_exitcode(status))

    def fork(self, order: dict[str, Any]) -> None:
        who = {key: order[key] for key in ("kind", "model", "phase")}
        pid = os.fork()
        if pid:
            self.children.add(pid)
            self.event("forked", pid=pid, **who)
            return
        name = order["kind"] if order["kind"] == "gateway" else f"{order['model']}-{order['phase']}"
        if order["kind"] != "gateway":
            die_with_parent(signal.SIGKILL)
        if (self.run_dir / f"fail-{name}").exists():
            self.event("failed", error="the weights are of cheese", **who)
            os._exit(1)
        if (self.run_dir / f"die-{name}").exists():
            os._exit(9)
        signal.signal(signal.SIGTERM, lambda *_: self.leave(name))
        self.event("progress", detail="loading weights", **who)
        self.event("up", pid=os.getpid(), **who)
        if order["kind"] == "gateway":
            os.read(self.lifeline, 1)
            self.journal.write("gateway lost its controller")
            os._exit(0)
        while True:
            signal.pause()

    def leave(self, name: str) -> None:
        if name == "gateway":
            slow = self.run_dir / "slow-gateway"
            if slow.exists():
                time.sleep(float(slow.read_text()))
        self.journal.write(f"stop {name}")
        os._exit(0)


if __name__ == "__main__":
    main()
