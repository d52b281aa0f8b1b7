"""A model that memory decides on: it is woken and put to sleep as `MemoryBalance` says, not by its own load."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from muxserve.global_scheduler.model_scheduler import ModelScheduler, request_key
from muxserve.global_scheduler.model_scheduler_base import Rules
from muxserve.global_scheduler.outbox import Outbox
from muxserve.replicas.decisions import Decision
from muxserve.replicas.global_scheduler import GlobalScheduler
from muxserve.replicas.views import InstanceLoad
from muxserve.scheduling.residency_types import Residence, Standing
from muxserve.scheduling.turns import StoppedRequest, TurnModel, TurnStanding, next_due
from muxserve.wire import Place, StopReplica, Waits

log = logging.getLogger(__name__)

# An order to wake a model that the controller does not know of after so long, or to end one that it has not ended, was
# lost.
LOST_SECONDS, STOP_AGAIN_SECONDS = 5.0, 30.0
# So long after a request was refused for want of its model, that is in trouble.
TROUBLE_SECONDS = 60.0


@dataclass(slots=True)
class WakeFigures:
    """What happened to a model: counts, the last wake in
    seconds and when it ended, requests that were dispatched after a wait for it and what they waited together, requests
    refused, evictions (`ahead`: before anybody waited for the memory) and the reason of the last, and how often its
    turn was over before it had finished."""

    wakes: int = 0
    failed_wakes: int = 0
    last_wake_seconds: float = 0.0
    last_wake_at: float = -math.inf
    waited: int = 0
    waited_seconds: float = 0.0
    refused: int = 0
    evictions: int = 0
    ahead: int = 0
    last_reason: str = ""
    turns: int = 0


@dataclass(slots=True)
class ResidenceNews:
    """What happened to a model since the last decision: the number of requests that came, and the seconds of each wake
    and of each sleep that had nothing to finish first."""

    arrivals: int = 0
    wakes: list[float] = field(default_factory=list)
    sleeps: list[float] = field(default_factory=list)


class ResidentScheduler(ModelScheduler):
    """One model with one replica that may sleep. While it sleeps, and while it finishes what runs before it sleeps, its
    requests wait here."""

    def __init__(self, model: str, rules: Rules, serves: Iterable[str], out: Outbox) -> None:
        super().__init__(model, rules, serves, out)
        self.residence = Residence.AWAKE if self.serves else Residence.ASLEEP
        self.since = -math.inf
        self.figures = WakeFigures()
        self._news = ResidenceNews()
        # Since when it has been put to sleep with nothing to finish first.
        self._idle_since: float | None = None
        # What it was put to sleep for last: see `WakeFigures.ahead`.
        self._ahead = False
        self._now = -math.inf
        # Since when it is awake for its turn; seconds of one of its steps, as last reported.
        self._turn_since = -math.inf
        self._step_seconds = 0.0
        # The next decision may be another one.
        self.changed = True
        # What requests for it wait for, in words, as memory has decided last.
        self.words = ""
        # The bytes beyond the limit that it was woken for.
        self.beyond = 0
        # Why a request was refused last, and when.
        self._refused: tuple[str, float] = "", -math.inf
        # Since when it has been up although the controller has the order to end it.
        self._stop_told = math.inf

    def _make(self) -> GlobalScheduler:
        assert self.rules.scaling is not None, "a model that may sleep has rules for it"
        return GlobalScheduler(self.model, self.rules.levels, migration=None, wake_limit=self.rules.scaling.wake_limit)

    # ------------------------------------------------------------ what memory decides

    def standing(self, now: float, held: int, stopped: Collection[float] | None = None) -> Standing:
        """How the model stands; `held` is its measured memory, bytes. `stopped`: from when on those requests count
        as waiting whose clients have tokens already; None: as all others."""
        running = self._running()
        self._failed = [until for until in self._failed if now < until]
        waiting = [asker.since for asker in self._askers.values() if stopped is None or not asker.place.before]
        # After a start that failed it is tried again later.
        return Standing(
            self.model, self.residence, self.since, running, [] if self._failed else [*waiting, *(stopped or ())], held
        )

    @property
    def asked_anew(self) -> bool:
        """Whether it sleeps, and requests wait of which nothing was computed yet."""
        return self.residence is Residence.ASLEEP and any(not asker.place.before for asker in self._askers.values())

    def stopped(self, ttft: float, tpot: float) -> list[StoppedRequest]:
        """The requests that wait for it and were served before, of a model with these objectives, seconds."""
        return [
            StoppedRequest(asker.since, next_due(before.arrival, before.emitted, ttft, tpot))
            for asker in self._askers.values()
            if (before := asker.place.before)
        ]

    def turn(self, model: TurnModel) -> TurnStanding:
        """How it stands among those that take turns; `model` is what is known of it besides."""
        awake = self.residence in (Residence.AWAKE, Residence.LEAVING)
        return TurnStanding(
            replace(model, step=self._step_seconds),
            self._turn_since if awake else None,
            self.residence is Residence.LEAVING and not self._stopping,
            self._running(),
            bool(self._askers) and self.residence is not Residence.WAKING,
        )

    def end_turn(self) -> None:
        """It is ended without finishing what runs: the unit gives that back, and it waits here for the next turn."""
        log.info("the turn of %s is over: %d requests wait for the next one", self.model, self._running())
        self.figures.turns += 1
        for unit in self.serves:
            self._end(unit)

    def _running(self) -> int:
        return sum(r.load.running + r.load.waiting + r.load.moving_in for r in self._up.values())

    @property
    def waits(self) -> int:
        """Requests that wait for it."""
        return len(self._askers)

    def taken_news(self) -> ResidenceNews:
        """The news since the last call."""
        news, self._news = self._news, ResidenceNews()
        return news

    def waits_for(self, now: float) -> str:
        """What its requests wait for, in words; empty if none waits."""
        if not self._askers:
            return ""
        if failed := [until for until in self._failed if now < until]:
            return f"another try in {max(failed) - now:.0f} s: the last start failed ({self._why_not})"
        if self.residence is Residence.AWAKE:
            return "its unit" if self._up else "its engines, which are being started again"
        return self.words

    def trouble(self, now: float) -> str:
        """Why it is not served as it should be, in words; empty if it is."""
        reason, since = self._refused
        if self.residence is not Residence.AWAKE and now - since < TROUBLE_SECONDS:
            return reason
        return f"it was woken although that exceeds memory.limit by {self.beyond} bytes" if self.beyond else ""

    def refuse(self, reason: str, now: float) -> None:
        """It cannot be woken: whoever waits for it is answered."""
        self._now, self.words = now, ""
        self._refuse_all(f"{self.model} cannot be woken: {reason}", late=True)

    def lost(self, now: float) -> None:
        """The controller knows of no order to wake it."""
        if self.residence is Residence.WAKING and now - self.since > LOST_SECONDS:
            self.start_failed("the order to wake it was lost", now)

    def stop_again(self, now: float) -> None:
        """It still has processes, although the controller may have had the order to end them for long."""
        if not self._stopping:
            return
        self._stop_told = min(now, self._stop_told)
        if now - self._stop_told > STOP_AGAIN_SECONDS:
            log.warning("%s has not ended: telling the controller again", self.model)
            for unit in list(self._stopping):
                self._stopping.discard(unit)
                self._end(unit)
            self._stop_told = now

    def wake(self, now: float, beyond: int = 0) -> None:
        """Have the controller start it; `beyond`: by how many bytes that exceeds the limit."""
        if beyond:
            log.warning("%s is woken although that exceeds the limit of memory by %d bytes", self.model, beyond)
        self.beyond = beyond
        self._leaving.clear()
        self._stopping.clear()
        self._died.clear()
        self.asked = 0
        self._become(Residence.WAKING, now)
        self._start(1)

    def starting(self, now: float) -> None:
        """The controller is starting it, as the scheduler before this one wanted."""
        if self.residence is Residence.ASLEEP:
            self.asked = 1
            self._become(Residence.WAKING, now)

    def put_to_sleep(self, reason: str, ahead: bool, now: float) -> None:
        """Nothing more is begun; what runs is finished, then the controller ends it."""
        log.info("%s is put to sleep: %s", self.model, reason)
        self.figures.evictions += 1
        self.figures.ahead += ahead
        self._ahead = ahead
        self.figures.last_reason = reason
        self._idle_since = None if self._running() else now
        self._become(Residence.LEAVING, now)
        for unit in self.serves:
            if unit in self._up:
                self._carry_out(self._scheduler.retire(unit), now)
            else:
                self._end(unit)

    def stay(self, now: float) -> None:
        """It need not sleep after all, if it is not ending yet."""
        if self._stopping:
            return
        self.figures.evictions -= 1
        self.figures.ahead -= self._ahead
        self._become(Residence.AWAKE, now)
        for unit in self._up:
            self._carry_out(self._scheduler.resume(unit), now)
        self._dispatch(now)

    def ended(self, unit: str, now: float) -> None:
        """Its processes have ended."""
        self._leaving.discard(unit)
        self._stopping.discard(unit)
        if self.residence is Residence.LEAVING and self._idle_since is not None:
            self._news.sleeps.append(now - self._idle_since)
        if self.residence is not Residence.WAKING:
            self._become(Residence.ASLEEP, now)

    # ------------------------------------------------------------ events

    def place(self, peer: bytes, place: Place, now: float) -> None:
        """See `ModelSchedulerBase`."""
        key = request_key(peer, place.request_id)
        # One whose turn was over has been counted.
        self._news.arrivals += key not in self._askers and not place.before
        super().place(peer, place, now)
        if key in self._askers:
            self.changed = True
            self._out.to_client(peer, Waits(place.request_id, asleep=True))

    def change(self, rules: Rules, serves: Iterable[str], now: float) -> None:
        """See `ModelSchedulerBase`."""
        before = set(self.serves)
        super().change(rules, serves, now)
        if self.residence is Residence.ASLEEP and self.serves - before:
            self._become(Residence.WAKING, now)  # as the scheduler before this one wanted

    def start_failed(self, reason: str, now: float, broken: bool = False) -> None:
        """See `ModelSchedulerBase`."""
        self.words = ""
        super().start_failed(reason, now, broken)
        if self.residence is Residence.WAKING:
            self.figures.failed_wakes += 1
            self._become(Residence.ASLEEP, now)

    def _stands(self, unit: str, load: InstanceLoad, came: Sequence[str], now: float) -> None:
        super()._stands(unit, load, came, now)
        self._step_seconds = load.step_seconds or self._step_seconds

    def _came(self, unit: str, load: InstanceLoad, now: float) -> None:
        said = load.terminating
        super()._came(unit, load, now)
        if self.residence is Residence.LEAVING:
            if not said:
                self._carry_out(self._scheduler.retire(unit), now)
            return
        if said and not self._to_go(unit):
            self._carry_out(self._scheduler.resume(unit), now)
        if self.residence is Residence.WAKING:
            seconds = now - self.since
            self._news.wakes.append(seconds)
            self.figures.wakes += 1
            self.figures.last_wake_seconds, self.figures.last_wake_at = seconds, now
            log.info("%s was woken in %.2f s", self.model, seconds)
        self.asked = 0
        if self.residence is not Residence.AWAKE:
            self._become(Residence.AWAKE, now)

    def _went(self, unit: str, now: float) -> None:
        super()._went(unit, now)
        if self.residence is Residence.LEAVING:
            self._end(unit)

    def _end(self, unit: str) -> None:
        if unit not in self._stopping:
            self._stopping.add(unit)
            self._out.to_controller(StopReplica(self.model, unit))

    def _carry_out(self, decisions: Iterable[Decision], now: float) -> None:
        self._now = now
        super()._carry_out(decisions, now)

    def _send_away(self, key: str, unit: str) -> Place | None:
        asker = self._askers.get(key)
        if asker is not None and self._now > asker.since:
            self.figures.waited += 1
            self.figures.waited_seconds += self._now - asker.since
        return super()._send_away(key, unit)

    def _answer(self, key: str, message: str, late: bool) -> None:
        if late and key in self._askers:
            self.figures.refused += 1
            if self.residence is not Residence.AWAKE and self.words and self.words not in message:
                message = f"{message}; it waited for {self.words}"
            self._refused = message, self._now
        super()._answer(key, message, late)

    def _become(self, residence: Residence, now: float) -> None:
        self.residence, self.since, self.changed = residence, now, True
        self._stop_told = math.inf
        if residence is Residence.ASLEEP:
            self.beyond = 0
        if residence is Residence.AWAKE:
            self._turn_since = now
