"""From a fleet whose models say how prefill and decode are arranged, or leave it open, to devices of their own and to
those that are shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from muxserve.config import Fleet
from muxserve.costs.latency import LatencyModel
from muxserve.planning.phases import Tell, compare, silent
from muxserve.planning.phases_figures import Comparison
from muxserve.planning.phases_layout import ARRANGEMENTS, Ground, Layout, PhasesName, wanted_of
from muxserve.planning.phases_plan import Arranged
from placement.demand import Demand

# Devices of each replica of that layout on the ground of that model, or None: they are not there (any more).
Take = Callable[[Ground, Layout], tuple[tuple[int, ...], ...] | None]


@dataclass(slots=True)
class Arrangements:
    """What became of the models: those that are `arranged` in their own way have devices to themselves, `shared` ones
    are planned together, `missing` ones cannot be served as the file says (and why). `comparisons` are of those that
    leave it open, or were asked for. `notes` are for the user; `impossible` are the demands of what is missing."""

    arranged: list[Arranged] = field(default_factory=list)
    shared: list[Demand] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    impossible: list[Demand] = field(default_factory=list)

    @property
    def phases(self) -> Mapping[str, PhasesName]:
        """The arrangement of every model that has devices to itself."""
        return {each.demand.name: each.place.layout.phases for each in self.arranged}


def concerns(fleet: Fleet, asked: Sequence[str] = ()) -> bool:
    """Whether there is a model that is not simply multiplexed, or to be compared."""
    return bool(asked) or any(model.phases != "multiplexed" for model in fleet.models)


def arrange(
    fleet: Fleet,
    demands: Sequence[Demand],
    ground_of: Callable[[str], Ground],
    take: Take,
    latency: LatencyModel,
    *,
    asked: Sequence[str] = (),
    free: bool = True,
    goodputs: bool = True,
    seed: int = 0,
    tell: Tell = silent,
) -> Arrangements:
    """Compare what is open, and give every model that is rolling or pipelined devices to itself.

    Args:
        demands: of the fleet's models, in their order.
        ground_of: the devices that the model of a name is compared on.
        take: takes devices away.
        asked: models to be compared although the file says how they are arranged; that stays.
        free: see `choose_phases`.
        goodputs: look for the goodput also of what is not compared with anything; see `compare`.
    """
    found = Arrangements()
    open_models = [model.name for model in fleet.models if model.phases != "multiplexed" or model.name in asked]
    for model, demand in zip(fleet.models, demands, strict=True):
        if model.name not in open_models:
            found.shared.append(demand)
            continue
        number = open_models.index(model.name)

        def told(part: float, text: str, number: int = number) -> None:
            tell((number + part) / len(open_models), text)

        wanted, ground = wanted_of(model, demand, free), ground_of(model.name)
        whole = model.phases == "auto" or model.name in asked
        only = ARRANGEMENTS if whole or model.phases == "auto" else (model.phases,)
        comparison = compare(wanted, ground, latency, seed, told, only, goodputs or whole)
        if whole:
            found.comparisons.append(comparison)
        phases = comparison.recommended if model.phases == "auto" else model.phases
        what = comparison.of(phases)
        if phases == "multiplexed":
            found.shared.append(demand)
            continue
        if what.figures is None:
            found.missing[model.name] = what.why_not
            found.impossible.append(demand)
            continue
        layout = what.figures.layout
        devices = take(ground, layout)
        if devices is not None:
            place = ground.place(wanted, layout)
            found.arranged.append(Arranged(demand, place, what.figures, devices))
        elif model.phases == "auto":
            found.notes.append(f"{model.name} shares devices with others: {_taken(phases, layout, ground)}")
            found.shared.append(demand)
        else:
            found.missing[model.name] = _taken(phases, layout, ground)
            found.impossible.append(demand)
    return found


def _taken(phases: PhasesName, layout: Layout, ground: Ground) -> str:
    return (
        f"{phases} needs {layout.devices} {ground.kind} for it alone ({layout.words}), which the other models do not "
        "leave"
    )
