"""Predicted costs held against the steps that engines report, and corrected by them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import structs

from muxserve.costs.correction import PhaseCorrection, PhaseName
from muxserve.costs.steps import StepSums
from muxserve.scheduling.types import WHOLE
from muxserve.spec import UnitSpec
from muxserve.wire import StepReport

# Steps of a pipeline that are looked at together: what a stage computed is reported some micro-batches after they
# began.
PIPELINE_STEPS = 32


@dataclass(slots=True)
class _Model:
    """One model: its phases' corrections; of a pipeline the steps that were not looked at yet, and seconds of each
    stage."""

    phases: dict[PhaseName, PhaseCorrection]
    prefills: StepSums = field(default_factory=StepSums)
    decodes: StepSums = field(default_factory=StepSums)
    computed: list[float] = field(default_factory=list)
    stages: list[float] = field(default_factory=list)


class UnitCosts:
    """What the unit learns of the costs of its models' steps."""

    def __init__(self, unit_spec: UnitSpec) -> None:
        self._models: dict[str, _Model] = {}
        self.join(unit_spec)

    def join(self, unit_spec: UnitSpec) -> None:
        """The unit has these models now; of those that it had, what was learnt stays."""
        phases: Iterable[PhaseName] = ("prefill", "decode")
        for name, engines in unit_spec.costs.items():
            if name not in self._models:
                ordered = sorted(engines, key=lambda engine: engine.share)
                self._models[name] = _Model({phase: PhaseCorrection(phase, ordered) for phase in phases})

    def reported(self, model: str, share: int, report: StepReport) -> None:
        """An engine, whose lease has that share, took steps."""
        known = self._models.get(model)
        if known is None or not share:
            return
        if report.computed:
            self._computed(known, share / WHOLE, report)
        else:
            _observe(known, report.prefills, report.decodes, share / WHOLE)

    def _computed(self, model: _Model, share: float, report: StepReport) -> None:
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
            _observe(model, prefills, decodes, share)

    def state(self, model: str) -> dict[str, dict[str, object]]:
        """Learnt corrections of a model, JSON-ready, by phase; phases without a step are left out."""
        known = self._models.get(model)
        if known is None:
            return {}
        learnt = {phase: each.correction for phase, each in known.phases.items()}
        return {str(phase): structs.asdict(each) for phase, each in learnt.items() if each.steps}

    def stages(self, model: str) -> list[float]:
        """Seconds that each stage of a pipeline computed, over the mean of all stages."""
        known = self._models.get(model)
        if known is None or not sum(known.stages):
            return []
        mean = sum(known.stages) / len(known.stages)
        return [seconds / mean for seconds in known.stages]


def _observe(model: _Model, prefills: StepSums | None, decodes: StepSums | None, share: float) -> None:
    """Learn from these steps."""
    decode = model.phases["decode"]
    if decodes is not None and decodes.steps:
        decode.observe(decodes, share)
    if prefills is not None and prefills.steps:
        model.phases["prefill"].observe(prefills, share, decode)
