"""Which arrangement of prefill and decode suits a model: each is simulated on the same devices under the same load.

`compare` does it for one model, `choose_phases` for all of a fleet that say `phases: auto`. It is EcoServe's Table 5
(arXiv:2504.18154) made computable: what a table of words says of strategies in general is worked out for one model, its
load, its objectives and its devices.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from muxserve.config import Fleet
from muxserve.costs.latency import CostError, LatencyModel
from muxserve.metrics.definitions import percentile
from muxserve.planning.arrangements import ARRANGEMENTS, arrangement, is_open
from muxserve.planning.arrangements.base import (
    DevicePool,
    NoPlaceError,
    ReplicaLayout,
    SimulatedLayout,
    Wanted,
    wanted_of,
)
from muxserve.planning.trial import COARSE, QUEUED, WARM, GoodputSearch, Outcome, TrialLoad, point_of
from muxserve.simulator import SimulationError
from muxserve.spec import PhasesName
from placement.demand import Demand
from placement.format import enumerate_words, format_size

# Told how far it is: a part in 0..1, and what is being simulated.
Tell = Callable[[float, str], None]
SHARE = 0.9
# Goodputs that differ by less are equal: then the simpler arrangement is taken.
EQUAL = 0.05
# Layouts of one arrangement that are looked at; more of them only come up on dozens of devices.
_LAYOUTS = 6


# ---------------------------------------------------------------- figures


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of times, seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class ArrangementFigures:
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

    layout: ReplicaLayout
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
    figures: ArrangementFigures | None
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
    def layout(self) -> ReplicaLayout | None:
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


def silent(part: float, text: str) -> None:
    """Nobody listens."""


# ---------------------------------------------------------------- one model


def compare(
    wanted: Wanted,
    pool: DevicePool,
    latency: LatencyModel,
    seed: int = 0,
    tell: Tell = silent,
    only: Sequence[PhasesName] = ARRANGEMENTS,
    goodputs: bool = True,
) -> Comparison:
    """Simulate all arrangements (or `only` some) of one model on the same devices, under the same seeded load. The same
    arguments give the same figures. Without `goodputs` the goodput of the layout that is taken is not looked for (0),
    and its figures are of fewer requests: for who only wants to know the layout."""
    load = TrialLoad(wanted, seed)
    found: list[Compared] = []
    simulations = 0
    for number, phases in enumerate(only):

        def told(part: float, text: str, number: int = number, phases: str = phases) -> None:
            tell((number + part) / len(only), f"{wanted.demand.name}: {phases}, {text}")

        try:
            figures, count = _arrangement(wanted, pool, latency, load, phases, told, goodputs)
            found.append(Compared(phases, figures))
            simulations += count
        except (NoPlaceError, CostError, SimulationError) as error:
            found.append(Compared(phases, None, str(error)))
    recommended, reason = recommend(found)
    return Comparison(
        wanted.demand.name, pool.words, wanted.demand.rate, tuple(found), recommended, reason, _notes(wanted, found),
        simulations,
    )  # fmt: skip


def _arrangement(
    wanted: Wanted,
    pool: DevicePool,
    latency: LatencyModel,
    load: TrialLoad,
    phases: PhasesName,
    tell: Tell,
    goodputs: bool,
) -> tuple[ArrangementFigures, int]:
    """The best layout of an arrangement, and how many simulations that took.

    Raises:
        NoPlaceError: none is possible.
        CostError: nothing is known of the model on these devices.
    """
    places = places_of(wanted, pool, phases)
    rate = wanted.demand.rate
    start, place, simulations = point_of(rate, COARSE), places[0], 0
    if len(places) > 1:
        # A brief look at each layout, on the coarse grid; the next one begins where the last one ended.
        most = -1.0
        for number, each in enumerate(places):
            tell(0.7 * number / len(places), each.layout.words)
            search = GoodputSearch(wanted, pool, each, latency, load, brief=True)
            try:
                found = search.goodput(SHARE, start, COARSE)
            except NoPlaceError:
                # Another one may be possible. If none is, the first says why when it is looked at below.
                continue
            simulations += search.simulations
            if found > most:
                place, most = each, found
            start = point_of(found, COARSE) if found else start
        start = point_of(most) if most > 0 else start
    tell(0.75, place.layout.words)
    best = GoodputSearch(wanted, pool, place, latency, load, brief=not goodputs)
    goodput = best.goodput(SHARE, start) if goodputs else 0.0
    tell(0.9, place.layout.words)
    smooth = goodput
    if arrangement(phases).ring(wanted) is not None and goodput:
        smooth = best.goodput(SHARE, point_of(goodput), switch=False)
    figures = _figures(wanted, best, goodput, smooth, rate)
    return figures, simulations + best.simulations + 1


def places_of(wanted: Wanted, pool: DevicePool, phases: PhasesName) -> list[SimulatedLayout]:
    """The layouts of an arrangement that are possible, of those that leave the fewest devices idle; on many devices the
    ones whose parts are neither smallest nor largest are left out.

    Raises:
        NoPlaceError: none is possible.
    """
    if arrangement(phases).needs_objectives and not wanted.has_objectives:
        raise NoPlaceError("needs slo.ttft_ms and slo.tpot_ms: prefill rolls on when the next one would miss them")
    places: dict[ReplicaLayout, SimulatedLayout] = {}
    first = ""
    for layout in pool.layouts(wanted, phases):
        if places and layout.devices < max(each.devices for each in places):
            break
        try:
            places[layout] = pool.place(wanted, layout)
        except NoPlaceError as error:
            first = first or str(error)
            # What is said of the largest part is the most that could be done.
            if layout.devices == pool.devices:
                first = str(error)
    if not places:
        raise NoPlaceError(first)
    kept = largest_first(list(places))
    if len(kept) > _LAYOUTS:
        # Fewest devices per replica first: less goes over links. What is kept spans all of them.
        kept.sort(key=lambda layout: (layout.tp * layout.stages, layout.tp))
        kept = [kept[round(n * (len(kept) - 1) / (_LAYOUTS - 1))] for n in range(_LAYOUTS)]
    return [places[layout] for layout in kept]


def largest_first(layouts: Sequence[ReplicaLayout]) -> list[ReplicaLayout]:
    """Those that leave the fewest devices idle, in their order."""
    most = max((layout.devices for layout in layouts), default=0)
    return [layout for layout in layouts if layout.devices == most]


def _figures(wanted: Wanted, search: GoodputSearch, goodput: float, smooth: float, rate: float) -> ArrangementFigures:
    trial = search.at(rate)
    place, demand = search.place, wanted.demand
    counted = [each for each in trial.outcomes if each.arrival >= WARM * search.seconds(rate)]
    devices = min(place.layout.devices, search.devices)
    return ArrangementFigures(
        layout=place.layout,
        devices=devices,
        goodput=goodput,
        goodput_smooth=smooth,
        attainment=search.part_met(trial, rate, True),
        attainment_smooth=search.part_met(trial, rate, False),
        ttft=_spread(counted, 0, False),
        ttft_with_wait=_spread(counted, 0, True),
        tpot=_spread(counted, 1, False),
        tpot_after_wait=_spread(counted, 1, True),
        served=_served(trial.outcomes, search.seconds(rate), rate),
        running=rate * statistics.fmean(each.latency for each in counted) if counted else 0.0,
        preemptions=trial.preemptions,
        balance=trial.balance,
        bubbles=trial.bubbles,
        link_bytes=place.link_bytes,
        network_bytes=place.network_bytes,
        device_hours=devices * 1000 / (SHARE * goodput * 3600) if goodput else None,
        tokens_per_request=demand.prompt_tokens + demand.output_tokens,
    )


def _spread(outcomes: Sequence[Outcome], which: int, switch: bool) -> Spread | None:
    found = [times for each in outcomes if (times := each.times(switch)) is not None]
    values = [value for times in found if (value := times[which]) is not None]
    if not values:
        return None
    return Spread(statistics.fmean(values), *(percentile(values, share) for share in (0.5, 0.9, 0.99)))


def _served(outcomes: Sequence[Outcome], seconds: float, rate: float) -> float:
    """Requests answered per second while they come: as many as come, within what a queue that does not grow may hold
    back, or those that ended in the second half."""
    half = seconds / 2
    ended = sum(half <= each.ended < seconds for each in outcomes)
    came = sum(half <= each.arrival < seconds for each in outcomes)
    part = ended / came if came else 1.0
    return rate if part > 0.95 else part * rate


def _notes(wanted: Wanted, found: Sequence[Compared]) -> tuple[str, ...]:
    demand, notes = wanted.demand, []
    if demand.slo_ttft is None:
        notes.append(
            f"{demand.name} has no slo.ttft_ms: a first token after more than {QUEUED:g} s counts as missed, so that a "
            "queue that grows is seen"
        )
    seats = {each.phases: demand.max_num_seqs * each.figures.layout.replicas for each in found if each.figures}
    if len(set(seats.values())) > 1:
        notes.append(
            f"max_num_seqs ({demand.max_num_seqs}) is of each replica, so that at most "
            f"{enumerate_words([f'{count} requests run at once {name}' for name, count in seats.items()])}"
        )
    return tuple(notes)


def recommend(found: Sequence[Compared]) -> tuple[PhasesName, str]:
    """The arrangement with the highest goodput; of those within 5 % of it the simplest, in the order of
    `ARRANGEMENTS`. And why, in a sentence."""
    possible = [(each.phases, each.figures) for each in found if each.figures is not None]
    if not possible:
        return "multiplexed", "no arrangement is possible on these devices; see the reasons"
    if len(possible) == 1:
        return possible[0][0], f"{possible[0][0]} is the only arrangement that is possible"
    most = max(figures.goodput for _, figures in possible)
    if most <= 0.0:
        name, figures = max(possible, key=lambda each: each[1].attainment)
        return name, (
            f"none serves any rate with {SHARE:.0%} of the requests within the objectives; at the rate asked for "
            f"{name} has most of them within, {figures.attainment:.0%}"
        )
    equal = [(name, figures) for name, figures in possible if figures.goodput >= (1.0 - EQUAL) * most]
    name, figures = equal[0]
    reason = f"{name} serves {figures.goodput:.3g} requests/s with {SHARE:.0%} of them within the objectives"
    behind = [f"{other} {each.goodput:.3g}" for other, each in possible if other not in {n for n, _ in equal}]
    if len(equal) > 1:
        others = " and ".join(other for other, _ in equal[1:])
        reason += f", {others} within {EQUAL:.0%} of that, and {name} is simpler"
    if behind:
        reason += f" ({', '.join(behind)})"
    if figures.goodput_smooth < (1.0 - EQUAL) * figures.goodput:
        reason += (
            f"; the wait for the phase switch counts as time to first token there, as time per output token it is "
            f"{figures.goodput_smooth:.3g}"
        )
    return name, reason


# ---------------------------------------------------------------- a fleet


def choose_phases(
    fleet: Fleet,
    demands: Sequence[Demand],
    pool_of: Callable[[str], DevicePool],
    latency: LatencyModel,
    *,
    free: bool = False,
    seed: int = 0,
    tell: Tell = silent,
    compared: Mapping[str, Comparison] | None = None,
) -> dict[str, ChosenPhases]:
    """The arrangement of every model of the fleet that says `phases: auto`, by its name.

    Args:
        demands: of the fleet's models, in their order (`planning.fleets.demands_of`).
        pool_of: the devices that the model of a name has (`planning.device_pool`).
        free: the number of replicas may be chosen where the file leaves it at one, as when a plan is made; otherwise it
            is the file's.
        compared: what has been compared already.
    """
    asked = [(model, demand) for model, demand in zip(fleet.models, demands, strict=True) if is_open(model)]
    chosen: dict[str, ChosenPhases] = {}
    for number, (model, demand) in enumerate(asked):

        def told(part: float, text: str, number: int = number) -> None:
            tell((number + part) / len(asked), text)

        known = (compared or {}).get(model.name)
        comparison = known or compare(wanted_of(model, demand, free), pool_of(model.name), latency, seed, told)
        chosen[model.name] = chosen_by(comparison)
    return chosen


def chosen_by(comparison: Comparison) -> ChosenPhases:
    """What a comparison recommends."""
    layout = comparison.layout or ReplicaLayout("multiplexed", 1, 1, 1)
    return ChosenPhases(
        comparison.recommended, layout.replicas, layout.stages, layout.tp, comparison.reason, comparison
    )


# ---------------------------------------------------------------- tables

# The first two are text, the others numbers.
COLUMNS = (
    "arrangement",
    "layout",
    "goodput",
    "within",
    "TTFT p50/p90/p99",
    "with wait p99",
    "TPOT p50/p90/p99",
    "bubbles",
    "balance",
    "device-h per 1000",
    "links, per token",
    "links, at the goodput",
)
WITHIN = COLUMNS.index("within")


def cells(compared: Compared) -> list[str]:
    """One row, in the order of `COLUMNS`."""
    if compared.figures is None:
        return [compared.phases, "not possible"] + [""] * (len(COLUMNS) - 2)
    return [compared.phases, *_cells(compared.figures)]


def format_seconds(seconds: float | None) -> str:
    """`12 ms`, `1.25 s`; `-` for what was not measured, or is not there."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def format_part(part: float) -> str:
    """`97%`, `99.7%`."""
    return f"{part:.0%}" if part < 0.995 else f"{part:.1%}"


def _cells(figures: ArrangementFigures) -> list[str]:
    wait = figures.ttft_with_wait
    return [
        figures.layout.words,
        f"{figures.goodput:.3g}/s" if figures.goodput else "0",
        format_part(figures.attainment),
        _spread_words(figures.ttft),
        format_seconds(wait.p99) if wait else "-",
        _spread_words(figures.tpot),
        " ".join(f"{part:.0%}" for part in figures.bubbles) or "-",
        f"{figures.balance:.2f}",
        "-" if figures.device_hours is None else f"{figures.device_hours:.3g}",
        format_size(int(figures.link_bytes)) if figures.link_bytes else "-",
        f"{figures.link_rate / 1e9:.3g} GB/s" if figures.link_bytes else "-",
    ]


def _spread_words(times: Spread | None) -> str:
    return "-" if times is None else " / ".join(format_seconds(each) for each in (times.p50, times.p90, times.p99))
