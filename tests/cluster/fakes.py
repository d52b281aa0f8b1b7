"""Stand-ins for the processes of a deployment: real processes that speak the controller's protocols and nothing else.

    python fakes.py mps|memory|unit|warm DEPLOYMENT [CONTROL_FD LIFELINE_FD]

Files in the run directory (or in $FAKES) change what they do: `die-KIND` (die at once), `fail-NAME` (say that they
cannot start), `slow-gateway` (seconds that draining takes). The gateway serves the fewest pages that `muxserve deploy`
wants. What they see and do is written to `journal`, one line each.
"""

from __future__ import annotations

import ctypes
import http.server
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

SELF = Path(__file__).resolve()


def main() -> None:
    kind, file = sys.argv[1:3]
    run_dir = Path(file).parent
    journal = Journal(run_dir)
    if told(run_dir, f"die-{kind}"):
        print(f"{kind} dies because the test says so", flush=True)
        sys.exit(7)
    if kind == "warm":
        Warm(file, run_dir, journal, int(sys.argv[3]), int(sys.argv[4])).run()
        return
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: (journal.write(f"stop {kind}"), os._exit(0)))
    if kind in ("memory", "mps"):
        if kind == "memory":
            from muxserve import deployment

            journal.write(f"memory has {deployment.load(file).pools[0].num_pages} pages")
        print("READY 1", flush=True)
        while True:
            signal.pause()
    unit(file, journal)


def told(run_dir: Path, name: str) -> Path | None:
    """The file of that name, if the test has made it."""
    places = [run_dir / name, Path(os.environ.get("FAKES", run_dir)) / name]
    return next((place for place in places if place.exists()), None)


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
        # A signal may be delivered to one of ZeroMQ's threads; Python's handler waits for this one to come back.
        if not sock.poll(20):
            continue
        identity, frame = sock.recv_multipart()
        message = wire.decode(frame)
        if isinstance(message, wire.StateRequest):
            sock.send_multipart([identity, wire.encode(wire.UnitState(state={"pid": os.getpid()}))])
        else:
            journal.write(f"unit got {type(message).__name__} {getattr(message, 'model', '')}".rstrip())


class Warm:
    def __init__(self, file: str, run_dir: Path, journal: Journal, control: int, lifeline: int) -> None:
        self.file = file
        self.run_dir, self.journal, self.lifeline = run_dir, journal, lifeline
        self.control = socket.socket(fileno=control)

    def event(self, event: str, **fields: Any) -> None:
        self.control.send(json.dumps({"event": event, **fields}).encode())

    def run(self) -> None:
        if told(self.run_dir, "fail-warm"):
            self.event("failed", kind="warm_parent", model="", phase="", error="no vLLM here")
            sys.exit(1)
        signal.signal(signal.SIGTERM, lambda *_: (self.journal.write("stop warm"), os._exit(0)))
        if os.fork() == 0:  # stands for a process that loads a model: nobody is told of it
            die_with_parent(signal.SIGKILL)
            while True:
                signal.pause()
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
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self.event("exited", pid=pid, status=os.waitstatus_to_exitcode(status))

    def fork(self, order: dict[str, Any]) -> None:
        who = {key: order[key] for key in ("kind", "model", "phase")}
        pid = os.fork()
        if pid:
            self.event("forked", pid=pid, **who)
            return
        name = order["kind"] if order["kind"] == "gateway" else f"{order['model']}-{order['phase'] or order['kind']}"
        if order["kind"] != "gateway":
            die_with_parent(signal.SIGKILL)
        if told(self.run_dir, f"fail-{name}"):
            self.event("failed", error="the weights are of cheese", **who)
            os._exit(1)
        if told(self.run_dir, f"die-{name}"):
            os._exit(9)
        signal.signal(signal.SIGTERM, lambda *_: self.leave(name))
        self.event("progress", detail="loading weights", **who)
        if name == "gateway":
            serve_pages(self.file)
        if order["kind"] == "weights" and not told(self.run_dir, "mute-weights"):
            figures = {"weights_bytes": 100, "activation_bytes": 20, "context_bytes": 3, "graph_bytes": 1}
            for rank in (0, 1):
                self.event("measured", kind="weights", model=order["model"], rank=rank, **figures)
        self.event("up", pid=os.getpid(), **who)
        if order["kind"] == "gateway":
            os.read(self.lifeline, 1)
            self.journal.write("gateway lost its controller")
            os._exit(0)
        while True:
            signal.pause()

    def leave(self, name: str) -> None:
        if name == "gateway":
            slow = told(self.run_dir, "slow-gateway")
            if slow:
                time.sleep(float(slow.read_text()))
        self.journal.write(f"stop {name}")
        os._exit(0)


def serve_pages(file: str) -> None:
    """`/health` and one streamed answer, in a thread of this process."""
    from muxserve import deployment

    gateway = deployment.load(file).gateway

    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(json.dumps({"status": "ok", "unit": "up", "models": {}}), "application/json")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            words = [f"{body['model']} was asked: ", body["messages"][0]["content"], "\x1b"]
            events = [{"choices": [{"delta": {"content": word}}]} for word in words]
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            self.answer("".join([*lines, "data: [DONE]\n\n"]), "text/event-stream")

        def answer(self, text: str, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((gateway.host, gateway.port), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()


if __name__ == "__main__":
    main()
