"""A unit whose models do not all fit: which of them are awake is decided by `muxserve.scheduling.residency`, the policy
that decides it live. Requests for the others wait before the unit's own queue, as they do in the global scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from muxserve.scheduling.residency import Residence, Residency, Sleep, Standing, Wake
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.result import ResidencyResult, UnitResult
from muxserve.simulator.scheduled import ScheduledUnit

# How often the policy is asked while requests wait and nothing else happens: its rules know of times that pass.
ASKED_SECONDS = 0.1


@dataclass(slots=True)
class ResidentModel:
    """One model: where it is and since when, how many of its requests the unit has, and those that wait for it. What
    happened to it: wakes, the times that it was put to sleep, and requests that waited for it."""

    name: str
    residence: Residence
    since: float = 0.0
    running: int = 0
    waiting: list[SimRequest] = field(default_factory=list)
    wakes: int = 0
    sleeps: int = 0
    waited: int = 0

    def become(self, residence: Residence, now: float) -> None:
        """It is there now."""
        self.residence, self.since = residence, now


class ResidentUnit(ScheduledUnit):
    """A scheduled unit with `residency`. A model that is put to sleep finishes what the unit has of it first.

    Raises:
        ValueError: it has no residency, or that of other models.
    """

    def _begin(self) -> None:
        super()._begin()
        residency = self.spec.residency
        if residency is None or set(residency.models) != {model.name for model in self.spec.models}:
            raise ValueError(f"unit {self.spec.name} needs to know what each of its models takes")
        self.residency = residency
        self.awake = Residency(residency.rules, residency.models)
        self.residents = {
            name: ResidentModel(name, Residence.AWAKE if name in residency.awake else Residence.ASLEEP, float("-inf"))
            for name in residency.models
        }
        self.peak_bytes = self._taken()
        self._there: set[str] = set()
        self._asks = False

    # ------------------------------------------------------------ requests

    def enqueue(self, request: SimRequest, now: float) -> None:
        model = self.residents[request.model]
        self.awake.arrived(request.model, now)
        if model.residence is Residence.AWAKE:
            self._serve(model, request, now)
            return
        model.waiting.append(request)
        model.waited += 1
        self._decide(now)

    def refuse(self, request: SimRequest, now: float, error: str) -> None:
        super().refuse(request, now, error)
        self._left(request, now)

    def finished(self, request: SimRequest, now: float) -> None:
        super().finished(request, now)
        self._left(request, now)

    def _serve(self, model: ResidentModel, request: SimRequest, now: float) -> None:
        self._there.add(request.request_id)
        model.running += 1
        super().enqueue(request, now)

    def _serve_waiting(self, model: ResidentModel, now: float) -> None:
        waiting, model.waiting = model.waiting, []
        for request in waiting:
            self._serve(model, request, now)

    def _left(self, request: SimRequest, now: float) -> None:
        if request.request_id in self._there:  # not one that was refused before it was served
            self._there.remove(request.request_id)
            model = self.residents[request.model]
            model.running -= 1
            self._sleep_if_done(model, now)

    # ------------------------------------------------------------ what is decided

    def _sleep_if_done(self, model: ResidentModel, now: float) -> None:
        if model.residence is Residence.LEAVING and not model.running:
            self.clock.at(now + self.residency.sleep_seconds, partial(self._asleep, model))

    def _asleep(self, model: ResidentModel, now: float) -> None:
        if model.residence is Residence.LEAVING and not model.running:
            model.become(Residence.ASLEEP, now)
            self._decide(now)

    def _woke(self, model: ResidentModel, now: float) -> None:
        self.awake.woke(model.name, now - model.since)
        model.become(Residence.AWAKE, now)
        self._serve_waiting(model, now)
        self._decide(now)

    def _decide(self, now: float) -> None:
        standings = [
            Standing(each.name, each.residence, each.since, each.running, [r.arrival for r in each.waiting])
            for each in self.residents.values()
        ]
        for change in self.awake.decide(now, None, standings):
            model = self.residents[change.model]
            if isinstance(change, Wake):
                model.wakes += 1
                model.become(Residence.WAKING, now)
                seconds = self.residency.models[model.name].seconds
                self.clock.at(now + seconds, partial(self._woke, model))
            elif isinstance(change, Sleep):
                model.sleeps += 1
                model.become(Residence.LEAVING, now)
                self._sleep_if_done(model, now)
            else:
                model.sleeps -= 1
                model.become(Residence.AWAKE, now)
                self._serve_waiting(model, now)
        self.peak_bytes = max(self.peak_bytes, self._taken())
        if not self._asks and any(each.waiting for each in self.residents.values()):
            self._asks = True
            self.clock.at(now + ASKED_SECONDS, self._ask)

    def _ask(self, now: float) -> None:
        self._asks = False
        if any(each.waiting for each in self.residents.values()):
            self._decide(now)

    def _taken(self) -> int:
        costs = self.residency.models
        held = sum(costs[each.name].bytes for each in self.residents.values() if each.residence is not Residence.ASLEEP)
        waking = (costs[each.name].load_bytes for each in self.residents.values() if each.residence is Residence.WAKING)
        return self.residency.rules.fixed + held + sum(waking)

    def result(self) -> UnitResult:
        found = super().result()
        found.residency = ResidencyResult(
            wakes=sum(each.wakes for each in self.residents.values()),
            sleeps=sum(each.sleeps for each in self.residents.values()),
            waited=sum(each.waited for each in self.residents.values()),
            peak_bytes=self.peak_bytes,
        )
        return found
