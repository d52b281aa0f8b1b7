"""Predicted costs held against the steps that engines report, and corrected by them."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import structs

from muxserve.costs.activity import Activity
from muxserve.costs.correction import CorrectionState, PhaseCorrection, PhaseName
from muxserve.costs.pace import Pace, PaceMeter
from muxserve.costs.profile import EngineProfile
from muxserve.costs.recent import FEWEST, MOST, recent_moments
from muxserve.costs.steps import StepSums
from muxserve.scheduling.types import WHOLE
from muxserve.spec import UnitSpec
from muxserve.wire import StepReport

# Steps of a pipeline that are looked at together: what a stage computed is told some micro-batches after they began.
PIPELINE_STEPS = 32
# Seconds after which a step counts e times less for `Correction.lately`.
LATELY_SECONDS = 60.0


class LearntModel(msgspec.Struct, frozen=True):
    """What was learnt of one model beside the prediction with the digest `predicted`: its phases, and seconds of each
    stage of a pipeline."""

    predicted: str
    phases: dict[PhaseName, CorrectionState]
    stages: list[float]


@dataclass(slots=True)
class _Model:
    """One model: the digest of what was predicted, its phases' corrections, and how many steps each took lately, as of
    `at`. Of a pipeline what was not looked at yet, and seconds of each stage."""

    predicted: str
    phases: dict[PhaseName, PhaseCorrection]
    lately: dict[PhaseName, float] = field(default_factory=dict)
    at: float = 0.0
    prefills: StepSums = field(default_factory=StepSums)
    decodes: StepSums = field(default_factory=StepSums)
    computed: list[float] = field(default_factory=list)
    stages: list[float] = field(default_factory=list)

    def lately_at(self, now: float) -> dict[PhaseName, float]:
        """Steps of the last minute or so."""
        kept = math.exp((self.at - now) / LATELY_SECONDS) if now > self.at else 1.0
        return {phase: kept * steps for phase, steps in self.lately.items()}

    def took(self, report: StepReport, now: float) -> None:
        """It took these steps."""
        self.lately, self.at = self.lately_at(now), now
        for phase, steps in _steps(report).items():
            self.lately[phase] = self.lately.get(phase, 0.0) + steps


class UnitCosts:
    """What the unit learns of the costs of its models' steps.

    It is told of every change of the shares that are leased out, and of those that other units on the same device
    leased out meanwhile, so that it knows which part of the device an engine's neighbours had while it ran, and which
    had rested before.
    """

    def __init__(self, unit_spec: UnitSpec, now: float) -> None:
        self._models: dict[str, _Model] = {}
        self.join(unit_spec)
        # Shares that are leased out, summed up over time.
        self._integral = 0.0
        self._at = now
        self._elsewhere = 0.0
        self._activity = Activity(now)
        self._pace = PaceMeter()
        # Of each engine, as of when it last began or reported: the time, the sum, and what had rested.
        self._marks: dict[bytes, tuple[float, float, float]] = {}
        # When engines got a lease of which they have told nothing yet; and how long it took until they did, beyond
        # steps, each with the time.
        self._granted: dict[bytes, float] = {}
        self._turns: deque[tuple[float, float]] = deque(maxlen=MOST)
        # That something was learnt from.
        self.reports = 0

    def join(self, unit_spec: UnitSpec) -> None:
        """The unit has these models now; of those that it had, what was learnt stays."""
        phases: Iterable[PhaseName] = ("prefill", "decode")
        for name, engines in unit_spec.costs.items():
            if name not in self._models:
                ordered = sorted(engines, key=lambda engine: engine.share)
                learnt = {phase: PhaseCorrection(phase, ordered) for phase in phases}
                self._models[name] = _Model(_digest(ordered), learnt)

    def passed(self, share_used: int, now: float, elsewhere: float = 0.0) -> None:
        """So much of the device, in millionths, was leased out until now; and what other units leased out, summed up
        over time (seconds), is `elsewhere` now."""
        used = share_used * (now - self._at) + max(0.0, elsewhere - self._elsewhere)
        if now > self._at:
            self._activity.passed(now, used / (now - self._at) / WHOLE)
        self._integral += used
        self._at, self._elsewhere = now, elsewhere

    def began(self, engine: bytes) -> None:
        """An engine that had no lease gets one now."""
        self._mark(engine)
        self._granted[engine] = self._at

    def _mark(self, engine: bytes) -> None:
        self._marks[engine] = self._as_of_now()

    def _as_of_now(self) -> tuple[float, float, float]:
        return self._at, self._integral, self._activity.rested(self._at, 0.0)

    def reported(self, engine: bytes, model: str, share: int, report: StepReport) -> None:
        """An engine, whose lease has that share, took steps."""
        since, integral, rested = self._marks.get(engine) or self._as_of_now()
        self._mark(engine)
        granted = self._granted.pop(engine, None)
        if granted is not None and report.elapsed and not report.computed:
            self._turns.append((self._at, max(0.0, self._at - granted - report.elapsed)))
        known = self._models.get(model)
        if known is None or not share:
            return
        self.reports += 1
        known.took(report, self._at)
        others = 0.0
        if self._at > since:
            others = max(0.0, (self._integral - integral) / (self._at - since) - share) / WHOLE
        if report.computed:
            self._computed(known, share / WHOLE, others, report)
        else:
            expected = _observe(known, report.prefills, report.decodes, share / WHOLE, others, rested)
            sums = (report.prefills, report.decodes)
            self._pace.told(self._at, sum(each.seconds for each in sums if each is not None), expected)
            if report.prefills is not None and report.prefills.steps == 1 and report.decodes is None:
                self._pace.prefilled(report.prefills.seconds, expected)
            # Of a pipeline it goes by while stages compute.
            _between(known, report)

    def _computed(self, model: _Model, share: float, others: float, report: StepReport) -> None:
        """Steps of a pipeline: a step is what all stages compute for it."""
        model.computed.append(sum(report.computed))
        fresh = model.stages or [0.0] * len(report.computed)
        model.stages = [a + b for a, b in zip(fresh, report.computed, strict=False)]
        for sums, new in ((model.prefills, report.prefills), (model.decodes, report.decodes)):
            if new is not None:
                sums.merge(new)
        if model.prefills.steps + model.decodes.steps < PIPELINE_STEPS:
            return
        seconds, model.computed = sum(model.computed), []
        prefills, model.prefills = model.prefills, StepSums()
        decodes, model.decodes = model.decodes, StepSums()
        # Both kinds are in the stages at once: each gets the part of the time that it should have taken.
        long = model.phases["prefill"].seconds(prefills, share)
        whole = long + model.phases["decode"].seconds(decodes, share)
        if whole > 0.0 and seconds > 0.0:
            prefills.seconds = seconds * long / whole
            decodes.seconds = seconds - prefills.seconds
            _observe(model, prefills, decodes, share, others, 0.0)

    @property
    def pace(self) -> Pace | None:
        """How the device's speed varies; None: not known yet."""
        return self._pace.pace

    @property
    def turn(self) -> float | None:
        """Seconds from granting a lease to hearing of its first steps, beyond these; None: not known yet."""
        return recent_moments(self._turns)[0] if len(self._turns) >= FEWEST else None

    def state(self, model: str, now: float) -> dict[str, dict[str, object]]:
        """What was learnt of a model until now, JSON-ready, by phase; of phases without a step nothing."""
        known = self._models.get(model)
        if known is None:
            return {}
        lately = known.lately_at(now)
        learnt = {
            phase: structs.replace(each.correction, lately=round(lately.get(phase, 0.0), 6))
            for phase, each in known.phases.items()
        }
        return {str(phase): structs.asdict(each) for phase, each in learnt.items() if each.steps}

    def learnt(self) -> dict[str, LearntModel]:
        """Everything that was learnt, by model, for `restore`."""
        return {
            name: LearntModel(
                known.predicted, {phase: each.state() for phase, each in known.phases.items()}, [*known.stages]
            )
            for name, known in self._models.items()
        }

    def restore(self, learnt: Mapping[str, LearntModel]) -> list[str]:
        """Go on from what was learnt before; returns the models of which that holds: those of the unit of which the
        same was predicted.

        Raises:
            ValueError: a model's phases are not what phases are.
        """
        found = []
        for name, each in learnt.items():
            known = self._models.get(name)
            if known is None or known.predicted != each.predicted:
                continue
            for phase, state in each.phases.items():
                known.phases[phase].restore(state)
            known.stages = [*each.stages]
            found.append(name)
        return found

    def stages(self, model: str) -> list[float]:
        """Of a pipeline: seconds that each stage computed, over the mean of all."""
        known = self._models.get(model)
        if known is None or not sum(known.stages):
            return []
        mean = sum(known.stages) / len(known.stages)
        return [seconds / mean for seconds in known.stages]


def _digest(engines: Sequence[EngineProfile]) -> str:
    return hashlib.sha256(msgspec.msgpack.encode(engines)).hexdigest()


def _steps(report: StepReport) -> dict[PhaseName, int]:
    """How many steps of each phase it tells of; of phases without any nothing."""
    sums: dict[PhaseName, StepSums | None] = {"prefill": report.prefills, "decode": report.decodes}
    return {phase: each.steps for phase, each in sums.items() if each is not None}


def _between(model: _Model, report: StepReport) -> None:
    steps = _steps(report)
    for phase, count in steps.items():
        model.phases[phase].observe_between(report.between * count / sum(steps.values()), count)


def _observe(
    model: _Model, prefills: StepSums | None, decodes: StepSums | None, share: float, others: float, rested: float
) -> float:
    """Learn from these steps; returns the seconds that were to be expected."""
    decode, expected = model.phases["decode"], 0.0
    if decodes is not None and decodes.steps:
        expected += decode.observe(decodes, share, others, paused=decodes.lost)
    if prefills is not None and prefills.steps:
        expected += model.phases["prefill"].observe(prefills, share, others, decode, rested)
    return expected
