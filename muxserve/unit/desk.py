"""What the unit scheduler keeps for gateways: their requests as they gave them, and whom to answer."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from muxserve.deployment import Deployment
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.state import LiveRequest, ModelState
from muxserve.scheduling.types import Phase, Place, QueuedRequest
from muxserve.unit.memory import Memory
from muxserve.wire import Abort, Admit, GatewayHello, HandOver, Lost, Message, Refused, Returned, Submit, UnitHello

log = logging.getLogger(__name__)

GATEWAY = b"gateway/"


@dataclass(slots=True)
class Held:
    """What the ledger need not know of a live request. `key` is its hand-off, as long as it may be there."""

    gateway: bytes
    attempt: int
    body: bytes
    output_tokens: list[int]
    key: str = ""
    computed_tokens: int = 0


@dataclass(slots=True)
class Gateway:
    """A gateway that has greeted."""

    epoch: str
    reply_to: str


@dataclass(slots=True)
class Outbox:
    """Messages to send, in order, each with the ZeroMQ identity of its receiver."""

    messages: list[tuple[bytes, Message]] = field(default_factory=list)

    def send(self, peer: bytes, message: Message) -> None:
        self.messages.append((peer, message))


class RequestDesk:
    """Every live request of the ledger, with what only its gateway and its engines understand."""

    def __init__(
        self, deployment: Deployment, ledger: UnitLedger, policy: Policy, memory: Memory, out: Outbox, epoch: str
    ) -> None:
        self.held: dict[str, Held] = {}
        self.gateways: dict[bytes, Gateway] = {}
        self._deployment = deployment
        self._ledger = ledger
        self._policy = policy
        self._memory = memory
        self._out = out
        self._epoch = epoch
        self._orphans: set[tuple[str, str]] = set()

    def greeted(self, peer: bytes, hello: GatewayHello, now: float) -> None:
        """A gateway is there."""
        for address, known in list(self.gateways.items()):
            # There is one gateway at an address: a new one means that the old one is gone.
            if known.epoch != hello.epoch and known.reply_to == hello.reply_to:
                self.forget_gateway(address, now)
        self.gateways[peer] = Gateway(hello.epoch, hello.reply_to)
        self._out.send(peer, UnitHello(self._epoch))
        log.info("gateway %s", hello.epoch)

    def forget_gateway(self, address: bytes, now: float) -> None:
        """A gateway is gone, and nobody wants what it asked for."""
        del self.gateways[address]
        self.drop([r for r, held in self.held.items() if held.gateway == address], now)

    def submit(self, peer: bytes, submit: Submit, now: float) -> None:
        """Queue a request, or refuse it."""
        if peer not in self.gateways:
            if not peer.startswith(GATEWAY):
                log.warning("a request from %s, which is no gateway", shown(peer))
                return
            # It has not heard yet that this unit scheduler is a new one.
            self.gateways[peer] = Gateway(peer.removeprefix(GATEWAY).decode(), self._deployment.gateway_address)
            self._out.send(peer, UnitHello(self._epoch))
        known = self.held.get(submit.request_id)
        if known is not None:
            if known.attempt >= submit.attempt:
                return
            self.drop([submit.request_id], now)
        model = self._ledger.by_name.get(submit.model)
        if model is None:
            self._refuse(peer, submit.request_id, submit.attempt, f"this unit has no model {submit.model!r}")
            return
        done = len(submit.output_tokens)
        # The last token is not computed upon, so it needs no place; one token is generated whatever was asked for.
        most = submit.prompt_tokens + max(submit.max_tokens, done + 1) - 1
        if self.too_long(peer, submit.request_id, submit.attempt, model, most):
            return
        self.held[submit.request_id] = Held(peer, submit.attempt, submit.body, submit.output_tokens)
        self._ledger.arrived(
            QueuedRequest(
                submit.request_id,
                submit.model,
                submit.prompt_tokens,
                submit.max_tokens,
                submit.arrival,
                submit.priority,
                done,
                # One that was begun before has waited already.
                submit.attempt > 0 or done > 0,
            ),
            now,
        )

    def too_long(self, gateway: bytes, request_id: str, attempt: int, model: ModelState, tokens: int) -> bool:
        """Refuse a request for which the pool has not enough pages even when the model has all it can get."""
        capacity = self._policy.capacity(model)
        pages = -(-tokens // model.block_tokens) * model.pages_per_block
        if pages <= capacity:
            return False
        most = capacity // model.pages_per_block * model.block_tokens
        text = (
            f"the request can grow to {tokens} tokens, but model {model.name!r} has room for {most} "
            f"({pages} KV pages needed, {capacity} can be had). Ask for fewer tokens, or enlarge kv_pool.size"
        )
        self._refuse(gateway, request_id, attempt, text)
        return True

    def _refuse(self, gateway: bytes, request_id: str, attempt: int, text: str) -> None:
        log.warning("request %s refused: %s", request_id, text)
        self._out.send(gateway, Refused(request_id, attempt, text))

    def cancel(self, peer: bytes, request_ids: list[str], now: float) -> None:
        """A gateway does not want these requests of its own any more."""
        held = self.held
        self.drop([r for r in request_ids if r in held and held[r].gateway == peer], now)

    def drop(self, request_ids: list[str], now: float) -> None:
        """Requests are not wanted any more, wherever they are."""
        aborts: defaultdict[bytes, list[str]] = defaultdict(list)
        for request_id in request_ids:
            live = self._ledger.requests.get(request_id)
            held = self.held.pop(request_id, None)
            if live is None or held is None:
                continue
            model = live.model.name
            place = self._ledger.cancelled(request_id, now)
            if place is Place.HANDED:
                self._memory.drop(model, held.key)
            elif place is Place.PREFILLING:
                aborts[f"{model}/{Phase.PREFILL}".encode()].append(request_id)
            elif place is Place.DECODING:
                aborts[f"{model}/{Phase.DECODE}".encode()].append(request_id)
        for address, ids in aborts.items():
            self._out.send(address, Abort(ids))

    def tell_lost(self, request_ids: Iterable[str], reason: str) -> None:
        """Tell the gateways about requests that the ledger has lost already. Their hand-offs are given up."""
        by_gateway: defaultdict[bytes, list[str]] = defaultdict(list)
        for request_id in request_ids:
            by_gateway[self.held.pop(request_id).gateway].append(request_id)
        for gateway, ids in by_gateway.items():
            log.warning("%d requests lost: %s", len(ids), reason)
            self._out.send(gateway, Lost(ids, reason))

    def finished(self, request_id: str) -> None:
        """The ledger has counted the end of the request."""
        del self.held[request_id]

    def handed_over(self, name: str, message: HandOver, now: float) -> None:
        """A prefill engine of model `name` is done with a request."""
        if not self._ledger.handed_over(message.request_id, message.incarnation, len(message.output_tokens), now):
            self._memory.drop(name, message.key)  # cancelled while it was prefilled
            return
        held = self.held[message.request_id]
        held.key = message.key
        held.computed_tokens = message.computed_tokens
        held.output_tokens = message.output_tokens

    def returned(self, message: Returned, now: float) -> None:
        """An engine had no pages for a request; it queues again, unless it outgrew what its model can ever have."""
        if not self._ledger.returned(message.request_id, message.incarnation, len(message.output_tokens), now):
            return
        held = self.held[message.request_id]
        held.output_tokens = message.output_tokens
        held.key = ""
        live = self._ledger.requests[message.request_id]
        if self.too_long(held.gateway, live.request_id, held.attempt, live.model, live.tokens):
            self.drop([live.request_id], now)

    def give_up_hand_offs(self, request_ids: Iterable[str], model: ModelState) -> None:
        """Of requests that are about to be lost: a decode engine may have died before it adopted them."""
        for request_id in request_ids:
            held = self.held.get(request_id)
            if held is not None and held.key:
                self._memory.drop(model.name, held.key)

    def drop_orphans(self, waiting: Mapping[str, Iterable[str]]) -> None:
        """Give up hand-offs (keys by model) that no request here knows.

        An engine that dies between handing over and saying so leaves one, and so does a unit scheduler that dies. What
        is met for the first time may be on its way, so it goes only when it is still unknown at the next look.
        """
        known = {held.key for held in self.held.values()}
        unknown = {(model, key) for model, keys in waiting.items() for key in keys if key not in known}
        for model, key in unknown & self._orphans:
            log.warning("giving up the hand-off %s of %s, which no request waits for", key, model)
            self._memory.drop(model, key)
        self._orphans = unknown

    def hand_offs_void(self, request_ids: Iterable[str]) -> None:
        """The memory manager died, and these hand-offs with it."""
        for request_id in request_ids:
            self.held[request_id].key = ""

    def admit(self, live: LiveRequest, phase: Phase) -> Admit:
        """What tells an engine of that phase to take the request in."""
        held = self.held[live.request_id]
        gateway = self.gateways[held.gateway]
        adopts = phase is Phase.DECODE
        return Admit(
            request_id=live.request_id,
            incarnation=live.lease_id,
            attempt=held.attempt,
            gateway_epoch=gateway.epoch,
            reply_to=gateway.reply_to,
            body=held.body,
            output_tokens=held.output_tokens,
            adopt=held.key if adopts else "",
            computed_tokens=held.computed_tokens if adopts else 0,
        )


def shown(peer: bytes) -> str:
    """A peer's identity for people; identities that ZeroMQ made up are not text."""
    return peer.decode(errors="backslashreplace")
