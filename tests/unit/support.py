"""A deployment, a memory manager that only counts, and an executor with its peers played by the test."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

from muxserve.net.inbox import ImpossibleMessageError
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policies import make_policy
from muxserve.spec import ModelSpec, PoolSpec, UnitSpec
from muxserve.unit.executor import UnitExecutor
from muxserve.wire import Admit, EngineHello, GatewayHello, HandOver, Lease, Message, StepReport, Submit, decode, encode
from tests.support.requests import ASKED, asking, without
from tests.support.unit_specs import model_spec, unit_spec_of

M = TypeVar("M", bound=Message)
Sent = list[tuple[bytes, Message]]

GATEWAY = b"gateway/g1"
REPLY_TO = "ipc:///nowhere/gateway.sock"


def model(name: str, **changes: Any) -> ModelSpec:
    small: dict[str, Any] = {
        "path": f"/models/{name}",
        "block_tokens": 16,
        "quota_pages": 400,
        "floor_pages": 100,
        "max_len": 400,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return model_spec(name, **{**small, **changes})


def unit_spec(
    *models: ModelSpec, policy: str = "adbs", run_dir: str = "/nowhere", unit: str = "unit", **more: Any
) -> UnitSpec:
    pool = PoolSpec("main", 2 * 16 * 64 * 4, 1001)
    return unit_spec_of(run_dir, models or [model("a"), model("b")], pool, unit=unit, policy=policy, **more)


class FakeMemory:
    """Remembers what it is told. `up` is whether a manager is there to connect to."""

    def __init__(self) -> None:
        self.up = True
        self.connected = False
        self.used: dict[str, int] = {}
        self.quotas: dict[str, int] = {"a": 400, "b": 400}
        self.room: dict[str, int] = {}
        self.set: list[dict[str, int]] = []
        self.dropped: list[tuple[str, str]] = []
        self.asked = 0
        self.waiting: dict[str, list[str]] = {}

    def die(self, up: bool = False) -> None:
        """The manager dies; with `up`, another one is there at once."""
        self.up = up
        self.connected = False

    def connect(self) -> bool:
        self.connected = self.up
        return self.up

    def alive(self) -> bool:
        self.asked += 1
        self.connected = self.connected and self.up
        return self.connected

    def join(self, unit_spec: UnitSpec) -> None:
        for each in unit_spec.models:
            self.quotas.setdefault(each.name, 0)

    def hand_offs(self) -> dict[str, list[str]] | None:
        return dict(self.waiting) if self.alive() else None

    def read(self, ledger: UnitLedger) -> None:
        free = 1000 - sum(self.used.values())
        for each in ledger.models:
            ledger.pages(each.name, self.used.get(each.name, 0), 0, self.quotas[each.name])
        room = self.room.get("main", 1001) - 1
        ledger.pool_pages("main", max(0, free - (1000 - room)), 0, room, room + 1)

    def set_room(self, pages: Mapping[str, int]) -> bool:
        self.room |= pages
        return True

    def set_quotas(self, quotas: Mapping[str, int]) -> bool:
        self.set.append(dict(quotas))
        self.quotas |= quotas
        return True

    def drop(self, model: str, key: str) -> None:
        self.dropped.append((model, key))


class Bench:
    """An executor, a clock that the test moves, and the peers' side of the messages."""

    def __init__(self, *models: ModelSpec, policy: str = "adbs", up: bool = True, **more: Any) -> None:
        self.now = 1000.0
        self.memory = FakeMemory()
        self.unit_spec = unit_spec(*models, policy=policy, **more)
        self.memory.quotas = {m.name: m.quota_pages for m in self.unit_spec.models}
        # What the unit's file says when it is read again.
        self.planned = self.unit_spec
        self.unit = UnitExecutor(
            self.unit_spec,
            make_policy(policy),
            self.memory,
            "unit-1",
            self.now,
            planned=lambda: self.planned,
        )
        self.sent: Sent = []
        if up:
            self.say(GATEWAY, GatewayHello("g1", REPLY_TO))
            for each in self.unit_spec.models:
                for phase in each.engines:
                    self.say(f"{each.name}/{phase}".encode(), EngineHello(each.name, phase, 100))
            self.sent.clear()

    def say(self, peer: bytes, message: Message, after: float = 0.001) -> Sent:
        """The peer says something; returns what the unit sends in the same turn."""
        self.now += after
        # Through the wire's encoding, so that what cannot be sent cannot pass a test.
        with suppress(ImpossibleMessageError):
            self.unit.handle(peer, decode(encode(message)), self.now)
        return self.turn()

    def turn(self, after: float = 0.0) -> Sent:
        self.now += after
        sent = [(peer, decode(encode(message))) for peer, message in self.unit.tick(self.now)]
        self.sent += sent
        return sent

    def submit(
        self, request_id: str, model: str = "a", prompt: int = 20, gateway: bytes = GATEWAY, **more: Any
    ) -> Sent:
        values: dict[str, Any] = {"attempt": 0, "arrival": self.now, "body": request_id.encode()} | more
        request = asking(model, prompt, **without(values, *ASKED))
        return self.say(gateway, Submit(request_id, request=request, **values))

    def lease(self, engine: str) -> Lease:
        """The last lease sent to that engine."""
        return [m for peer, m in self.sent if peer == engine.encode() and isinstance(m, Lease)][-1]

    def admitted(self, engine: str) -> list[Admit]:
        return [a for peer, m in self.sent if peer == engine.encode() and isinstance(m, Lease) for a in m.admit]

    def report(self, engine: str, left: int | None = None, after: float = 0.001, **more: Any) -> Sent:
        """The engine reports a step under its last lease."""
        lease = self.lease(engine)
        values: dict[str, Any] = {"seconds": 0.002, "tokens": 1, "running": 1, "waiting": 0}
        left = lease.steps - 1 if left is None else left
        return self.say(engine.encode(), StepReport(lease.lease_id, left, **{**values, **more}), after)

    def hand_over(self, request_id: str, model: str = "a", tokens: tuple[int, ...] = (7,)) -> Sent:
        """The prefill engine is done with the request."""
        (admit,) = [a for a in self.admitted(f"{model}/prefill") if a.request_id == request_id][-1:]
        handed = HandOver(
            request_id,
            admit.incarnation,
            key=f"key-{request_id}-{admit.incarnation}",
            blocks=2,
            computed_tokens=20,
            output_tokens=list(tokens),
        )
        return self.report(f"{model}/prefill", handed=[handed], tokens=20, running=0)

    def decoding(self, request_id: str, model: str = "a", **more: Any) -> Admit:
        """Bring a request into the decode engine."""
        self.submit(request_id, model, **more)
        self.hand_over(request_id, model)
        return self.admitted(f"{model}/decode")[-1]

    def state(self) -> dict[str, Any]:
        return self.unit.state(self.now)


def to(peer: bytes | str, kind: type[M], messages: Sent) -> list[M]:
    """The messages of that kind to that peer."""
    address = peer.encode() if isinstance(peer, str) else peer
    return [m for p, m in messages if p == address and isinstance(m, kind)]
