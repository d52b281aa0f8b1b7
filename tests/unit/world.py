"""Two units, their engines and migrators, and a gateway, on a virtual clock: everything but the pages.

Messages between two processes arrive in order; between different pairs in any order that the test draws. Processes die
and come back. Tokens of a request are 0, 1, 2, ..., so that the gateway can tell whether it got each of them once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.views import InstanceLoad
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policies import make_policy
from muxserve.scheduling.quarantine import is_suspect
from muxserve.scheduling.types import RequestPlace
from muxserve.spec import UnitSpec
from muxserve.unit.executor import UnitExecutor
from muxserve.wire import (
    Abort,
    Admit,
    Blocks,
    Cancel,
    Cause,
    Detach,
    Detached,
    Elsewhere,
    EngineDown,
    EngineHello,
    EngineLost,
    Failures,
    GatewayHello,
    HandOver,
    HeldRequests,
    Lease,
    Lost,
    Message,
    MigratorHello,
    MoveAbort,
    MoveCommit,
    MoveCommitted,
    MoveFailed,
    MoveStage,
    MoveStaged,
    Paired,
    Prefilled,
    RequestFailed,
    RequestTrace,
    Reset,
    RollingReport,
    SchedulerHello,
    ShowBlocks,
    ShowRequests,
    StepFailed,
    StepReport,
    Submit,
    TakenOver,
    TakeOver,
    TookOver,
    UnitHello,
    decode,
    encode,
)
from tests.support.requests import asking
from tests.unit.support import model, unit_spec

# Whatever runs is to move as soon as a pair is there.
RULES = MigrationRules(source_below=5000, destination_above=5000, in_flight=3)
BLOCK = 16
PROMPT = 20
GATEWAY = b"gateway/g1"
SCHEDULER = b"scheduler/1"


class Store:
    """A memory manager that knows hand-offs only."""

    def __init__(self) -> None:
        self.up = True
        self.connected = False
        self.keys: set[str] = set()

    def connect(self) -> bool:
        self.connected = self.up
        return self.up

    def alive(self) -> bool:
        return self.connected

    def hand_offs(self) -> dict[str, list[str]] | None:
        return {"a": sorted(self.keys)} if self.connected else None

    def read(self, ledger: UnitLedger) -> None:
        for each in ledger.models:
            each_used = 4 * sum(r.blocks for r in each.decoding.values())
            ledger.pages(each.name, each_used, 0, 1000)
        ledger.pool_pages("main", 1000 - sum(m.used for m in ledger.models), 0)

    def set_quotas(self, quotas: Mapping[str, int]) -> bool:
        return True

    def set_room(self, pages: Mapping[str, int]) -> bool:
        return True

    def drop(self, model: str, key: str) -> None:
        self.keys.discard(key)


@dataclass
class Running:
    admit: Admit
    tokens: list[int]
    prompt: int
    most: int
    # In an engine of both phases: it has its first token there.
    decodes: bool = False


class Engine:
    """One phase of model a in one unit, or both."""

    def __init__(self, world: World, unit: Unit, phase: str) -> None:
        self.world, self.unit, self.phase = world, unit, phase
        self.address = f"a/{phase}".encode()
        self.running: dict[str, Running] = {}
        self.lease, self.left = 0, 0
        self.doing = "both"
        self.alone = ""
        self.keys = 0
        self.pid = 0

    def hello(self) -> None:
        """It is a new process."""
        self.running, self.left, self.alone = {}, 0, ""
        self.pid += 1
        self.tell(EngineHello("a", self.phase, self.pid))

    def tell(self, message: Message) -> None:
        self.world.post(self.unit.address(self.address), self.unit, self.address, message)

    def report(self, seconds: float, tokens: int, **more: Any) -> None:
        self.tell(
            StepReport(
                self.lease, self.left, seconds=seconds, tokens=tokens, running=len(self.running), waiting=0, **more
            )
        )

    def hear(self, message: Message) -> None:
        match message:
            case Lease():
                self.lease, self.left, self.doing = message.lease_id, message.steps, message.phase
                for admit in message.admit:
                    if admit.hand_off is not None and admit.hand_off.key not in self.unit.store.keys:
                        self.tell(EngineLost([admit.request_id], "the blocks are gone"))
                        continue
                    if admit.hand_off is not None:
                        self.unit.store.keys.discard(admit.hand_off.key)
                    asked = self.world.asked[admit.request_id]
                    known = list(admit.output_tokens)
                    self.running[admit.request_id] = Running(admit, known, PROMPT, asked, admit.hand_off is not None)
                self.alone = message.alone
                if self.alone:
                    self.mind_alone()
                    self.report(0.0, 0, steps=0)
            case Abort():
                gone = [r for r in message.request_ids if self.abort(r, message)]
                if gone:
                    self.mind_alone()
                    self.report(0.0, 0, finished=gone, steps=0)
            case Reset():
                self.running, self.left, self.alone = {}, 0, ""
            case ShowRequests():
                there = [(r, each.admit.incarnation) for r, each in self.running.items()]
                self.tell(HeldRequests(self.lease, [r for r, _ in there], [i for _, i in there]))
            case ShowBlocks():
                found = self.find(message.request_id, message.incarnation)
                computed = found.prompt + len(found.tokens) - 1 if found else 0
                blocks = list(range(-(-computed // BLOCK)))[message.since :]
                self.tell(Blocks(message.request_id, message.incarnation, message.since, blocks, computed))
            case Detach():
                self.detach(message)
            case _:
                raise AssertionError(message)

    def abort(self, request_id: str, message: Abort) -> bool:
        there = self.running.get(request_id)
        named = dict(zip(message.request_ids, message.incarnations, strict=True)) if message.incarnations else None
        if there is None or (named is not None and named[request_id] != there.admit.incarnation):
            return False
        del self.running[request_id]
        return True

    def find(self, request_id: str, incarnation: int) -> Running | None:
        found = self.running.get(request_id)
        if found is None or found.admit.incarnation != incarnation or (self.phase == "both" and not found.decodes):
            return None
        return found

    def mind_alone(self, tell: bool = False) -> None:
        """The lease ends with the one request that it is for."""
        if self.alone and self.alone not in self.running:
            self.alone, self.left = "", 0
            if tell:
                self.report(0.0, 0, steps=0)

    def fail(self, batch: list[str], way: str) -> None:
        """A request in the batch is poison."""
        self.world.failures += 1
        if way == "crash":
            # What it has said arrives before anybody has seen it die.
            said = self.world.channels.get(self.unit.address(self.address), deque())
            while said:
                unit, peer, message = said.popleft()
                unit.hear(peer, message)
            self.world.kill(self.unit, self.phase, Cause.CRASH)
            return
        lives = [self.running.pop(request_id).admit.incarnation for request_id in batch]
        self.left, self.alone = 0, ""
        self.tell(StepFailed(batch, lives, "ValueError: poison"))

    def todo(self) -> list[str]:
        """What it works at under its lease."""
        if self.alone:
            return [self.alone]
        if self.phase != "both" or self.doing == "both":
            return list(self.running)
        return [r for r, each in self.running.items() if each.decodes is (self.doing == "decode")]

    def detach(self, ask: Detach) -> None:
        found = self.find(ask.request_id, ask.incarnation)
        if found is None:
            self.tell(
                Detached(
                    ask.request_id, ask.incarnation, "", since=ask.since, blocks=[], computed_tokens=0, output_tokens=[]
                )
            )
            return
        del self.running[ask.request_id]
        self.unit.store.keys.add(ask.key)
        computed = found.prompt + len(found.tokens) - 1
        blocks = list(range(-(-computed // BLOCK)))[ask.since :]
        self.tell(
            Detached(
                ask.request_id,
                ask.incarnation,
                ask.key,
                since=ask.since,
                blocks=blocks,
                computed_tokens=computed,
                output_tokens=found.tokens,
            )
        )
        self.mind_alone(tell=True)

    def step(self) -> None:
        todo = self.todo()
        if self.left <= 0 or not todo:
            return
        ways = [way for r in todo if (way := self.world.poisoned(r, len(self.running[r].tokens)))]
        if ways:
            self.fail(todo, ways[0])
            return
        self.left -= 1
        finished, handed, prefilled = [], [], []
        fresh = 0
        for request_id in todo:
            each = self.running[request_id]
            offset = len(each.tokens)
            each.tokens.append(offset)
            over = len(each.tokens) >= each.most
            self.world.tokens(request_id, each.admit, offset, over)
            if over:
                finished.append(request_id)
            elif self.phase == "prefill":
                self.keys += 1
                key = f"{request_id}:{self.unit.name}:{self.keys}"
                self.unit.store.keys.add(key)
                computed = each.prompt + len(each.tokens) - 1
                blocks = -(-computed // BLOCK)
                handed.append(
                    HandOver(
                        request_id,
                        each.admit.incarnation,
                        key=key,
                        blocks=blocks,
                        computed_tokens=computed,
                        output_tokens=each.tokens,
                    )
                )
            elif self.phase == "both" and not each.decodes:
                prefilled.append(Prefilled(request_id, each.admit.incarnation, list(each.tokens)))
            fresh += not each.decodes
            each.decodes = True
        for request_id in [*finished, *(h.request_id for h in handed)]:
            del self.running[request_id]
        self.mind_alone()
        more: dict[str, Any] = {}
        if self.phase == "both":
            alone = 0.002 if self.doing == "prefill" else 0.0
            more = {"prefilled": prefilled, "prefill_tokens": fresh, "prefill_seconds": alone}
        self.report(0.002, len(todo), finished=finished, handed=handed, **more)

    def forget(self) -> None:
        """Lose some of the requests without a word."""
        for request_id in list(self.running):
            if self.world.random.random() < 0.5:
                del self.running[request_id]
                self.world.forgotten += 1

    def memory_died(self) -> None:
        lost, self.running, self.left, self.alone = list(self.running), {}, 0, ""
        self.tell(EngineLost(lost, "the memory manager died"))


class Migrator:
    """The migrator of one unit: both directions, without pages. Messages between migrators are tuples."""

    def __init__(self, world: World, unit: Unit) -> None:
        self.world, self.unit = world, unit
        self.life = 0
        # Moves out, by id: committed or not. Moves in: the key when it was handed over.
        self.out: dict[str, bool] = {}
        self.arriving: dict[str, str] = {}
        self.stages: dict[str, int] = {}
        self.last: dict[str, MoveStage] = {}

    def hello(self) -> None:
        self.life += 1
        self.out, self.arriving, self.stages = {}, {}, {}
        self.tell(MigratorHello(f"{self.unit.name}{self.life}", 1))

    def tell(self, message: Message) -> None:
        self.world.post(self.unit.address(b"migrator"), self.unit, b"migrator", message)

    def peer(self, *what: Any) -> None:
        other = self.world.other(self.unit)
        self.world.post((self.unit.name, "peer", other.name), other, b"", what)

    def hear(self, message: Message) -> None:
        """Its unit scheduler."""
        match message:
            case Reset():
                for move, committed in list(self.out.items()):
                    self.fail(move, "unit", tell=False, peer=not committed)
                for move in list(self.arriving):
                    self.end_arrival(move, "its unit is new")
            case MoveStage():
                if message.since and message.move not in self.out:
                    self.tell(MoveFailed(message.move, "over"))
                    return
                assert message.since == self.stages.get(message.move, 0)
                self.out[message.move] = False
                self.last[message.move] = message
                self.peer("stage", message.move, self.life)
            case MoveCommit():
                if message.move not in self.out:
                    self.tell(MoveFailed(message.move, "over"))
                    return
                self.out[message.move] = True
                self.peer("commit", message.move, message.request)
            case MoveAbort():
                if self.out.get(message.move) is False:
                    self.fail(message.move, "aborted", tell=False)
            case TakenOver():
                if message.move in self.arriving:
                    if message.reason:
                        self.unit.store.drop("a", self.arriving.pop(message.move))
                        self.peer("refused", message.move, False)
                    else:
                        del self.arriving[message.move]
                        self.peer("committed", message.move)
            case _:
                raise AssertionError(message)

    def heard(self, what: tuple[Any, ...]) -> None:
        """The other migrator."""
        kind, move = what[0], what[1]
        match kind:
            case "stage":
                if self.world.random.random() < self.world.refusals:
                    self.peer("refused", move, False)
                    self.arriving.pop(move, None)
                else:
                    self.arriving.setdefault(move, "")
                    self.peer("staged", move)
            case "staged" if self.out.get(move) is False:
                stage = self.last[move]
                self.stages[move] = stage.since + len(stage.blocks)
                self.tell(MoveStaged(move, self.stages[move], 0.001, 1))
            case "commit":
                if move not in self.arriving or not self.unit.store.connected:
                    self.peer("refused", move, False)
                    return
                self.arriving[move] = move
                self.unit.store.keys.add(move)
                self.tell(TakeOver(move, move, 2, what[2]))
            case "committed" if move in self.out:
                del self.out[move]
                self.tell(MoveCommitted(move))
            case "refused" if move in self.out:
                self.fail(move, "refused", uncertain=what[2], peer=False)
            case "abort" if not self.arriving.get(move):
                self.arriving.pop(move, None)

    def fail(self, move: str, reason: str, uncertain: bool = False, tell: bool = True, peer: bool = True) -> None:
        del self.out[move]
        self.stages.pop(move, None)
        if peer:
            self.peer("abort", move)
        if tell:
            self.tell(MoveFailed(move, reason, uncertain))

    def end_arrival(self, move: str, reason: str) -> None:
        key = self.arriving.pop(move)
        if key:
            self.unit.store.drop("a", key)
        self.peer("refused", move, bool(key))

    def peer_died(self) -> None:
        for move, committed in list(self.out.items()):
            self.fail(move, "peer died", uncertain=committed, peer=False)
        for move, key in list(self.arriving.items()):
            if not key:
                del self.arriving[move]

    def memory_died(self) -> None:
        for move, committed in list(self.out.items()):
            if not committed:
                self.fail(move, "memory")
        for move, key in list(self.arriving.items()):
            if not key:
                self.end_arrival(move, "memory")


class Unit:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.policy = world.policy
        only = model("a", quota_pages=1000, shape=world.shape, rolling=world.policy == "rolling")
        self.unit_spec: UnitSpec = unit_spec(only, policy=self.policy, unit=name, migration=RULES)
        self.life = 0
        self.known: dict[str, bool] = {}
        self.known_of = ""
        self.store = Store()
        self.engines = {f"a/{phase}".encode(): Engine(world, self, phase) for phase in only.engines}
        self.migrator = Migrator(world, self)
        self.start()

    def start(self) -> None:
        self.life += 1
        self.store.connected = False
        self.scheduler = UnitExecutor(
            self.unit_spec, make_policy(self.policy), self.store, f"{self.life:016x}", self.world.now + self.life
        )

    def address(self, peer: bytes) -> tuple[str, str, str]:
        return (self.name, peer.decode(), "unit")

    def hear(self, peer: bytes, message: Message) -> None:
        self.scheduler.handle(peer, decode(encode(message)), self.world.now)
        self.turn()

    def turn(self) -> None:
        for peer, message in self.scheduler.tick(self.world.now):
            if isinstance(message, RollingReport):
                self.told(message)
            self.world.post((self.name, "unit", peer.decode()), self, peer, decode(encode(message)))

    def told(self, report: RollingReport) -> None:
        """Keep `known` as a global scheduler does: what the unit has, and which of it decodes."""
        if report.whole:
            self.known_of = report.epoch
            self.known = {each.request_id: each.prefilled for each in report.requests}
        else:
            for each in report.requests:
                assert each.request_id not in self.known
                self.known[each.request_id] = each.prefilled
            for request_id in report.prefilled:
                assert self.known[request_id] is False
                self.known[request_id] = True
            for request_id in report.left:
                del self.known[request_id]

    def check_known(self) -> None:
        waiting = (RequestPlace.QUEUED, RequestPlace.PREFILLING)
        assert self.known == {r: live.place not in waiting for r, live in self.scheduler.ledger.requests.items()}


@dataclass
class Client:
    unit: str
    attempt: int = 0
    most: int = 0
    got: dict[int, int] = field(default_factory=dict)
    over: bool = False
    moves: int = 0
    failures: Failures = field(default_factory=Failures)
    failed: str = ""


class World:
    """See above. `refusals` is how often a migrator refuses a stage; `policy` is that of the units and `shape` that
    of the model's engines; `traced` says whether units tell what requests went through."""

    def __init__(
        self, seed: int, refusals: float = 0.0, policy: str = "adbs", shape: str = "split", traced: bool = False
    ) -> None:
        self.traced = traced
        self.policy, self.shape = policy, shape
        self.random = random.Random(seed)
        self.refusals = refusals
        self.now = 100.0
        self.channels: dict[tuple[str, str, str], deque[tuple[Unit, bytes, Any]]] = {}
        self.asked: dict[str, int] = {}
        self.clients: dict[str, Client] = {}
        self.resubmitted = 0
        self.took_over = 0
        self.forgotten = 0
        # Requests that make their engine fail: how (`raise` or `crash`), and at which token; and how often they did.
        self.poison: dict[str, tuple[str, int]] = {}
        self.failures = 0
        # Deaths of engines that were heard after the greeting of the next one, for which nobody can be blamed.
        self.late = 0
        self.units = {name: Unit(self, name) for name in ("u0", "u1")}
        for unit in self.units.values():
            self.greet(unit)

    def other(self, unit: Unit) -> Unit:
        return self.units["u1" if unit.name == "u0" else "u0"]

    def post(self, channel: tuple[str, str, str], unit: Unit, peer: bytes, message: Any) -> None:
        self.channels.setdefault(channel, deque()).append((unit, peer, message))

    def greet(self, unit: Unit) -> None:
        self.to_unit(unit, GatewayHello("g1", "ipc:///g1"))
        self.post(unit.address(SCHEDULER), unit, SCHEDULER, SchedulerHello("s1"))
        for engine in unit.engines.values():
            engine.hello()
        unit.migrator.hello()

    def to_unit(self, unit: Unit, message: Message) -> None:
        self.post(unit.address(GATEWAY), unit, GATEWAY, message)

    # ------------------------------------------------------------ the gateway

    def submit(self, request_id: str, unit: str, most: int) -> None:
        self.asked[request_id] = most
        self.clients[request_id] = Client(unit, most=most)
        self._submit(request_id)

    def _submit(self, request_id: str) -> None:
        client = self.clients[request_id]
        known = [client.got[i] for i in range(len(client.got)) if i in client.got]
        client.got = dict(enumerate(known))
        self.to_unit(
            self.units[client.unit],
            Submit(
                request_id,
                attempt=client.attempt,
                request=asking("a", PROMPT, client.most, traced=self.traced),
                arrival=self.now,
                output_tokens=known,
                failures=client.failures,
            ),
        )

    def poisoned(self, request_id: str, tokens: int) -> str:
        way, at = self.poison.get(request_id, ("", 0))
        return way if tokens >= at else ""

    def again(self, request_id: str) -> None:
        client = self.clients[request_id]
        client.attempt += 1
        client.moves = 0
        if not is_suspect(client.failures):
            client.unit = self.random.choice(sorted(self.units))
        self.resubmitted += 1
        self._submit(request_id)

    def cancel(self, request_id: str) -> None:
        client = self.clients[request_id]
        if not client.over:
            client.over = True
            self.to_unit(self.units[client.unit], Cancel([request_id]))

    def tokens(self, request_id: str, admit: Admit, offset: int, over: bool) -> None:
        client = self.clients[request_id]
        if client.over or admit.attempt != client.attempt:
            return
        client.got[offset] = offset
        client.over = over

    def gateway_hears(self, unit: Unit, message: Message) -> None:
        match message:
            case RequestFailed():
                client = self.clients[message.request_id]
                if not client.over and client.unit == unit.name and client.attempt == message.attempt:
                    client.over, client.failed = True, message.message
            case Lost() | Elsewhere():
                for request_id, record in zip(message.request_ids, getattr(message, "failures", []), strict=False):
                    client = self.clients[request_id]
                    if client.unit == unit.name:
                        client.failures = record
                for request_id, attempt in zip(message.request_ids, message.attempts, strict=True):
                    client = self.clients[request_id]
                    if not client.over and client.unit == unit.name and client.attempt == attempt:
                        self.again(request_id)
            case TookOver():
                client = self.clients[message.request_id]
                if client.over or client.attempt != message.attempt:
                    # A later attempt at the same unit has ended the earlier one there.
                    if client.over or client.unit != unit.name:
                        self.to_unit(unit, Cancel([message.request_id]))
                elif message.moves > client.moves:
                    self.took_over += 1
                    client.unit, client.moves = unit.name, message.moves
            case RequestTrace():
                assert message.stages
                assert all(one.ago >= two.ago for one, two in pairwise(message.stages))
            case UnitHello():
                pass
            case _:
                raise AssertionError(message)

    # ------------------------------------------------------------ what happens

    def pair(self, source: str, destination: str) -> None:
        load = InstanceLoad("", 100_000_000, "a")
        message = Paired("a", destination, f"ipc:///{destination}", load)
        unit = self.units[source]
        self.post(unit.address(SCHEDULER), unit, SCHEDULER, message)

    def deliver(self) -> bool:
        """One message of a channel that is drawn; whether there was one."""
        ready = [name for name, queue in self.channels.items() if queue]
        if not ready:
            return False
        name = self.random.choice(ready)
        unit, peer, message = self.channels[name].popleft()
        self.now += self.random.choice([0.0, 0.0005, 0.002])
        if isinstance(message, tuple):
            unit.migrator.heard(message)
        elif name[2] == "unit":
            if isinstance(message, EngineDown):
                self.late += unit.scheduler.engines.pids.get(f"a/{message.phase}") != message.pid
            unit.hear(peer, message)
        elif peer == GATEWAY:
            self.gateway_hears(unit, message)
        elif peer == b"migrator":
            unit.migrator.hear(message)
        elif peer in unit.engines:
            unit.engines[peer].hear(message)
        return True

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for unit in self.units.values():
            unit.turn()
            for engine in unit.engines.values():
                engine.step()

    def drop_channels(self, *matching: str) -> None:
        """What a dead process had sent or was to hear is gone; each of `matching` is a unit's name, a colon, a peer."""
        for name, queue in self.channels.items():
            if any(f"{name[0]}:{part}" in matching for part in name[1:]):
                queue.clear()

    def run(self, most: int = 3000) -> None:
        for _ in range(most):
            if not self.deliver() or self.random.random() < 0.2:
                self.pass_time(self.random.choice([0.001, 0.003, 0.01]))
            if all(client.over for client in self.clients.values()):
                return

    def settle(self, seconds: float = 40.0) -> None:
        """Let everything come to its end."""
        end = self.now + seconds
        while self.now < end:
            for _ in range(400):
                if not self.deliver():
                    break
            self.pass_time(0.01 if any(not c.over for c in self.clients.values()) else 0.25)

    # ------------------------------------------------------------ deaths

    def kill(self, unit: Unit, what: str, cause: Cause = Cause.KILL) -> None:
        if what in ("prefill", "decode", "both"):
            engine = unit.engines[f"a/{what}".encode()]
            self.drop_channels(f"{unit.name}:a/{what}")
            # The controller starts another one only when it has told of the death; but what it said may arrive later.
            down = EngineDown("a", what, "killed", cause, engine.pid)
            self.post(unit.address(b"controller"), unit, b"controller", down)
            # What it had adopted is freed; what it had handed off stays.
            engine.hello()
        elif what == "some requests":
            for engine in unit.engines.values():
                engine.forget()
        elif what == "migrator":
            self.drop_channels(f"{unit.name}:migrator", f"{unit.name}:peer")
            # Hand-offs that were given to the unit stay with it; others were never made.
            self.other(unit).migrator.peer_died()
            self.channels.pop((self.other(unit).name, "peer", unit.name), None)
            unit.migrator.hello()
        elif what == "memory":
            unit.store.keys.clear()
            unit.store.connected = False
            for engine in unit.engines.values():
                engine.memory_died()
            unit.migrator.memory_died()
            unit.turn()
        elif what == "unit":
            self.drop_channels(f"{unit.name}:unit")
            unit.start()
            self.greet_again(unit)

    def greet_again(self, unit: Unit) -> None:
        self.to_unit(unit, GatewayHello("g1", "ipc:///g1"))
        self.post(unit.address(SCHEDULER), unit, SCHEDULER, SchedulerHello("s1"))
        for request_id, client in self.clients.items():
            if not client.over and client.unit == unit.name:
                self.again(request_id)
        for engine in unit.engines.values():
            engine.tell(EngineHello("a", engine.phase, engine.pid))
        unit.migrator.tell(MigratorHello(f"{unit.name}{unit.migrator.life}", 1))

    def check_end(self) -> None:
        """Every request was served whole, and nothing of any is left anywhere."""
        for request_id, client in self.clients.items():
            assert client.over, f"{request_id} hangs at {client.unit}, attempt {client.attempt}"
            assert sorted(client.got) == list(range(len(client.got)))
        for unit in self.units.values():
            request_table, ledger = unit.scheduler.request_table, unit.scheduler.ledger
            assert not request_table.held
            assert not request_table.traced
            assert not request_table.quarantine
            assert not request_table.quarantine._records
            assert not ledger.requests
            assert not unit.scheduler.moving.moves
            assert not unit.store.keys
            assert ledger.share_used == 0
            (each,) = ledger.models
            tally = each.tally
            ended = tally.finished + tally.cancelled + tally.lost + tally.moved_out + tally.given_back
            assert tally.arrived + tally.moved_in == ended
            for engine in unit.engines.values():
                assert not engine.running
            if self.policy == "rolling":
                unit.check_known()
