"""Compares what the unit believes an engine to have with what the engine has.

An engine tells what becomes of its requests; one that loses some without a word, while it goes on with others, would
leave their clients waiting for ever. Each of its reports counts the requests in it. When they are fewer than there
should be, and besides every few seconds, it is asked for a list.

Messages between the two arrive in order, so that the list is exact about what it can know: all that came with a lease
up to the one that it names, less what the engine has told of before. What was sent meanwhile is not missed. A request
that the engine has and the unit does not want may have been aborted just now; only one that is there again in the next
list was not.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from muxserve.scheduling.engines import EngineState
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.state import ModelState
from muxserve.unit.hand_offs import HandOffs
from muxserve.unit.outbox import Outbox
from muxserve.unit.request_table import UnitRequestTable
from muxserve.wire import Abort, HeldRequests, ShowRequests, StepReport

log = logging.getLogger(__name__)

# Between two lists of an engine that there is no doubt about.
RECONCILE_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class Peer:
    """What is known of an engine beside its ledger entry: its process. `bubbles` are
    seconds of each stage of a pipeline. `remaining` is how many requests it said to have; `asked`: it is to list them;
    `strays` are those, (id, incarnation), that it had last time and should not have."""

    model: ModelState
    state: EngineState
    address: bytes
    pid: int | None = None
    bubbles: list[float] = field(default_factory=list)
    remaining: int = 0
    asked: bool = False
    strays: set[tuple[str, int]] = field(default_factory=set)

    @property
    def name(self) -> str:
        """MODEL/PHASE."""
        return self.address.decode()

    def anew(self, pid: int | None) -> None:
        """It is another process by now, or none, and has nothing of what the one before had."""
        self.pid = pid
        self.remaining = 0
        self.asked = False
        self.strays = set()


class Reconciliation:
    """Finds requests that engines have lost, and such as they should not have any more. `missing` and `strays` count
    them by model."""

    def __init__(
        self,
        ledger: UnitLedger,
        request_table: UnitRequestTable,
        hand_offs: HandOffs,
        out: Outbox,
        peers: Iterable[Peer],
        now: float,
    ) -> None:
        self.missing: Counter[str] = Counter()
        self.strays: Counter[str] = Counter()
        self._ledger = ledger
        self._request_table = request_table
        self._hand_offs = hand_offs
        self._out = out
        self._peers = list(peers)
        self._due = now + RECONCILE_SECONDS

    def reported(self, peer: Peer, report: StepReport) -> None:
        """An engine has reported; what it told of is in the ledger already."""
        peer.remaining = report.running + report.waiting
        state, model = peer.state, peer.model
        if report.lease_id < state.entered_with:
            return  # what came in since is not counted
        believed = len(model.prefilling) + len(model.decoding) if model.both else len(state.inside)
        if peer.remaining < believed:
            self._ask(peer)

    def turn(self, now: float) -> None:
        """Ask whom it is time to ask."""
        if now < self._due:
            return
        self._due = now + RECONCILE_SECONDS
        for peer in self._peers:
            if peer.state.up and (peer.remaining or peer.state.inside):
                self._ask(peer)

    def wakeup(self) -> float:
        """When `turn` is due although no message came."""
        busy = self._ledger.requests or any(peer.remaining for peer in self._peers)
        return self._due if busy else float("inf")

    def _ask(self, peer: Peer) -> None:
        if not peer.asked:
            peer.asked = True
            self._out.send(peer.address, ShowRequests())

    def heard(self, peer: Peer, message: HeldRequests, now: float) -> None:
        """An engine's list."""
        peer.asked = False
        peer.remaining = len(message.request_ids)
        there = set(zip(message.request_ids, message.incarnations, strict=False))
        inside = {(request_id, live.lease_id) for request_id, live in peer.state.inside.items()}
        missing = [life for life in inside - there if life[1] <= message.lease_id]
        if missing:
            self._missing(peer, missing, now)
        unwanted = there - inside
        again = unwanted & peer.strays
        if again:
            log.error("engine %s still has requests that it should not have: %s", peer.name, _ids(again))
            self.strays[peer.model.name] += len(again)
            self._abort(peer, again)
        peer.strays = unwanted - again

    def _missing(self, peer: Peer, lives: list[tuple[str, int]], now: float) -> None:
        ids = _ids(lives)
        log.error("engine %s does not have the requests that it should have: %s", peer.name, ids)
        self.missing[peer.model.name] += len(ids)
        # Whatever may be left of them there goes, and what they were to adopt.
        self._abort(peer, lives)
        self._hand_offs.give_up(ids, peer.model)
        self._request_table.tell_lost(self._ledger.lost(ids, now), f"engine {peer.name} does not have them")

    def _abort(self, peer: Peer, lives: Iterable[tuple[str, int]]) -> None:
        ids, incarnations = zip(*sorted(lives), strict=True)
        self._out.send(peer.address, Abort(list(ids), list(incarnations)))


def _ids(lives: Iterable[tuple[str, int]]) -> list[str]:
    return sorted(request_id for request_id, _ in lives)
