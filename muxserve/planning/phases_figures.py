"""What is found of the arrangements of one model, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from muxserve.planning.phases_layout import Layout, PhasesName


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of times, seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What an arrangement does, with the layout that has the highest goodput. Rates are requests per second.

    `goodput` is the largest rate at which 90 % of the requests meet their objectives, on a grid of 5 %; the wait for
    the phase switch counts as time to first token there, and as time per output token in `goodput_smooth`. What follows
    is of the rate that the fleet asks for: the part of the requests within the objectives (`attainment`, and
    `attainment_smooth` as above), the times (`ttft` without the wait, `ttft_with_wait`; `tpot` with it, as a client
    sees it, `tpot_after_wait` without), the requests that are answered per second (`served`) and under way on average
    (`running`), the part of a pipeline's active time in which each stage does nothing
    (`bubbles`), the busiest replica's or stage's work over the mean (`balance`). `link_bytes` go between devices for
    each token, `network_bytes` of them between machines. `device_hours` are paid for 1,000 requests within the
    objectives at the goodput (None: it is 0).
    """

    layout: Layout
    devices: int
    goodput: float
    goodput_smooth: float
    attainment: float
    attainment_smooth: float
    ttft: Spread | None
    ttft_with_wait: Spread | None
    tpot: Spread | None
    tpot_after_wait: Spread | None
    served: float
    running: float
    preemptions: int
    balance: float
    bubbles: tuple[float, ...]
    link_bytes: float
    network_bytes: float
    device_hours: float | None
    tokens_per_request: int

    @property
    def link_rate(self) -> float:
        """Bytes per second that all links between devices carry at the goodput."""
        return self.goodput * self.tokens_per_request * self.link_bytes

    @property
    def network_rate(self) -> float:
        """Bytes per second that go between machines at the goodput."""
        return self.goodput * self.tokens_per_request * self.network_bytes


@dataclass(frozen=True, slots=True)
class Compared:
    """One arrangement: its figures, or why it is not possible."""

    phases: PhasesName
    figures: Figures | None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All arrangements of one model on `devices` (in words), and which one is recommended and why. `notes` say what was
    assumed."""

    model: str
    devices: str
    rate: float
    arrangements: tuple[Compared, ...]
    recommended: PhasesName
    reason: str
    notes: tuple[str, ...] = ()
    simulations: int = 0

    def of(self, phases: PhasesName) -> Compared:
        """What was found of one arrangement."""
        return next(each for each in self.arrangements if each.phases == phases)

    @property
    def layout(self) -> Layout | None:
        """That of the recommended arrangement; None if nothing is possible."""
        figures = self.of(self.recommended).figures
        return figures.layout if figures else None


@dataclass(frozen=True, slots=True)
class ChosenPhases:
    """The arrangement for a model that says `phases: auto`: its replicas, stages (1: no pipeline) and tensor-parallel
    degree, and the sentence for the user. `comparison` is what it rests on."""

    phases: PhasesName
    replicas: int
    stages: int
    tp: int
    reason: str
    comparison: Comparison
