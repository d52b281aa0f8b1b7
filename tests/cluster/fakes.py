"""Stand-ins for the processes of a fleet: real processes that speak the controller's protocols and nothing else.

    python fakes.py mps|memory|unit|migrator DEPLOYMENT
    python fakes.py warm DEPLOYMENT --control-fd FD
    python fakes.py vllm FLEET --control-fd FD --lifeline-fd FD
    python fakes.py scheduler FLEET

Files in the unit's or the fleet's directory (or in $FAKES) change what they do: `die-KIND` (die at once), `fail-NAME`
(say that they cannot start), `slow-gateway` (draining lasts as long as it is there), `linger` (the scheduler never says
that a replica is drained), `busy` (so many requests are in the unit), `mute` (the unit scheduler does not say how it
stands), `beat` (unit scheduler, parents and engines show by heartbeats that they live), `keep-weights` (weights are
kept when they are loaded), `fail-restore`, `hang-restore` (weights cannot be copied back), `restless-NAME` (an engine
says nothing when it is to rest), `fail-wake-NAME` (one that rests cannot come back), `deaf-gateway` (gateways go by the
fleet file as it was for as long as it is there), `refuse-MODEL` (gateways cannot offer that model).
The first gateway serves the fewest pages that `muxserve deploy` wants. What they see and do is written to `journal` in
the fleet's directory, one line each. Lines in `orders` there are sent to the controller by the scheduler.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

SELF = Path(__file__).resolve()


def main() -> None:
    kind, file = sys.argv[1:3]
    fleet = kind in ("vllm", "scheduler")
    journal = Journal(Path(file).parent if fleet else Path(file).parent.parent)
    run_dir = Path(file).parent
    if told(run_dir, f"die-{kind}"):
        print(f"{kind} dies because the test says so", flush=True)
        sys.exit(7)
    if kind == "vllm":
        Vllm(file, journal, descriptor("control"), descriptor("lifeline")).run()
        return
    if kind == "warm":
        Warm(file, journal, descriptor("control")).run()
        return
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: (journal.write(f"stop {kind}"), os._exit(0)))
    if kind in ("memory", "mps"):
        if kind == "memory":
            journal.write(f"memory has {read(file)['pools'][0]['num_pages']} pages")
        print("READY 1", flush=True)
        while True:
            signal.pause()
    if kind == "migrator":
        listen(os.path.join(read(file)["run_dir"], "migrator.sock"))
    if kind == "scheduler":
        scheduler(file, journal)
    unit(file, journal)


def descriptor(name: str) -> int:
    return int(sys.argv[sys.argv.index(f"--{name}-fd") + 1])


def read(file: str) -> Any:
    """A deployment, without the modules that know what it is: most of what a test starts should start quickly."""
    return json.loads(Path(file).read_text())


def listen(path: str) -> None:
    Path(path).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        while True:
            signal.pause()


def told(run_dir: Path, name: str) -> Path | None:
    """The file of that name, if the test has made it."""
    places = [run_dir / name, run_dir.parent / name, Path(os.environ.get("FAKES", run_dir)) / name]
    return next((place for place in places if place.exists()), None)


class Journal:
    def __init__(self, run_dir: Path) -> None:
        self.fd = os.open(run_dir / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, line: str) -> None:
        os.write(self.fd, f"{line}\n".encode())


def die_with_parent(number: int) -> None:
    ctypes.CDLL(None).prctl(1, number)


def fork_bound() -> int:
    """As `os.fork`. The child ends with this process, also if that has ended before the child could ask for it."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    return pid


def beating(run_dir: Path, name: str) -> Callable[[], None]:
    """What beats for a process, if the test wants heartbeats."""
    if not told(run_dir, "beat"):
        return lambda: None
    from muxserve.net.heartbeat import Heartbeat, heartbeat_file

    return Heartbeat(heartbeat_file(run_dir, name)).beat


def unit(file: str, journal: Journal) -> None:
    import zmq

    from muxserve import wire
    from muxserve.net import sockets

    unit_spec = read(file)
    name = unit_spec["unit"]
    address = Path(unit_spec["run_dir"]) / "unit.sock"
    address.unlink(missing_ok=True)
    sock = zmq.Context().socket(zmq.ROUTER)
    sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
    sockets.bind_local(sock, f"ipc://{address}")
    beat = beating(Path(file).parent, "unit")
    while True:
        beat()
        # A signal may be delivered to one of ZeroMQ's threads; Python's handler waits for this one to come back.
        if not sock.poll(20):
            continue
        identity, frame = sock.recv_multipart()
        message = wire.decode(frame)
        if isinstance(message, wire.StateRequest):
            if told(Path(file).parent, "mute"):
                journal.write(f"{name} does not answer")
                continue
            busy = told(Path(file).parent, "busy")
            count = int(busy.read_text()) if busy else 0
            models = {model["name"]: {"decoding": count} for model in unit_spec["models"]}
            state = {"pid": os.getpid(), "models": models}
            sock.send_multipart([identity, wire.encode(wire.StateReply(state=state))])
        else:
            about = getattr(message, "model", getattr(message, "gateway", ""))
            journal.write(f"{name} got {type(message).__name__} {about}")
            if isinstance(message, wire.Degraded):
                journal.write(f"{name} has degraded {message.model}: {message.reason}")
            if isinstance(message, wire.EngineDown):
                journal.write(f"{name} lost {message.model}/{message.phase}: {message.cause or 'nothing'}")


def scheduler(file: str, journal: Journal) -> None:
    import zmq

    from muxserve import spec, wire
    from muxserve.net import sockets

    fleet = spec.load_fleet(file)
    journal.write("scheduler starts")
    signal.signal(signal.SIGHUP, lambda *_: journal.write(f"scheduler {seen(file)}"))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
    sock = zmq.Context().socket(zmq.ROUTER)
    sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
    sockets.bind_local(sock, fleet.scheduler_address)
    orders, greeted = Path(fleet.run_dir) / "orders", False
    while True:
        # Before it has greeted, there is no way to the controller.
        if greeted and orders.exists():
            lines = orders.read_text().splitlines()
            orders.unlink()
            for line in lines:
                kind, *words = line.split()
                started = kind == "start"
                order = wire.StartReplicas(words[0], int(words[1])) if started else wire.StopReplica(*words)
                sock.send_multipart([b"controller", wire.encode(order)])
        if not sock.poll(20):
            continue
        identity, frame = sock.recv_multipart()
        message = wire.decode(frame)
        greeted |= identity == b"controller"
        journal.write(f"scheduler got {type(message).__name__} from {identity.decode()}")
        if isinstance(message, wire.StartFailed):
            journal.write(f"start of {message.model} failed: {message.reason}")
        if isinstance(message, wire.DrainReplicas) and not told(Path(fleet.run_dir), "linger"):
            for model in message.models:
                sock.send_multipart([identity, wire.encode(wire.StopReplica(model, message.unit))])


def seen(file: str) -> str:
    """What the fleet's file says."""
    fleet = read(file)
    units = " ".join(f"{unit['unit_spec']['unit']}={','.join(unit['serves'])}" for unit in fleet["units"])
    return f"sees {','.join(model['name'] for model in fleet['models'])} in {units}"


def live(run_dir: Path, name: str) -> NoReturn:
    """Beat until somebody ends this process."""
    beat = beating(run_dir, name)
    while True:
        beat()
        time.sleep(0.02)


class Parent:
    """What both forking parents have."""

    name: str

    def __init__(self, file: str, journal: Journal, control: int) -> None:
        self.file = file
        self.run_dir, self.journal = Path(file).parent, journal
        self.control = socket.socket(fileno=control)

    def event(self, event: str, **fields: Any) -> None:
        self.control.send(json.dumps({"event": event, **fields}).encode())

    def serve(self) -> None:
        beat = beating(self.run_dir, self.name)
        self.event("ready")
        while True:
            beat()
            readable = select.select([self.control], [], [], 0.01)[0]
            self.reap()
            if not readable:
                continue
            data, fds, _, _ = socket.recv_fds(self.control, 65536, 4)
            if not data:
                return
            order = json.loads(data)
            if order["op"] == "fork":
                self.fork(order, fds)
            else:
                self.journal.write(f"{order['op']} {order['model']}")
                self.obey(order)
            for fd in fds:
                os.close(fd)

    def fork(self, order: dict[str, Any], fds: list[int]) -> None:
        raise NotImplementedError

    def obey(self, order: dict[str, Any]) -> None:
        """An order that is not for a fork."""

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.event("exited", pid=pid, status=os.waitstatus_to_exitcode(status))


class Vllm(Parent):
    name = "vllm"

    def __init__(self, file: str, journal: Journal, control: int, lifeline: int) -> None:
        super().__init__(file, journal, control)
        self.lifeline = lifeline

    def run(self) -> None:
        if told(self.run_dir, "fail-vllm"):
            self.event("failed", kind="vllm", error="no vLLM here")
            sys.exit(1)
        signal.signal(signal.SIGTERM, lambda *_: (self.journal.write("stop vllm"), os._exit(0)))
        self.serve()

    def fork(self, order: dict[str, Any], fds: list[int]) -> None:
        who = {key: order[key] for key in ("kind", "unit", "index")}
        if order["kind"] == "spare" and told(self.run_dir, "no-spare"):
            return
        pid = os.fork()
        if pid:
            self.event("forked", pid=pid, **who)
            return
        if order["kind"] == "spare":
            self.control.close()
            Vllm(self.file, self.journal, fds[0], self.lifeline).be_spare("the spare vllm serves")
        if order["kind"] == "warm_parent":
            os.setpgid(0, 0)
            self.control.close()
            os.close(self.lifeline)
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            Warm(order["unit_spec"], self.journal, fds[0]).run()
            os._exit(0)
        name = f"gateway-{order['index']}"
        if told(self.run_dir, f"fail-{name}"):
            self.event("failed", error="the weights are of cheese", **who)
            os._exit(1)
        if told(self.run_dir, f"die-{name}"):
            os._exit(9)
        signal.signal(signal.SIGTERM, lambda *_: self.leave(name))
        signal.signal(signal.SIGHUP, lambda *_: (self.follow(name), self.journal.write(f"{name} {seen(self.file)}")))
        self.follow(name)
        if not order["index"]:
            serve_pages(self.file)
        self.event("up", pid=os.getpid(), **who)
        os.read(self.lifeline, 1)
        self.journal.write(f"{name} lost its controller")
        os._exit(0)

    def be_spare(self, words: str) -> NoReturn:
        """Wait until it is to serve, and say so then in the journal."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        beat = beating(self.run_dir, "spare")
        while not select.select([self.control], [], [], 0.01)[0]:
            beat()
        if self.control.recv(4096) and not told(self.run_dir, "die-vllm"):
            self.journal.write(words)
            self.run()
        os._exit(7)

    def follow(self, name: str) -> None:
        """Go by the fleet's file as it is now, and say so."""
        end = time.monotonic() + 600
        while told(self.run_dir, "deaf-gateway") and time.monotonic() < end:
            time.sleep(0.02)
        fleet = read(self.file)
        names = [model["name"] for model in fleet["models"]]
        refused = {each: "its tokenizer is of cheese" for each in names if told(self.run_dir, f"refuse-{each}")}
        versions, candidates = fleet.get("versions", {}), fleet.get("candidates", ())
        retired = [n for n in names if versions.get(n.split("@")[0], n) != n and n not in candidates]
        offers: dict[str, dict[str, str]] = {each: {} for each in names if each not in [*refused, *retired]}
        followed = {"pid": os.getpid(), "generation": fleet["generation"], "offers": offers, "refused": refused}
        followed["leaving"] = [each for each in retired if told(self.run_dir, f"in-use-{each}")]
        (new := self.run_dir / f"{name}.new").write_text(json.dumps(followed))
        new.replace(self.run_dir / f"{name}.json")

    def leave(self, name: str) -> None:
        end = time.monotonic() + 600
        while told(self.run_dir, "slow-gateway") and time.monotonic() < end:
            time.sleep(0.02)
        self.journal.write(f"stop {name}")
        os._exit(0)


class Warm(Parent):
    name = "warm_parent"

    def __init__(self, file: str, journal: Journal, control: int) -> None:
        super().__init__(file, journal, control)
        # Where engines are forked from processes that have loaded their models.
        self.model_parents: dict[str, int] = {}
        # By model and phase: pid, orders, and whether it rests.
        self.engines: dict[tuple[str, str], tuple[int, socket.socket, bool]] = {}
        # What copies weights back: pid and orders.
        self.copier: tuple[int, socket.socket] | None = None

    def run(self) -> None:
        if told(self.run_dir, "fail-warm"):
            self.event("failed", kind="warm_parent", error="no room here")
            sys.exit(1)
        signal.signal(signal.SIGTERM, lambda *_: (self.journal.write("stop warm"), os._exit(0)))
        if fork_bound() == 0:  # stands for a process that loads a model: nobody is told of it
            while True:
                signal.pause()
        self.serve()

    def obey(self, order: dict[str, Any]) -> None:
        operation, model = order["op"], order["model"]
        if operation == "rest":
            pid, orders, _ = self.engines[model, order["phase"]]
            orders.send(b"rest")
            self.engines[model, order["phase"]] = pid, orders, True
        elif operation == "pin":
            self.tell_copier(f"pin {model}")
        elif operation == "end":
            pid = self.model_parents.pop(model, None)
            if pid is not None:
                os.kill(pid, signal.SIGTERM)

    def load(self, model: str) -> None:
        """Have a process that stands for one that has loaded the model, if there is none."""
        pid = self.model_parents.get(model)
        if pid is not None and Path(f"/proc/{pid}").exists():
            return
        pid = fork_bound()
        if pid == 0:
            live(self.run_dir, f"model-{model}")
        self.model_parents[model] = pid
        self.event("forked", kind="model", model=model, phase="", pid=pid)

    def fork_spare(self, order: dict[str, Any], fds: list[int]) -> None:
        if told(self.run_dir.parent, "no-spare-of-a-unit"):
            self.event("failed", kind="spare", error="not here")
            return
        pid = os.fork()
        if pid:
            self.event("forked", kind="spare", pid=pid)
            return
        os.setpgid(0, 0)
        self.control.close()
        Vllm(order["fleet"], self.journal, *fds).be_spare("the spare of a unit serves")

    def fork(self, order: dict[str, Any], fds: list[int]) -> None:
        if order["kind"] == "spare":
            self.fork_spare(order, fds)
            return
        if told(self.run_dir, "model-parents"):
            self.load(order["model"])
        who = {key: order[key] for key in ("kind", "model", "phase")}
        if order.get("weights") == "restore":
            self.event("forked", pid=self.tell_copier(f"restore {order['model']}"), **who)
            return
        pid, orders, rests = self.engines.get((order["model"], order["phase"]), (0, None, False))
        if orders is not None and rests:
            try:
                orders.send(b"wake")
            except OSError:
                pass
            else:
                self.engines[order["model"], order["phase"]] = pid, orders, False
                self.event("forked", pid=pid, **who)
                return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = fork_bound()
        if pid:
            theirs.close()
            self.engines[order["model"], order["phase"]] = pid, ours, False
            self.event("forked", pid=pid, **who)
            return
        ours.close()
        name = f"{order['model']}-{order['phase'] or order['kind']}"
        if told(self.run_dir, f"fail-{name}"):
            self.event("failed", error="the weights are of cheese", **who)
            os._exit(1)
        if broken := told(self.run_dir, f"die-{name}"):
            with (self.run_dir / "logs" / f"engine-{name}.log").open("a") as log:
                log.write(broken.read_text())
            os._exit(9)
        signal.signal(signal.SIGTERM, lambda *_: (self.journal.write(f"stop {name}"), os._exit(0)))
        self.event("progress", detail="loading weights", **who)
        if order["kind"] == "weights" and not told(self.run_dir, "mute-weights"):
            figures = {
                "weights_bytes": 100,
                "activation_bytes": 20,
                "context_bytes": 3,
                "graph_bytes": 1,
                "engine_count": 2,
            }
            for rank in (0, 1):
                self.event("measured", kind="weights", model=order["model"], rank=rank, **figures)
        kept = order["kind"] == "weights" and bool(told(self.run_dir, "keep-weights"))
        if kept:
            self.keep_weights(order["model"], order.get("weights", ""))
        self.event("up", pid=os.getpid(), kept=kept, **who)
        beat = beating(self.run_dir, f"engine-{order['model']}-{order['phase']}")
        while True:
            beat()
            if not select.select([theirs], [], [], 0.02)[0]:
                continue
            said = theirs.recv(64)
            if not said:
                signal.pause()  # the parent has died, and the kernel ends this process
            elif said == b"rest" and not told(self.run_dir, f"restless-{name}"):
                self.journal.write(f"{name} rests")
                self.event("rests", **who)
            elif said == b"wake":
                if told(self.run_dir, f"fail-wake-{name}"):
                    self.event("failed", error="the weights are of cheese", **who)
                    os._exit(1)
                self.journal.write(f"{name} is back")
                self.event("up", pid=os.getpid(), kept=False, **who)

    def tell_copier(self, order: str) -> int:
        if self.copier is not None:
            try:
                self.copier[1].send(order.encode())
                return self.copier[0]
            except OSError:
                pass
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = fork_bound()
        if pid:
            theirs.close()
            ours.send(order.encode())
            self.copier = pid, ours
            return pid
        ours.close()
        signal.signal(signal.SIGTERM, lambda *_: (self.journal.write("stop copier"), os._exit(0)))
        while True:
            what, _, model = theirs.recv(64).decode().partition(" ")
            self.journal.write(f"copier: {what} {model}")
            if what != "restore":
                continue
            who = {"kind": "weights", "model": model, "phase": ""}
            if told(self.run_dir, "fail-restore"):
                self.event("failed", error="the copy is of cheese", **who)
                os._exit(1)
            self.event("progress", detail="copying weights back", **who)
            while told(self.run_dir, "hang-restore"):
                time.sleep(0.02)
            self.keep_weights(model, "restore")
            self.event("up", pid=os.getpid(), kept=True, **who)

    def keep_weights(self, model: str, source: str) -> None:
        """Hand a piece of memory over, as who loads weights does, on each rank; with a copy, or made of one, if that is
        asked for."""
        from muxserve import spec
        from muxserve.gpu import weight_wire as wire

        unit_spec = spec.load(str(Path(self.run_dir) / "unit.json"))
        for rank in range(unit_spec.ranks):
            path, fingerprint, data = unit_spec.weights_socket(model, rank), {"rank": str(rank)}, model.encode()
            if source == "restore":
                copy, (file,) = wire.fetch_copy(path)
                fingerprint, data = copy.fingerprint, os.pread(file, 100, 0)
            held = wire.Weights("GPU", [wire.Allocation("vmm", b"cuda-vmm:GPU:3:0", 3)], [], {})
            fds = [os.memfd_create("weights") for _ in range(2 if source == "copy" else 1)]
            for fd in fds:
                os.write(fd, data)
            wire.say(path, wire.Keep(fingerprint, held, source == "copy"), fds)


def serve_pages(file: str) -> None:
    """`/health` and one streamed answer, in a thread of this process."""
    import http.server

    gateway = read(file)["gateway"]

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

    class Server(http.server.ThreadingHTTPServer):
        allow_reuse_port = True

    server = Server((gateway["host"], gateway["port"]), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()


if __name__ == "__main__":
    main()
