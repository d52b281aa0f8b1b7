"""Requests on their way to other units: the unit scheduler's part of live migration.

    engine:   ShowBlocks -> Blocks      whole blocks, while the request goes on
    migrator: MoveStage -> MoveStaged   ... until few are left, or for a few rounds
    engine:   Detach -> Detached        between two steps; the blocks wait under a key
    migrator: MoveStage -> MoveStaged   the remaining pages
    migrator: MoveStage -> MoveStaged   its state again, of a model that keeps one
    migrator: MoveCommit -> MoveCommitted

Until `MoveCommit` is sent, whatever fails ends as if nothing had happened: a request that was detached is adopted by
its decode engine again. From then on the outcome is the other side's; if it stays unknown the gateway has the request
served again. What becomes of it meanwhile (it ends, is cancelled, returned, lost) is seen in the ledger at the next
`tick`, and ends the move.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import KeysView, Set
from dataclasses import dataclass, field
from enum import Enum, auto

from muxserve.net.inbox import ImpossibleMessageError
from muxserve.replicas.migration import choose_request
from muxserve.replicas.views import InstanceLoad
from muxserve.replicas.virtual_usage import freeness, score
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.loads import view_of
from muxserve.scheduling.state import LiveRequest, ModelState
from muxserve.scheduling.types import Phase, RequestPlace
from muxserve.unit.replicas import load_of_replica
from muxserve.unit.request_table import HAND_OVER, MOVE, UnitRequestTable
from muxserve.unit.state import UnitState
from muxserve.wire import (
    Blocks,
    Detach,
    Detached,
    HandOff,
    Lost,
    Message,
    MoveAbort,
    MoveCommit,
    MoveCommitted,
    MoveFailed,
    MoveStage,
    MoveStaged,
    Moving,
    Paired,
    ShowBlocks,
)

log = logging.getLogger(__name__)

# The last stage is what the request waits for. It comes when at most so many whole blocks were filled during the stage
# before, or after so many stages: the next one would hardly be shorter.
LAST_STAGE_BLOCKS = 4
MOST_STAGES = 3


class MoveStep(Enum):
    """What a move waits for."""

    SHOWING = auto()  # the engine, which is to show blocks
    COPYING = auto()  # the migrator, while the request goes on
    DETACHING = auto()  # the engine, which is to let go of it
    LAST = auto()  # the migrator; the request stands still
    STATE = auto()  # the same: each step has overwritten the state since it was copied first
    COMMITTING = auto()  # the other unit


@dataclass(slots=True)
class RequestMove:
    """One request on its way. `until` is how many of its blocks are over there, `held` how many were set aside there.
    The step that it waits for is given up at `deadline`. `states` are its first blocks, those that hold its state."""

    name: str
    live: LiveRequest
    incarnation: int
    destination: str
    address: str
    usage: int
    step: MoveStep = MoveStep.SHOWING
    deadline: float = math.inf
    until: int = 0
    held: int = 0
    total: int = 0
    states: list[int] = field(default_factory=list)
    stages: int = 0
    shown_at: float = 0.0
    detached_at: float = 0.0

    @property
    def key(self) -> str:
        """Under which its blocks wait in this unit's memory manager."""
        return f"move:{self.name}"

    @property
    def detached(self) -> bool:
        """The request has left its engine, and stands still."""
        return self.step in (MoveStep.LAST, MoveStep.STATE, MoveStep.COMMITTING)

    def as_expected(self, ledger: UnitLedger) -> bool:
        """The request is still where it has to be for the step that is waited for."""
        live = self.live
        if ledger.requests.get(live.request_id) is not live:
            return False
        if self.detached:
            return live.place is RequestPlace.MOVING
        return live.place is RequestPlace.DECODING and live.lease_id == self.incarnation

    def nearly_over(self, now: float) -> bool:
        """The next stage is to be the last one."""
        model = self.live.model
        filled = (now - self.shown_at) / max(model.decode.step_seconds, 1e-4) / model.block_tokens
        return filled <= LAST_STAGE_BLOCKS or self.stages >= MOST_STAGES


@dataclass(slots=True)
class Downtime:
    """How long requests of a model stood still while they moved, seconds."""

    last: float = 0.0
    most: float = 0.0
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """One more has arrived, after so long."""
        self.last = seconds
        self.most = max(self.most, seconds)
        self.total += seconds


class RequestMoves:
    """The moves under way, by their names. `by_model` counts them."""

    def __init__(self, by_model: Counter[str]) -> None:
        self._by_model = by_model
        self._by_name: dict[str, RequestMove] = {}
        self._by_request: dict[str, RequestMove] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def all(self) -> list[RequestMove]:
        """Those of now, oldest first."""
        return list(self._by_name.values())

    def of_model(self, model: str) -> list[RequestMove]:
        """Those of the model's requests."""
        return [move for move in self._by_name.values() if move.live.model.name == model]

    def named(self, name: str) -> RequestMove | None:
        """The move of that name."""
        return self._by_name.get(name)

    def of(self, request_id: str) -> RequestMove | None:
        """The move of that request."""
        return self._by_request.get(request_id)

    def requests(self) -> KeysView[str]:
        """The requests that move."""
        return self._by_request.keys()

    def add(self, move: RequestMove) -> None:
        """A move begins."""
        self._by_name[move.name] = self._by_request[move.live.request_id] = move
        self._by_model[move.live.model.name] += 1

    def remove(self, move: RequestMove) -> None:
        """A move is over."""
        del self._by_name[move.name]
        self._by_model[move.live.model.name] -= 1
        if self._by_request.get(move.live.request_id) is move:
            del self._by_request[move.live.request_id]


# Blocks set aside over there beyond those that there are: what the request fills while its first ones are copied.
SPARE_BLOCKS = 1
# A pair that was not repeated for so long is over.
PAIR_SECONDS = 2.0
# How often a paired replica looks whether it should give a request away; if it should and none fits the other one,
# which says anew how it stands ten times a second; and after a move that failed: doubled up to the latter.
CHOOSE_SECONDS = 0.02
NONE_FITS_SECONDS = 0.1
RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 2.0
# A request that could not be moved is left alone for a while.
SKIP_SECONDS = 1.0
# For how long the other replica's report may still count a move that has ended: it goes by way of the global scheduler.
STALE_SECONDS = 0.3


@dataclass(slots=True)
class MigrationPair:
    """Where a replica's requests go. `load` is the other one's last report, and what was sent there since; `flying`
    requests are on their way there from here, and others ended at the times in `ended`."""

    destination: str
    address: str
    load: InstanceLoad
    heard_at: float
    try_at: float = 0.0
    retry: float = RETRY_SECONDS
    flying: int = 0
    ended: list[float] = field(default_factory=list)

    def end(self, now: float) -> None:
        """A move there has ended, one way or the other."""
        self.flying = max(0, self.flying - 1)
        self.load.moving_in = max(0, self.load.moving_in - 1)
        self.ended.append(now)


class MigrationPairs:
    """The pairs of this unit's replicas, by model."""

    def __init__(self, state: UnitState) -> None:
        self._state = state
        self._unit = state.unit_spec.unit
        self._rules = state.unit_spec.migration
        self._pairs: dict[str, MigrationPair] = {}
        self._skipped: dict[str, float] = {}

    def paired(self, message: Paired, now: float) -> None:
        """The global scheduler wants requests moved, or still does."""
        if message.model not in self._state.ledger.by_name or message.destination == self._unit:
            log.warning("%s of this unit cannot be paired with %s", message.model, message.destination)
            return
        pair = MigrationPair(message.destination, message.address, message.load, now)
        known = self._pairs.get(message.model)
        if known is not None and known.destination == pair.destination:
            pair.try_at, pair.retry, pair.flying = known.try_at, known.retry, known.flying
            pair.ended = [at for at in known.ended if now - at < STALE_SECONDS]
            pair.load.moving_in = max(pair.flying, pair.load.moving_in - len(pair.ended))
        else:
            log.info("requests of %s may move to %s", message.model, message.destination)
        self._pairs[message.model] = pair

    def unpaired(self, model: str) -> None:
        """No more requests are to leave; those under way arrive."""
        self._pairs.pop(model, None)

    def choose(self, now: float, staying: Set[str]) -> list[tuple[LiveRequest, MigrationPair, int]]:
        """Requests that are to move now, none of `staying`, each with the KV that it takes (tokens)."""
        chosen = []
        for name, pair in list(self._pairs.items()):
            if now - pair.heard_at > PAIR_SECONDS:
                log.info("the global scheduler does not pair %s with %s any more", name, pair.destination)
                del self._pairs[name]
            elif now >= pair.try_at:
                pair.try_at = now + CHOOSE_SECONDS
                found = self._choose(self._state.ledger.by_name[name], pair, now, staying)
                if found is not None:
                    chosen.append(found)
        return chosen

    def _choose(
        self, model: ModelState, pair: MigrationPair, now: float, staying: Set[str]
    ) -> tuple[LiveRequest, MigrationPair, int] | None:
        rules, levels = self._rules, self._state.levels[model.name]
        load = load_of_replica(self._state, model)
        if not model.decode.takes_work or load.moving_out >= rules.in_flight or pair.load.moving_in >= rules.in_flight:
            return None
        # As `choose_request` asks, but without looking at every request.
        if not load.terminating and freeness(load, levels) >= rules.source_below:
            return None
        if self._skipped:
            self._skipped = {request: until for request, until in self._skipped.items() if until > now}
        view = view_of(model, load, levels, staying | self._skipped.keys())
        request = choose_request(view, score(pair.load, levels), rules, levels, SPARE_BLOCKS * model.block_tokens)
        if request is None:
            pair.try_at = now + NONE_FITS_SECONDS
            return None
        pair.flying += 1
        pair.load.moving_in += 1
        return self._state.ledger.requests[request.request_id], pair, request.usage

    def arrived(self, model: str, destination: str, usage: int, level: str, now: float) -> None:
        """A request has moved; the next one may."""
        pair = self._pairs.get(model)
        if pair is not None and pair.destination == destination:
            pair.retry, pair.try_at = RETRY_SECONDS, now
            pair.end(now)
            load = pair.load
            # Until the next report says so.
            load.used += usage
            load.running += 1
            load.levels[level] = load.levels.get(level, 0) + 1

    def failed(self, model: str, destination: str, request_id: str, now: float) -> None:
        """A move has come to nothing: others are not tried at once, and this request not for a while."""
        self._skipped[request_id] = now + SKIP_SECONDS
        pair = self._pairs.get(model)
        if pair is not None and pair.destination == destination:
            pair.end(now)
            pair.try_at = now + pair.retry
            pair.retry = min(2 * pair.retry, LONGEST_RETRY_SECONDS)

    def wakeup(self) -> float:
        """When `choose` is due."""
        return min((pair.try_at for pair in self._pairs.values()), default=math.inf)


MIGRATOR = b"migrator"

# An engine or a migrator that says nothing for so long (beyond the time that copying takes) does not answer any more.
SILENCE_SECONDS = 10.0
# While the request stands still a client waits; nothing is lost by giving up.
LAST_SECONDS = 3.0
# Copying is at least as fast as this (bytes/s), or something is wrong.
SLOWEST_COPY = 20e6
# When the gateway is told that a request left, for the case that the other unit died before it could say `TookOver`.
# A gateway that has heard it takes no notice.
FAREWELL_SECONDS = 2.0


class Departures:
    """All moves from this unit. `downtimes` is by model; what was moved and aborted is in the ledger's tallies."""

    def __init__(self, state: UnitState, table: UnitRequestTable) -> None:
        self._state = state
        self._table = table
        self.pairs = MigrationPairs(state)
        self.moves = RequestMoves(state.moving_out)
        self.downtimes: dict[str, Downtime] = {}
        self.migrator_up = False
        self._departed: deque[tuple[float, str, int, bytes]] = deque()
        self._count = 0

    def under_way(self, model: str) -> dict[str, int]:
        """How many of the model's moves wait for what."""
        return dict(Counter(move.step.name.lower() for move in self.moves.of_model(model)))

    # ------------------------------------------------------------ what is heard

    def migrator_new(self, now: float) -> None:
        """The migrator has started, perhaps anew: it knows of no move."""
        self.migrator_up = True
        for move in self.moves.all():
            self._fail(
                move, "the migrator was started anew", now, uncertain=move.step is MoveStep.COMMITTING, tell=False
            )

    def memory_gone(self, now: float) -> list[str]:
        """The memory manager died. Returns the requests that are lost with it; what was committed may have arrived."""
        lost = []
        for move in self.moves.all():
            if move.step is MoveStep.COMMITTING:
                continue
            # One that is asked for may be out of its engine already, which would not tell of it any more then.
            if move.step in (MoveStep.DETACHING, MoveStep.LAST, MoveStep.STATE):
                lost.append(move.live.request_id)
            self._end(move, now, tell=True)
        return lost

    def heard(self, peer: bytes, message: Message, now: float) -> None:
        """An answer of an engine or of the migrator."""
        match message:
            case Blocks():
                move = self.moves.of(message.request_id)
                if move is not None and move.step is MoveStep.SHOWING and move.incarnation == message.incarnation:
                    self._shown(move, message, now)
            case Detached():
                self._detached(peer, message, now)
            case MoveStaged():
                move = self.moves.named(message.move)
                if move is not None:
                    self._staged(move, message, now)
            case MoveCommitted():
                move = self.moves.named(message.move)
                if move is not None and move.step is MoveStep.COMMITTING:
                    self._committed(move, now)
            case MoveFailed():
                move = self.moves.named(message.move)
                if move is not None:
                    uncertain = message.uncertain and move.step is MoveStep.COMMITTING
                    self._fail(move, message.reason, now, uncertain, tell=False)

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """End moves whose requests have gone another way or that take too long, and begin others."""
        for move in self.moves.all():
            if not move.as_expected(self._state.ledger):
                if move.step is MoveStep.DETACHING:
                    # Its engine may have left them there and died.
                    self._state.memory.drop(move.live.model.name, move.key)
                self._end(move, now, tell=move.step is not MoveStep.COMMITTING)
            elif now >= move.deadline:
                who = "the engine" if move.step in (MoveStep.SHOWING, MoveStep.DETACHING) else "the migrator"
                self._fail(move, f"{who} does not answer", now, uncertain=move.step is MoveStep.COMMITTING)
        while self._departed and self._departed[0][0] <= now:
            _, request_id, attempt, gateway = self._departed.popleft()
            if request_id not in self._table.held and gateway in self._table.gateways:
                self._state.send(gateway, Lost([request_id], [attempt], "it went to a unit that has not spoken of it"))
        if self.migrator_up and self._state.memory.connected:
            for live, pair, usage in self.pairs.choose(now, self.moves.requests()):
                self._begin(live, pair, usage, now)

    def wakeup(self) -> float:
        """When `tick` is due although no message came."""
        due = min((move.deadline for move in self.moves.all()), default=math.inf)
        if self._departed:
            due = min(due, self._departed[0][0])
        return min(due, self.pairs.wakeup()) if self.migrator_up and self._state.memory.connected else due

    # ------------------------------------------------------------ one move, step by step

    def _begin(self, live: LiveRequest, pair: MigrationPair, usage: int, now: float) -> None:
        self._count += 1
        name = f"{self._state.unit_spec.unit}:{self._state.epoch}:{self._count}"
        move = RequestMove(name, live, live.lease_id, pair.destination, pair.address, usage)
        self.moves.add(move)
        log.debug("%s: %s of %s moves to %s", name, live.request_id, live.model.name, pair.destination)
        self._show(move, now)

    def _show(self, move: RequestMove, now: float) -> None:
        move.step, move.deadline = MoveStep.SHOWING, now + SILENCE_SECONDS
        self._tell_engine(move, ShowBlocks(move.live.request_id, move.incarnation, move.until))

    def _shown(self, move: RequestMove, message: Blocks, now: float) -> None:
        model = move.live.model
        whole = model.state_blocks + message.computed_tokens // model.block_tokens
        if not message.computed_tokens or message.since != move.until:
            self._fail(move, "it does not run in its engine", now)
            return
        move.shown_at = now
        if not move.until:
            # Copied now for nothing but that its pages are mapped over there by the time that somebody waits for them.
            move.states = message.blocks[: model.state_blocks]
        blocks = message.blocks[: whole - move.until]
        self._stage(move, move.until, blocks, message.since + len(message.blocks), MoveStep.COPYING, now)

    def _stage(self, move: RequestMove, since: int, blocks: list[int], needed: int, step: MoveStep, now: float) -> None:
        """Have `blocks` copied, the first of which has number `since`, and as many set aside over there as are `needed`
        in all."""
        model = move.live.model
        move.stages += 1
        if step is MoveStep.COPYING:
            needed += SPARE_BLOCKS
        reserve = max(0, needed - move.held)
        move.held += reserve
        copied = len(blocks) * model.pages_per_block * self._page_bytes(model) * self._state.unit_spec.ranks
        limit = self._state.unit_spec.migration_bandwidth
        slowest = min(limit, SLOWEST_COPY) if limit > 0.0 else SLOWEST_COPY
        # Moves of other models may be before it.
        patience = SILENCE_SECONDS if step is MoveStep.COPYING else LAST_SECONDS
        move.step, move.deadline = step, now + patience + len(self.moves) * copied / slowest
        stage = MoveStage(move.name, model.name, move.address, since, blocks, reserve)
        self._state.send(MIGRATOR, stage)

    def _staged(self, move: RequestMove, message: MoveStaged, now: float) -> None:
        if not move.as_expected(self._state.ledger):
            return  # cancelled in the same batch of messages, perhaps submitted anew
        if move.step is MoveStep.LAST and message.until >= move.total:
            if move.states:
                self._stage(move, 0, move.states, move.total, MoveStep.STATE, now)
            else:
                self._commit(move, now)
        elif move.step is MoveStep.STATE:
            self._commit(move, now)
        elif move.step is MoveStep.COPYING:
            move.until = message.until
            if move.nearly_over(now):
                move.step, move.deadline = MoveStep.DETACHING, now + SILENCE_SECONDS
                self._tell_engine(move, Detach(move.live.request_id, move.incarnation, move.key, move.until))
            else:
                self._show(move, now)

    def _detached(self, peer: bytes, message: Detached, now: float) -> None:
        request_id = message.request_id
        move = self.moves.of(request_id)
        if move is not None and (move.step is not MoveStep.DETACHING or move.incarnation != message.incarnation):
            move = None
        if not message.key:
            if move is not None:
                self._fail(move, "it does not run in its engine", now)
            return
        name = peer.decode(errors="replace").rsplit("/", 1)[0]
        live = self._state.ledger.requests.get(request_id)
        if live is not None and live.model.name != name:
            raise ImpossibleMessageError(f"request {request_id} is in no engine of {name}")
        if not self._state.ledger.detached(request_id, message.incarnation, len(message.output_tokens), now):
            # It was cancelled meanwhile, and this is the engine's answer to that.
            self._state.memory.drop(name, message.key)
            model = self._state.ledger.by_name.get(name)
            if model is not None and not model.decode.inside:
                self._state.ledger.lease_void(name, Phase.DECODE, now)
            return
        held = self._table.held[request_id]
        held.hand_off = HandOff(message.key, message.computed_tokens)
        held.output_tokens = message.output_tokens
        self._table.staged(request_id, MOVE, now)
        if move is None or message.since != move.until:
            # The move was given up meanwhile.
            self._state.ledger.stays(request_id, now)
            self._table.staged(request_id, HAND_OVER, now)
            return
        move.detached_at = now
        move.total = len(move.states) - (-message.computed_tokens // move.live.model.block_tokens)
        blocks = message.blocks[: move.total - move.until]
        self._stage(move, move.until, blocks, move.total, MoveStep.LAST, now)

    def _commit(self, move: RequestMove, now: float) -> None:
        live, held = move.live, self._table.held[move.live.request_id]
        gateway = self._table.gateways[held.gateway]
        move.step, move.deadline = MoveStep.COMMITTING, now + SILENCE_SECONDS
        assert held.hand_off is not None, "its engine has detached it"
        request = Moving(
            request_id=live.request_id,
            attempt=held.attempt,
            gateway_epoch=gateway.epoch,
            request=held.request,
            waited=max(0.0, now - live.arrival),
            output_tokens=held.output_tokens,
            computed_tokens=held.hand_off.computed_tokens,
            moves=held.moves + 1,
        )
        self._state.send(MIGRATOR, MoveCommit(move.name, request))

    def _committed(self, move: RequestMove, now: float) -> None:
        live, model = move.live, move.live.model
        self.moves.remove(move)
        if self._state.ledger.requests.get(live.request_id) is not live or not self._state.ledger.moved(
            live.request_id, now
        ):
            return  # cancelled in the same batch of messages
        held = self._table.held[live.request_id]
        self._table.forget(live.request_id)
        self._table.drop_hand_off(held, model)
        self._departed.append((now + FAREWELL_SECONDS, live.request_id, held.attempt, held.gateway))
        downtime = self.downtimes.setdefault(model.name, Downtime())
        downtime.add(now - move.detached_at)
        self._state.timeline.moved(model.name, move.destination, downtime.last, now)
        self.pairs.arrived(model.name, move.destination, move.usage, live.execution, now)
        log.info("%s moved to %s, stood still for %.1f ms", live.request_id, move.destination, downtime.last * 1e3)

    # ------------------------------------------------------------ the end

    def _fail(self, move: RequestMove, reason: str, now: float, uncertain: bool = False, tell: bool = True) -> None:
        """The move is over. Its request stays, or is lost if the other unit may have it (`uncertain`)."""
        request_id, model = move.live.request_id, move.live.model
        log.warning("%s of %s does not move to %s: %s", request_id, model.name, move.destination, reason)
        expected = move.as_expected(self._state.ledger)
        detached = move.detached
        self._end(move, now, tell and move.step is not MoveStep.COMMITTING)
        if not (expected and detached):
            return  # it is in its engine, or not here at all
        held = self._table.held[request_id]
        if not uncertain and held.hand_off is not None:
            self._state.ledger.stays(request_id, now)
            self._table.staged(request_id, HAND_OVER, now)
            return
        self._table.drop_hand_off(held, model)
        why = f"its unit did not hear whether {move.destination} has it" if uncertain else "the memory manager died"
        self._table.tell_lost(self._state.ledger.lost([request_id], now), why)

    def _end(self, move: RequestMove, now: float, tell: bool) -> None:
        """Forget the move, and count it as aborted; the migrator is told if it may know of it."""
        self.moves.remove(move)
        model = move.live.model
        model.tally.moves_aborted += 1
        if tell and move.stages:
            self._state.send(MIGRATOR, MoveAbort(move.name))
        self.pairs.failed(model.name, move.destination, move.live.request_id, now)

    def _tell_engine(self, move: RequestMove, message: Message) -> None:
        model = move.live.model
        self._state.send(f"{model.name}/{model.decode.phase}".encode(), message)

    def _page_bytes(self, model: ModelState) -> int:
        return self._state.unit_spec.pool(model.pool.profile.name).page_bytes
