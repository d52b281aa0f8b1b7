"""What a shell completes values with: names of running fleets, of their models, units and logs, and of known GPUs. It
is asked at every Tab, so it only reads files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from muxserve.spec import FleetSpec

# Each with a few words about it, which some shells show.
Candidates = list[tuple[str, str]]


def fleets() -> Candidates:
    """The fleets that run here, by ID and by port; URLs have colons, at which bash ends a word."""
    running = _running(None)
    named = [*running, *((str(spec.gateway.port), spec) for _, spec in running)]
    return [(name, ", ".join(spec.served_names)) for name, spec in named]


def models(ctx: typer.Context) -> Candidates:
    """Models of the fleet that the command is for."""
    return _once((model, f"in {name}") for name, spec in _running(ctx) for model in spec.served_names)


def scales(ctx: typer.Context) -> Candidates:
    """Each model with one replica less and one more. Two of a model at least: so shells complete up to the number."""
    found = []
    for _, spec in _running(ctx):
        for model in spec.served_names:
            count = len(spec.replicas(spec.serving(model)))
            wanted = (count - 1, count + 1) if count else (1, 2)
            found += [(f"{model}={number}", f"instead of {count}") for number in wanted]
    return _once(found)


def units(ctx: typer.Context) -> Candidates:
    """Units of the fleet that the command is for."""
    return _once((unit.name, ", ".join(unit.serves)) for _, spec in _running(ctx) for unit in spec.units)


def adapters(ctx: typer.Context) -> Candidates:
    """LoRA adapters of the model that stands before."""
    asked = ctx.params.get("model")
    found = [model for _, spec in _running(ctx) for model in spec.models if model.name == spec.serving(str(asked))]
    return _once((adapter, f"of {asked}") for model in found for adapter in model.adapters)


def logs(ctx: typer.Context) -> Candidates:
    """Processes of the fleet that the command is for."""
    from muxserve.control.client import NoFleetError, find
    from muxserve.net.logs import log_files

    try:
        return _once((part, "") for part in log_files(find(ctx.params.get("fleet")).path))
    except NoFleetError:
        return []


def gpu_types() -> Candidates:
    """Types of GPUs that are known."""
    from muxserve.costs.devices import DEVICES

    return [(name, "") for name, device in DEVICES.items() if device.kind == "gpu"]


def _running(ctx: typer.Context | None) -> list[tuple[str, FleetSpec]]:
    """The fleets that run here by ID; of a command for one fleet, where it names that, this one."""
    from muxserve.control.client import NoFleetError, find, running_fleets

    wanted = None if ctx is None else ctx.params.get("fleet")
    try:
        chosen = running_fleets() if wanted is None else [find(wanted)]
    except NoFleetError:
        return []
    return [(fleet.name, spec) for fleet in chosen if (spec := fleet.spec()) is not None]


def _once(found: Iterable[tuple[str, str]]) -> Candidates:
    return [*dict(found).items()]
