"""The unit scheduler as a process: real sockets, a real memory manager, engines and gateways played by the test."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
import zmq

from muxserve import spec
from muxserve.memory import server
from muxserve.memory.client import MemoryClient
from muxserve.net.sockets import connect, new_keys, tcp_address
from muxserve.spec import Keys, Listen, UnitSpec
from muxserve.wire import (
    Abort,
    AnyMessage,
    Cancel,
    Degraded,
    Detached,
    EngineDown,
    EngineHello,
    EngineSuspect,
    GatewayDown,
    GatewayHello,
    HandOver,
    Lease,
    Lost,
    Message,
    Reset,
    Retire,
    Returned,
    Revive,
    SchedulerHello,
    StateReply,
    StateRequest,
    StepReport,
    Submit,
    Terminating,
    UnitHello,
    decode,
    encode,
)
from tests.support.patience import PATIENCE, until_ended
from tests.support.ports import free_port
from tests.support.requests import ASKED, asking, without
from tests.unit.support import REPLY_TO, model
from tests.unit.support import unit_spec as small_deployment

M = TypeVar("M", bound=Message)


class Peer:
    """A DEALER that the test plays."""

    def __init__(self, context: zmq.Context[Any], address: str, identity: str) -> None:
        self.identity = identity
        self.socket = context.socket(zmq.DEALER)
        self.socket.identity = identity.encode()
        self.socket.linger = 0
        self.socket.setsockopt(zmq.RECONNECT_IVL, 10)
        connect(self.socket, address)
        self.heard: list[Message] = []

    def say(self, message: Message) -> None:
        self.socket.send(encode(message))

    def hear(self, kind: type[M], seconds: float = PATIENCE) -> M:
        """The next message of that kind; others before it are kept in `heard`."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            if left <= 0 or not self.socket.poll(int(left * 1000) + 1):
                raise AssertionError(f"{self.identity} heard no {kind.__name__}, but {self.heard}")
            message = decode(self.socket.recv())
            self.heard.append(message)
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        self.socket.close()


class FakeEngine(Peer):
    """An engine that holds real blocks: prefill reserves them and hands them off, decode adopts them."""

    def __init__(self, context: zmq.Context[Any], deployed: UnitSpec, name: str, phase: str) -> None:
        super().__init__(context, deployed.unit_address, f"{name}/{phase}")
        self.model, self.phase = name, phase
        self.memory = MemoryClient(deployed.memory_socket, self.identity, PATIENCE)

    def greet(self, pid: int = 1) -> Reset:
        self.say(EngineHello(self.model, self.phase, pid))
        return self.hear(Reset)

    def prefill(self, lease: Lease, tokens: int = 20) -> list[str]:
        """Do what the lease says in one step; returns the hand-offs' keys."""
        handed = []
        for admit in lease.admit:
            blocks = self.memory.step(self.model, reserve=2).reserved
            key = f"{admit.request_id}#{admit.incarnation}"
            self.memory.hand_off(self.model, key, blocks, 60.0)
            handed.append(
                HandOver(
                    admit.request_id,
                    admit.incarnation,
                    key=key,
                    blocks=2,
                    computed_tokens=tokens,
                    output_tokens=[*admit.output_tokens, 7],
                )
            )
        self.say(
            StepReport(
                lease.lease_id, lease.steps - 1, seconds=0.001, tokens=tokens, running=0, waiting=0, handed=handed
            )
        )
        return [each.key for each in handed]

    def finish(self, lease: Lease) -> None:
        """Adopt, run one step, end everything."""
        for admit in lease.admit:
            self.memory.step(self.model, release=self.memory.adopt(self.model, admit.hand_off.key))
        finished = [admit.request_id for admit in lease.admit]
        self.say(
            StepReport(
                lease.lease_id,
                lease.steps - 1,
                seconds=0.001,
                tokens=len(finished),
                running=0,
                waiting=0,
                finished=finished,
            )
        )

    def close(self) -> None:
        super().close()
        self.memory.close()


class Unit:
    """A run directory with a memory manager, and a unit scheduler that can be killed and started."""

    def __init__(
        self, run_dir: Path, policy: str = "adbs", network: dict[str, Any] | None = None, **changes: Any
    ) -> None:
        self.unit_spec = small_deployment(
            model("a", **changes), model("b", **changes), policy=policy, run_dir=str(run_dir), **(network or {})
        )
        self.path = run_dir / "unit.json"
        spec.save(self.unit_spec, self.path)
        self.context: zmq.Context[Any] = zmq.Context()
        self.peers: list[Peer] = []
        self.manager = server.start(self.unit_spec)
        self.start()

    def start(self) -> None:
        self.log = open(Path(self.unit_spec.run_dir) / "unit.log", "ab")  # noqa: SIM115 - lives as long as the process
        command = [sys.executable, "-m", "muxserve.unit.scheduler", "--unit-spec", str(self.path), "--die-with-parent"]
        self.process = subprocess.Popen(command, stderr=self.log)

    def words(self) -> str:
        return (Path(self.unit_spec.run_dir) / "unit.log").read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()

    def restart_memory(self) -> None:
        self.manager.kill()
        self.manager.wait()
        self.manager = server.start(self.unit_spec)

    def peer(self, identity: str) -> Peer:
        made = Peer(self.context, self.unit_spec.unit_address, identity)
        self.peers.append(made)
        return made

    def gateway(self, epoch: str = "g1") -> Peer:
        made = self.peer(f"gateway/{epoch}")
        made.say(GatewayHello(epoch, REPLY_TO))
        made.hear(UnitHello)
        return made

    def engine(self, name: str, phase: str) -> FakeEngine:
        made = FakeEngine(self.context, self.unit_spec, name, phase)
        self.peers.append(made)
        made.greet()
        return made

    def state(self, asker: Peer) -> dict[str, Any]:
        asker.say(StateRequest())
        state: dict[str, Any] = asker.hear(StateReply).state
        return state

    def until(self, asker: Peer, wanted: Callable[[Any], bool], seconds: float = PATIENCE) -> Any:
        """Ask for the state until it is as wanted."""
        end = time.monotonic() + seconds
        while True:
            state = self.state(asker)
            if wanted(state):
                return state
            assert time.monotonic() < end, f"never as wanted: {state}"
            time.sleep(0.005)  # the state is not announced

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.context.term()
        if self.process.poll() is None:
            self.kill()
        self.log.close()
        self.manager.terminate()
        self.manager.wait()
        for stream in (self.manager.stdout, self.manager.stderr):
            if stream is not None:
                stream.close()


@contextmanager
def running(**changes: Any) -> Iterator[Unit]:
    with tempfile.TemporaryDirectory(prefix="mux-unit-") as run_dir:
        unit = Unit(Path(run_dir), **changes)
        try:
            yield unit
        finally:
            unit.close()


@pytest.fixture
def unit() -> Iterator[Unit]:
    with running() as made:
        yield made


def submit(request_id: str, name: str = "a", **changes: Any) -> Submit:
    values: dict[str, Any] = {"attempt": 0, "arrival": time.monotonic(), "body": b"opaque"} | changes
    return Submit(request_id, request=asking(name, **without(values, *ASKED)), **values)


def test_a_request_from_end_to_end(unit: Unit) -> None:
    gateway, prefill, decode_ = unit.gateway(), unit.engine("a", "prefill"), unit.engine("a", "decode")
    unit.until(gateway, lambda state: state["memory_connected"])
    gateway.say(submit("r", body=bytes(range(256))))
    lease = prefill.hear(Lease)
    assert lease.admit[0].body == bytes(range(256))
    prefill.prefill(lease)
    lease = decode_.hear(Lease)
    assert lease.admit[0].output_tokens == [7]
    state = unit.state(gateway)
    assert state["models"]["a"]["used_pages"] == 8
    decode_.finish(lease)
    state = unit.until(
        gateway, lambda state: state["models"]["a"]["used_pages"] == 0 and state["models"]["a"]["finished"] == 1
    )
    assert state["pools"]["main"]["free_pages"] == state["pools"]["main"]["total_pages"] == 1000
    assert state["budget_used"] == 0.0


def test_cancelling_while_handed_over_frees_the_pages(unit: Unit) -> None:
    gateway, prefill = unit.gateway(), unit.engine("a", "prefill")
    decode_ = unit.engine("a", "decode")
    unit.until(gateway, lambda state: state["memory_connected"])
    gateway.say(submit("r"))
    lease = prefill.hear(Lease)
    gateway.say(Cancel(["r"]))
    assert prefill.hear(Abort).request_ids == ["r"]
    prefill.prefill(lease)  # it had run already
    unit.until(gateway, lambda state: state["models"]["a"]["used_pages"] == 0)
    assert not [m for m in decode_.heard if isinstance(m, Lease)]


def test_kill_of_the_unit_scheduler(unit: Unit) -> None:
    gateway, prefill = unit.gateway(), unit.engine("a", "prefill")
    decode_ = unit.engine("a", "decode")
    unit.until(gateway, lambda state: state["memory_connected"])
    gateway.say(submit("r"))
    first = prefill.hear(Lease)
    unit.kill()
    unit.start()
    # Gateway and engines see that the connection is new, and greet.
    gateway.say(GatewayHello("g1", REPLY_TO))
    epoch = gateway.hear(UnitHello).epoch
    assert prefill.greet().epoch == epoch
    decode_.greet()
    unit.until(gateway, lambda state: state["memory_connected"])
    gateway.say(submit("r", attempt=1, output_tokens=[7, 8]))
    lease = prefill.hear(Lease)
    assert lease.lease_id > first.lease_id
    (admit,) = lease.admit
    assert (admit.attempt, admit.output_tokens) == (1, [7, 8])
    # A late word of the first life, whose ids can be told apart, changes nothing.
    prefill.say(StepReport(first.lease_id, 0, seconds=0.001, tokens=20, running=0, waiting=0, finished=["r"]))
    prefill.prefill(lease)
    decode_.finish(decode_.hear(Lease))
    unit.until(gateway, lambda state: state["models"]["a"]["finished"] == 1 and state["models"]["a"]["used_pages"] == 0)


def test_kill_of_the_memory_manager(unit: Unit) -> None:
    gateway, prefill = unit.gateway(), unit.engine("a", "prefill")
    unit.until(gateway, lambda state: state["memory_connected"])
    gateway.say(submit("waiting", "b"))
    decode_ = unit.engine("a", "decode")
    gateway.say(submit("handed"))
    lease = prefill.hear(Lease)
    decode_.close()
    unit.peers.remove(decode_)
    unit.peer("controller/1").say(EngineDown("a", "decode", "killed by signal 9"))
    unit.until(gateway, lambda state: not state["engines"]["a/decode"]["up"])
    prefill.prefill(lease)
    unit.until(gateway, lambda state: state["models"]["a"]["handed"] == 1)
    unit.restart_memory()
    lost = gateway.hear(Lost)
    assert lost.request_ids == ["handed"]
    state = unit.until(gateway, lambda state: state["memory_connected"])
    assert state["models"]["a"]["used_pages"] == 0
    assert state["models"]["b"]["queued"] == 1
    # The same models, the same sockets, a new memory manager: it goes on.
    prefill.memory.close()
    prefill.memory = MemoryClient(unit.unit_spec.memory_socket, prefill.identity, PATIENCE)
    decode_ = unit.engine("a", "decode")
    gateway.say(submit("handed", attempt=1))
    prefill.prefill(prefill.hear(Lease))
    decode_.finish(decode_.hear(Lease))
    unit.until(gateway, lambda state: state["models"]["a"]["finished"] == 1 and state["models"]["a"]["used_pages"] == 0)


def test_a_restarted_engine_takes_over_its_identity(unit: Unit) -> None:
    gateway = unit.gateway()
    old, decode_ = unit.engine("a", "prefill"), unit.engine("a", "decode")
    assert decode_.identity == "a/decode"
    unit.until(gateway, lambda state: state["memory_connected"])
    gateway.say(submit("r"))
    old.hear(Lease)
    new = unit.engine("a", "prefill")  # while the old one's connection is still there
    assert gateway.hear(Lost).request_ids == ["r"]
    gateway.say(submit("r", attempt=1))
    assert new.hear(Lease).admit[0].attempt == 1


def test_garbage_is_ignored(unit: Unit) -> None:
    gateway = unit.gateway()
    stranger = unit.peer("stranger")
    for frame in (b"", b"\x00", b"\xc1", os.urandom(2000), encode(UnitHello("x"))[:-1], b"\x81\xa1t\xa6Submit"):
        stranger.socket.send(frame)
    stranger.socket.send_multipart([b"too", b"many", b"frames"])
    nobody = unit.context.socket(zmq.DEALER)  # with an identity that ZeroMQ makes up, which is no text
    nobody.linger = 0
    connect(nobody, unit.unit_spec.unit_address)
    nobody.send(encode(EngineHello("a", "prefill", 1)))
    nobody.send(encode(StateRequest()))
    assert nobody.poll(PATIENCE * 1000)
    nobody.close()
    stranger.say(StateRequest())
    assert not stranger.hear(StateReply).state["engines"]["a/prefill"]["up"]  # type: ignore[index, call-overload]
    assert unit.state(gateway)["models"]["a"]["arrived"] == 0
    assert unit.process.poll() is None
    assert "none of ours" in unit.words()


def test_a_stranger_without_the_secret_changes_nothing(unit: Unit) -> None:
    gateway, prefill, decode_ = unit.gateway(), unit.engine("a", "prefill"), unit.engine("a", "decode")
    unit.until(gateway, lambda state: state["memory_connected"])
    gateway.say(submit("r"))
    lease = prefill.hear(Lease)
    # It speaks as the gateway, as the engine and as the controller, before and after the others have spoken.
    spoken: dict[str, list[Message]] = {
        "gateway/g1": [GatewayHello("g1", REPLY_TO), Cancel(["r"]), submit("s")],
        "a/prefill": [
            EngineHello("a", "prefill", 9),
            StepReport(lease.lease_id, 0, seconds=0.1, tokens=9, running=0, waiting=0, finished=["r"]),
        ],
        "controller/1": [EngineDown("a", "prefill", "says a stranger"), GatewayDown(0)],
    }
    strangers = []
    for identity, messages in spoken.items():
        stranger = unit.context.socket(zmq.DEALER)
        strangers.append(stranger)
        stranger.identity, stranger.linger = identity.encode(), 0
        for message in messages:
            with suppress(zmq.Again):
                stranger.send(encode(message), zmq.NOBLOCK)
        stranger.connect(unit.unit_spec.unit_address)
        for message in messages:
            with suppress(zmq.Again):
                stranger.send(encode(message), zmq.NOBLOCK)
    prefill.prefill(lease)
    decode_.finish(decode_.hear(Lease))
    state = unit.until(gateway, lambda state: state["models"]["a"]["finished"] == 1)
    assert state["models"]["a"]["arrived"] == 1
    assert state["models"]["a"]["cancelled"] == state["models"]["a"]["lost"] == 0
    assert state["engines"]["a/prefill"]["pid"] == 1
    assert not any(stranger.poll(0) for stranger in strangers)
    for stranger in strangers:
        stranger.close()


def test_impossible_messages_of_peers_with_the_secret_end_nothing(unit: Unit) -> None:
    """Every message of the protocol with random fields, under every identity, while real ones are served."""
    rng = random.Random(7)
    gateway, prefill, decode_ = unit.gateway(), unit.engine("a", "prefill"), unit.engine("a", "decode")
    other = unit.engine("b", "decode")
    unit.until(gateway, lambda state: state["memory_connected"])
    liars = [unit.peer(identity) for identity in ("gateway/liar", "migrator", "b/prefill", "scheduler/x", "x/y", "z")]
    kinds = sorted(get_args(AnyMessage), key=lambda kind: kind.__name__)
    # These say truly, by whoever has the secret, that something has ended or begins.
    kinds = [k for k in kinds if k not in (EngineDown, GatewayDown, Retire, GatewayHello, SchedulerHello, EngineHello)]
    kinds = [k for k in kinds if k not in (EngineSuspect, Degraded, Terminating, Revive)]
    for round_ in range(3):
        for liar in liars:
            for kind in kinds:
                liar.socket.send(msgspec.msgpack.encode(random_fields(rng, kind)))
        # An engine of another model speaks of requests and leases that it does not have.
        name = f"r{round_}"
        gateway.say(submit(name))
        lease = prefill.hear(Lease)
        (admit,) = lease.admit
        handed = HandOver(name, admit.incarnation, key="not there", blocks=2, computed_tokens=20, output_tokens=[1])
        for lease_id in (lease.lease_id, 1 << 62):
            more = {"finished": [name], "handed": [handed], "returned": [Returned(name, admit.incarnation, [1])]}
            other.say(StepReport(lease_id, 0, seconds=0.1, tokens=5, running=0, waiting=0, **more))
            other.say(
                Detached(name, admit.incarnation, "not there", since=0, blocks=[], computed_tokens=0, output_tokens=[])
            )
        prefill.prefill(lease)
        decode_.finish(decode_.hear(Lease))
        unit.until(gateway, lambda state, n=round_: state["models"]["a"]["finished"] == n + 1)  # type: ignore[misc]
    assert unit.process.poll() is None
    words = unit.words()
    assert "impossible StepReport from b/decode" in words
    # The same again is not said again at once: there were three rounds of as many lies.
    assert len(words.splitlines()) < len(kinds) * len(liars)


def random_fields(rng: random.Random, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """A message of that kind, most of whose fields have the right type."""

    def some(kind: Any) -> Any:
        origin, arguments = get_origin(kind), get_args(kind)
        if rng.random() < 0.03:
            return rng.choice([None, -1, "", [], {}, float("nan"), 1 << 63])
        if origin is Annotated:
            return some(arguments[0])
        if origin is Literal:
            return rng.choice(arguments)
        if origin in (Union, UnionType):
            return some(rng.choice(arguments))
        if origin is list:
            return [some(arguments[0]) for _ in range(rng.randrange(3))]
        if origin is tuple:
            return [some(each) for each in arguments if each is not Ellipsis]
        if origin is dict:
            return {rng.choice(["a", "b"]): some(arguments[1]) for _ in range(rng.randrange(3))}
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return fields_of(kind)
        simple: dict[Any, Any] = {
            int: rng.choice([0, 1, 5, 1 << 40]),
            float: rng.choice([0.0, 0.01, 1e9, -1.0]),
            bool: rng.random() < 0.5,
            bytes: rng.randbytes(4),
        }
        return simple.get(kind, rng.choice(["a", "b", "r0", "x", "decode"]))

    def fields_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
        return {name: some(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}

    return {"t": kind.__name__, **fields_of(kind)}


def test_sigterm_ends_it_cleanly(unit: Unit) -> None:
    gateway = unit.gateway()
    unit.until(gateway, lambda state: state["memory_connected"])
    unit.process.send_signal(signal.SIGTERM)
    assert unit.process.wait(PATIENCE) == 0
    # Nor does what it mapped outlive the interpreter, of which nanobind would tell.
    assert unit.words().splitlines()[-1].endswith("stopped")


def test_it_dies_with_its_parent() -> None:
    with tempfile.TemporaryDirectory(prefix="mux-unit-") as run_dir:
        path = Path(run_dir) / "unit.json"
        spec.save(small_deployment(run_dir=run_dir), path)
        # The parent waits until the unit scheduler listens, says its pid, and goes.
        code = (
            "import subprocess, sys, time, pathlib\n"
            "p = subprocess.Popen([sys.executable, '-m', 'muxserve.unit.scheduler', '--unit-spec', sys.argv[1],"
            " '--die-with-parent'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
            "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)\n"
            "print(p.pid)\n"
        )
        socket = Path(run_dir) / "unit.sock"
        command = [sys.executable, "-c", code, str(path), str(socket)]
        parent = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
        until_ended(int(parent.stdout), "the orphan")


def test_other_machines_reach_it_with_the_keys_of_the_fleet_only() -> None:
    keys, port = new_keys(), free_port()
    with running(network={"keys": keys, "listen": Listen("127.0.0.1", port, 1)}) as unit:
        local = unit.gateway("near")
        context: zmq.Context[Any] = zmq.Context()
        far: dict[str, zmq.Socket[bytes]] = {}
        for name, theirs in (("friend", keys), ("stranger", keys_of(new_keys(), keys))):
            socket = far[name] = context.socket(zmq.DEALER)
            socket.identity = f"gateway/{name}".encode()
            socket.linger = 0
            connect(socket, tcp_address("127.0.0.1", port), theirs)
            with suppress(zmq.Again):  # the stranger may have been turned away for good by now
                socket.send(encode(GatewayHello(name, "tcp://127.0.0.1:1", 1)), zmq.NOBLOCK)
        assert far["friend"].poll(int(PATIENCE * 1000))
        assert isinstance(decode(far["friend"].recv()), UnitHello)
        # Both have been known for equally long.
        assert not far["stranger"].poll(100)
        assert unit.state(local)["gateways"] == 2
        context.destroy(linger=0)


def keys_of(stranger: Keys, fleet: Keys) -> Keys:
    """Who knows the server, which is no secret, and has no key that it lets in."""
    return Keys(fleet.server_public, "", stranger.client_public, stranger.client_secret)


def test_an_address_that_is_not_this_machines_is_said_in_a_sentence() -> None:
    with tempfile.TemporaryDirectory(prefix="mux-unit-") as run_dir:
        made = small_deployment(run_dir=run_dir, keys=new_keys(), listen=Listen("192.0.2.1", 1, 1))
        path = Path(run_dir) / "unit.json"
        spec.save(made, path)
        command = [sys.executable, "-m", "muxserve.unit.scheduler", "--unit-spec", str(path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 3
    assert "no address of this machine" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("content", "words"), [(None, "No such file"), ("{", "not a unit's spec"), ('{"run_dir": 3}', "not a unit's spec")]
)
def test_bad_deployments_are_refused_without_a_traceback(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "unit.json"
    if content is not None:
        path.write_text(content)
    command = [sys.executable, "-m", "muxserve.unit.scheduler", "--unit-spec", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
