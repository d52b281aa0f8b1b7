"""What the unit scheduler keeps for gateways: their requests as they gave them, and whom to answer."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat

from muxserve.net.logs import of_request
from muxserve.net.server import shown
from muxserve.scheduling.quarantine import Quarantine, is_culprit, is_known
from muxserve.scheduling.state import LiveRequest, ModelState
from muxserve.scheduling.types import Grant, Phase, QueuedRequest, RequestPlace
from muxserve.unit.state import UnitState
from muxserve.wire import (
    Abort,
    Admit,
    Cancel,
    Elsewhere,
    GatewayHello,
    HandOff,
    HandOver,
    Lost,
    Prefilled,
    Refused,
    RequestFailed,
    RequestSpec,
    RequestTrace,
    Returned,
    Submit,
    TakeOver,
    TookOver,
    TraceStage,
    UnitHello,
)

log = logging.getLogger(__name__)

GATEWAY = b"gateway/"
# Stages of a traced request.
QUEUE, PREFILL_STAGE, HAND_OVER, DECODE_STAGE, MOVE = "queue", "prefill", "hand_over", "decode", "move"


@dataclass(slots=True)
class RequestEntry:
    """What the ledger need not know of a live request. Its `hand_off` is kept for as long as it may be there."""

    gateway: bytes
    attempt: int
    request: RequestSpec
    output_tokens: list[int]
    hand_off: HandOff | None = None
    # Migrations within this attempt.
    moves: int = 0
    # Stages that a traced request began, and when.
    stages: list[tuple[str, float]] | None = None


@dataclass(slots=True)
class GatewayEntry:
    """A gateway that has greeted; `number` is its place among the fleet's, `pid` its process."""

    epoch: str
    reply_to: str
    number: int = 0
    pid: int = 0


class UnitRequestTable:
    """Every live request of the ledger, with what only its gateway and its engines understand."""

    def __init__(self, state: UnitState) -> None:
        self.held: dict[str, RequestEntry] = {}
        # Those of them that are traced.
        self.traced = 0
        self.gateways: dict[bytes, GatewayEntry] = {}
        self.quarantine = Quarantine()
        self._state = state

    def greeted(self, peer: bytes, hello: GatewayHello, now: float) -> None:
        """A gateway is there."""
        if hello.reply_to.startswith("tcp://") and self._state.unit_spec.keys is None:
            log.error("gateway %s is on another machine, and this unit has no keys to reach it: ignored", hello.epoch)
            return
        for address, known in list(self.gateways.items()):
            # There is one gateway of a number: a new one means that the old one is gone.
            if known.epoch != hello.epoch and known.number == hello.gateway:
                self.forget_gateway(address, now)
        self.gateways[peer] = GatewayEntry(hello.epoch, hello.reply_to, hello.gateway, hello.pid)
        self._state.send(peer, UnitHello(self._state.epoch))
        log.info("gateway %d, %s", hello.gateway, hello.epoch)
        for request_id, held in self.held.items():
            if held.moves and held.gateway == peer:
                # It may not have heard: it greets again when the connection was lost.
                self._state.send(peer, TookOver(request_id, held.attempt, held.moves))

    def gateway_down(self, number: int, pid: int, now: float) -> None:
        """The gateway of that number has died, which was the process `pid`; 0: whichever has greeted."""
        for address, gateway in list(self.gateways.items()):
            if gateway.number == number and pid in (0, gateway.pid):
                self.forget_gateway(address, now)

    def forget_gateway(self, address: bytes, now: float) -> None:
        """A gateway is gone, and nobody wants what it asked for."""
        del self.gateways[address]
        self.drop([r for r, held in self.held.items() if held.gateway == address], now)

    def submit(self, peer: bytes, submit: Submit, now: float) -> None:
        """Queue a request, or refuse it."""
        gateway = self.gateways.get(peer)
        if gateway is None:
            if not peer.startswith(GATEWAY):
                log.warning("a request from %s, which is no gateway", shown(peer))
                return
            # It has not heard yet that this unit scheduler is a new one; when it has, it greets and submits again.
            log.info("a request from %s, which has not greeted yet", shown(peer))
            self._state.send(peer, UnitHello(self._state.epoch))
            return
        # Whatever becomes of it: it is not on its way any more.
        self._state.came.append(submit.request_id)
        known = self.held.get(submit.request_id)
        if known is not None:
            if known.attempt >= submit.attempt:
                return
            self.drop([submit.request_id], now)
        request = submit.request
        model = self._state.ledger.by_name.get(request.model)
        if model is None:
            self._refuse(peer, submit.request_id, submit.attempt, f"this unit has no model {request.model!r}")
            return
        if model.retired:
            self._state.send(peer, Elsewhere([submit.request_id], [submit.attempt]))
            return
        done = len(submit.output_tokens)
        most = most_tokens(model, request.prompt_tokens, request.max_tokens, done)
        if self.too_long(peer, submit.request_id, submit.attempt, model, most):
            return
        self.held[submit.request_id] = RequestEntry(peer, submit.attempt, request, submit.output_tokens)
        if request.traced:
            self._trace(submit.request_id, QUEUE, now)
        self.quarantine.came(submit.request_id, submit.failures, done)
        self._state.ledger.arrived(
            QueuedRequest(
                submit.request_id,
                request.model,
                request.prompt_tokens,
                request.max_tokens,
                # Another machine's clock says nothing here.
                now if gateway.reply_to.startswith("tcp://") else submit.arrival,
                request.service,
                done,
                # One that was begun before has waited already.
                submit.attempt > 0 or done > 0,
            ),
            now,
        )

    def give_back(self, model: ModelState, now: float) -> None:
        """What waits in the model's queue is to be served by other units."""
        waiting = [live.request_id for live in model.queue.first(len(model.queue))]
        for request_id in waiting:
            self._state.ledger.given_back(request_id, now)
        self._elsewhere(waiting, model)

    def give_all_back(self, model: ModelState, now: float) -> None:
        """Nothing of the model is served here any more: what waits and what runs is to be served elsewhere, or here
        when the model is back. Gateways have the tokens that were made."""
        self.give_back(model, now)
        running = [*model.prefilling, *model.handed, *model.decoding, *model.moving]
        for request_id in running:
            held = self.held[request_id]
            if self._state.ledger.cancelled(request_id, now) in (RequestPlace.HANDED, RequestPlace.MOVING):
                self.drop_hand_off(held, model)
        self._elsewhere(running, model)

    def _elsewhere(self, request_ids: Iterable[str], model: ModelState) -> None:
        for gateway, (ids, attempts) in self._let_go(request_ids).items():
            log.info("%d requests of %s go elsewhere", len(ids), model.name)
            self._state.send(gateway, Elsewhere(ids, attempts))

    def too_long(self, gateway: bytes, request_id: str, attempt: int, model: ModelState, tokens: int) -> bool:
        """Refuse a request for which the pool has not enough pages even if its model has all of them."""
        capacity = self._state.policy.capacity(model)
        pages = pages_for(model, tokens)
        if pages <= capacity:
            return False
        most = max(0, capacity // model.pages_per_block - model.state_blocks) * model.block_tokens
        text = (
            f"the request can grow to {tokens} tokens, but model {model.name!r} has room for {most} "
            f"({pages} KV pages needed, {capacity} can be had). Ask for fewer tokens, or enlarge kv_pool.size"
        )
        self._refuse(gateway, request_id, attempt, text)
        return True

    def _refuse(self, gateway: bytes, request_id: str, attempt: int, text: str) -> None:
        log.warning("request %s refused: %s", request_id, text, extra=of_request(request_id))
        self._state.send(gateway, Refused(request_id, attempt, text))

    def cancel(self, peer: bytes, message: Cancel, now: float) -> None:
        """A gateway does not want these requests of its own any more."""
        unwanted = []
        for request_id, attempt in zip(message.request_ids, message.attempts or repeat(math.inf), strict=False):
            held = self.held.get(request_id)
            if held is not None and held.gateway == peer and held.attempt <= attempt:
                unwanted.append(request_id)
        self.drop(unwanted, now)

    def drop(self, request_ids: list[str], now: float) -> None:
        """Requests are not wanted any more, wherever they are."""
        aborts: defaultdict[bytes, list[str]] = defaultdict(list)
        for request_id in request_ids:
            live = self._state.ledger.requests.get(request_id)
            held = self.forget(request_id)
            if live is None or held is None:
                continue
            model = live.model
            place = self._state.ledger.cancelled(request_id, now)
            if place in (RequestPlace.HANDED, RequestPlace.MOVING):
                self.drop_hand_off(held, model)
            elif place in (RequestPlace.PREFILLING, RequestPlace.DECODING):
                engine = model.prefill if place is RequestPlace.PREFILLING else model.decode
                aborts[f"{model.name}/{engine.phase}".encode()].append(request_id)
        for address, ids in aborts.items():
            self._state.send(address, Abort(ids))

    def tell_lost(self, request_ids: Iterable[str], reason: str) -> None:
        """Tell the gateways about requests that the ledger has lost already. Their hand-offs are given up."""
        known = {request_id: self.quarantine.record(request_id) for request_id in request_ids}
        for request_id in [request_id for request_id, record in known.items() if is_culprit(record)]:
            del known[request_id]
            self._end_culprit(request_id, reason)
        for gateway, (ids, attempts) in self._let_go(known).items():
            log.warning("%d requests lost: %s", len(ids), reason)
            failures = [known[request_id] for request_id in ids]
            self._state.send(gateway, Lost(ids, attempts, reason, failures if any(map(is_known, failures)) else []))

    def _end_culprit(self, request_id: str, reason: str) -> None:
        held = self.forget(request_id)
        if held is not None:
            log.error("request %s makes engines fail: %s", request_id, reason, extra=of_request(request_id))
            text = f"the request makes the engine fail, also when it is computed alone: {reason}"
            self._state.send(held.gateway, RequestFailed(request_id, held.attempt, text))

    def forget(self, request_id: str) -> RequestEntry | None:
        """A request is no longer here; returns what was kept of it."""
        self.quarantine.left(request_id)
        held = self.held.pop(request_id, None)
        if held is not None and held.stages is not None:
            self.traced -= 1
            now = self._state.now
            stages = [TraceStage(name, max(0.0, now - at)) for name, at in held.stages]
            self._state.send(held.gateway, RequestTrace(request_id, held.attempt, held.moves, stages))
        return held

    def leased(self, grant: Grant, now: float) -> None:
        """An engine has a lease. Called only while some requests are `traced`."""
        model = self._state.ledger.by_name[grant.model]
        for request_id in grant.admit if grant.phase is Phase.DECODE else {**model.prefilling, **model.decoding}:
            held = self.held[request_id]
            if held.stages is None:
                continue
            decodes = request_id in model.decoding
            if decodes and held.stages[-1][0] != DECODE_STAGE:
                held.stages.append((DECODE_STAGE, now))
            elif not decodes and grant.phase is not Phase.DECODE:
                held.stages.append((PREFILL_STAGE, now))

    def staged(self, request_id: str, name: str, now: float) -> None:
        """A request begins to go through what is called so."""
        held = self.held.get(request_id)
        if held is not None and held.stages is not None:
            held.stages.append((name, now))

    def _trace(self, request_id: str, name: str, now: float) -> None:
        self.held[request_id].stages = [(name, now)]
        self.traced += 1

    def _let_go(self, request_ids: Iterable[str]) -> dict[bytes, tuple[list[str], list[int]]]:
        """Forget these requests; returns them with their attempts by gateway."""
        by_gateway: defaultdict[bytes, tuple[list[str], list[int]]] = defaultdict(lambda: ([], []))
        for request_id in request_ids:
            held = self.held[request_id]
            self.forget(request_id)
            ids, attempts = by_gateway[held.gateway]
            ids.append(request_id)
            attempts.append(held.attempt)
        return by_gateway

    def finished(self, request_id: str) -> None:
        """The ledger has counted the end of the request."""
        self.forget(request_id)

    def handed_over(self, name: str, message: HandOver, now: float) -> None:
        """A prefill engine of model `name` is done with a request."""
        if not self._state.ledger.handed_over(message.request_id, message.incarnation, len(message.output_tokens), now):
            self._state.memory.drop(name, message.key)  # cancelled while it was prefilled
            return
        held = self.held[message.request_id]
        held.hand_off = HandOff(message.key, message.computed_tokens)
        held.output_tokens = message.output_tokens
        self.staged(message.request_id, HAND_OVER, now)

    def prefilled(self, message: Prefilled, now: float) -> None:
        """An engine of both phases has the first token of a request."""
        if self._state.ledger.prefilled(message.request_id, message.incarnation, len(message.output_tokens), now):
            self.held[message.request_id].output_tokens = message.output_tokens
            self.staged(message.request_id, DECODE_STAGE, now)

    def returned(self, message: Returned, now: float) -> None:
        """An engine had no pages for a request; it queues again, unless it outgrew what its model can ever have."""
        if not self._state.ledger.returned(message.request_id, message.incarnation, len(message.output_tokens), now):
            return
        held = self.held[message.request_id]
        held.output_tokens = message.output_tokens
        held.hand_off = None
        self.staged(message.request_id, QUEUE, now)
        live = self._state.ledger.requests[message.request_id]
        most = most_tokens(live.model, live.prompt_tokens, 0, live.output_tokens)
        if self.too_long(held.gateway, live.request_id, held.attempt, live.model, most):
            self.drop([live.request_id], now)

    def take_over(self, message: TakeOver, now: float) -> str:
        """A request comes from another unit with its KV, under a hand-off. Returns why not, or nothing."""
        moving, request = message.request, message.request.request
        address = next((a for a, g in self.gateways.items() if g.epoch == moving.gateway_epoch), None)
        if address is None:
            return f"its gateway {moving.gateway_epoch} is not known here"
        model = self._state.ledger.by_name.get(request.model)
        if model is None or model.retired or not model.up:
            return f"model {request.model!r} is not up here"
        if not self._state.ledger.memory_up:
            return "the memory manager is not up"
        done = len(moving.output_tokens)
        most = most_tokens(model, request.prompt_tokens, request.max_tokens, done)
        if pages_for(model, most) > self._state.policy.capacity(model):
            return f"it can grow to {most} tokens, for which there is no room here"
        known = self.held.get(moving.request_id)
        if known is not None:
            if known.attempt >= moving.attempt:
                return "it is here already"
            self.drop([moving.request_id], now)
        hand_off = HandOff(message.key, moving.computed_tokens, foreign=True)
        self.held[moving.request_id] = RequestEntry(
            address, moving.attempt, request, moving.output_tokens, hand_off, moving.moves
        )
        if request.traced:
            self._trace(moving.request_id, HAND_OVER, now)
        self._state.ledger.taken_over(
            QueuedRequest(
                moving.request_id,
                request.model,
                request.prompt_tokens,
                request.max_tokens,
                now - moving.waited,
                request.service,
                done,
                True,
            ),
            now,
        )
        self._state.send(address, TookOver(moving.request_id, moving.attempt, moving.moves))
        return ""

    def give_up_hand_offs(self, request_ids: Iterable[str], model: ModelState) -> None:
        """Give up the hand-offs of requests that are about to be lost. A decode engine may have died before it adopted
        them."""
        for request_id in request_ids:
            held = self.held.get(request_id)
            if held is not None:
                self.drop_hand_off(held, model)

    def drop_hand_off(self, held: RequestEntry, model: ModelState) -> None:
        """Nobody will adopt the request's blocks, if any wait."""
        if held.hand_off is not None:
            self._state.memory.drop(model.name, held.hand_off.key)

    def void_hand_offs(self, request_ids: Iterable[str]) -> None:
        """The memory manager died, and these hand-offs with it."""
        for request_id in request_ids:
            self.held[request_id].hand_off = None

    def admit(self, live: LiveRequest) -> Admit:
        """What tells the engine that the ledger has put the request into to take it in."""
        held = self.held[live.request_id]
        gateway = self.gateways[held.gateway]
        return Admit(
            request_id=live.request_id,
            incarnation=live.lease_id,
            attempt=held.attempt,
            gateway_epoch=gateway.epoch,
            reply_to=gateway.reply_to,
            body=held.request.body,
            output_tokens=held.output_tokens,
            hand_off=held.hand_off if live.place is RequestPlace.DECODING else None,
        )


def most_tokens(model: ModelState, prompt: int, most: int, done: int) -> int:
    """Tokens that a request needs pages for when it is longest. It generates at most `most` tokens and has `done` of
    them. The last one is not computed upon, so it needs no place; but a prompt is admitted with room for one token."""
    return prompt + (0 if model.pooling else max(most - 1, done + 1))


def pages_for(model: ModelState, tokens: int) -> int:
    """Pages of a sequence of so many tokens."""
    return (-(-tokens // model.block_tokens) + model.state_blocks) * model.pages_per_block
