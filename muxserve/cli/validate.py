"""`muxserve validate`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from muxserve.cli.output import budget_table, console, escape, models_table, print_problems
from muxserve.cluster.machine import findings, this_machine
from muxserve.cluster.ray.cluster import gpus_for
from muxserve.config import Fleet, FleetError, load_fleet
from muxserve.config.problems import Problem, format_path
from muxserve.gpu.findings import Findings
from muxserve.net.exit_codes import ExitCode
from muxserve.planning.specs.fleet_planner import FleetPlanner, notes_of
from muxserve.planning.specs.residency import residency_of
from muxserve.planning.specs.unit_plan import ResolvedUnit
from muxserve.planning.specs.unit_specs import unit_spec_of
from muxserve.spec import UnitSpec
from placement.format import enumerate_words


def validate(file: Path, file_only: bool, as_json: bool = False) -> int:
    """Check `file`, print the plan; returns the exit code."""
    try:
        fleet = load_fleet(file)
        found = None if file_only else _planned(fleet)
    except FleetError as error:
        if as_json:
            _print_json(file, error.problems)
        else:
            print_problems(error, "this fleet cannot be deployed")
        return ExitCode.WRONG
    if as_json:
        _print_json(file, [], found)
    elif found is None:
        console.print(f"{escape(str(file))}: {len(fleet.models)} models, no problem found in the file")
    else:
        _print(file, found)
    return ExitCode.DONE


class _Planned(NamedTuple):
    """What would be deployed: units with their plans, notes about it, and what takes the memory of GPUs, in words."""

    plans: Sequence[ResolvedUnit]
    units: Sequence[UnitSpec]
    notes: Sequence[str]
    memory: Sequence[str]


def _planned(fleet: Fleet) -> _Planned:
    """What would be deployed here.

    Raises:
        FleetError: nothing, since the fleet does not fit this machine.
    """
    planner = FleetPlanner(fleet, this_machine(), gpus_for(fleet))
    plans = planner.at_start()
    probed: list[str] = []
    if any(plan.gpu is not None and not plan.gpu.elsewhere for plan in plans):
        plans, probed = _as_probed(fleet, plans, findings())
    residency_of(planner.fleet, plans, planner.machine)
    # Hub models have no local directory before they are deployed; their id stands for it here.
    local = planner.fleet.with_models([m.model_copy(update={"path": m.path or m.hub}) for m in planner.fleet.models])
    units = [unit_spec_of(plan.with_paths(local), run_dir="") for plan in plans]
    memory = [words for plan in plans if plan.gpu is not None for words in plan.gpu.memory_words(plan.demands)]
    return _Planned(plans, units, [*planner.reasons, *notes_of(plans), *_scaling(plans), *probed], memory)


def _as_probed(
    fleet: Fleet, plans: Sequence[ResolvedUnit], found: Findings | None
) -> tuple[list[ResolvedUnit], list[str]]:
    """The plans as `deploy` makes them of what probes found of the GPUs here, and what the user should know of that.
    Whether MPS works is tried by `deploy` alone.

    Raises:
        FleetError: these GPUs cannot serve the fleet, by the probes.
    """
    if found is None:
        words = "these GPUs have not been probed: `deploy` does it first, and takes the best way of sharing that passes"
        return list(plans), [words]
    if found.refused:
        raise FleetError([fleet.problem(("cluster",), found.cannot_serve)])
    here = [plan if plan.gpu is None or plan.gpu.elsewhere else plan.as_found(found) for plan in plans]
    return here, found.followed


def _print_json(file: Path, problems: Sequence[Problem], found: _Planned | None = None) -> None:
    report: dict[str, object] = {
        "file": str(file),
        "ok": not problems,
        "problems": [{"line": p.line, "key": format_path(p.path), "message": p.message} for p in problems],
    }
    if found is not None:
        report["units"] = [
            {
                "name": unit.unit,
                "policy": plan.policy,
                "gpus": plan.gpu.ranks if plan.gpu is not None else 0,
                "pools": [
                    {"name": pool.name, "page_bytes": pool.page_bytes, "pages": pool.num_pages} for pool in unit.pools
                ],
                "models": [
                    {
                        "name": model.name,
                        "dtype": model.dtype,
                        "pool": "" if model.private else model.pool,
                        "quota_pages": model.quota_pages,
                        "kv_bytes": model.kv_bytes,
                        "max_len": model.max_len,
                        "threads": model.threads,
                    }
                    for model in unit.models
                ],
            }
            for plan, unit in zip(found.plans, found.units, strict=True)
        ]
        report["notes"] = [*found.notes, *found.memory]
    print(json.dumps(report, indent=2))


def _print(file: Path, found: _Planned) -> None:
    plans = found.plans
    alike: dict[bytes, list[UnitSpec]] = {}
    for unit_spec in found.units:
        alike.setdefault(msgspec.json.encode(unit_spec.models), []).append(unit_spec)
    for units in alike.values():
        if len(plans) > 1:
            console.print(f"[bold]{enumerate_words([unit.unit for unit in units])}[/]")
        console.print(models_table(units[0]))
    for note in found.notes:
        console.print(f"- {escape(note)}")
    for plan in plans:
        if plan.gpu is not None:
            console.print(budget_table(plan.gpu.budgets(plan.demands)))
    for words in found.memory:
        console.print(f"- {escape(words)}")
    gpus = sum(plan.gpu.ranks for plan in plans if plan.gpu is not None)
    where = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else f"{plans[0].unit.cores} cores"
    how = f", in {len(plans)} units" if len(plans) > 1 else ""
    policies = list(dict.fromkeys(plan.policy for plan in plans))
    by = f"the polic{'y' if len(policies) == 1 else 'ies'} {enumerate_words(policies)}"
    console.print(f"{escape(str(file))} can be deployed here on {where} with {by}{how}")


def _scaling(plans: Sequence[ResolvedUnit]) -> Iterator[str]:
    """How many replicas there are and may be, where that is not one for good."""
    seen = set()
    for model in (model for plan in plans for model in plan.fleet.models):
        bounds = model.replicas
        if model.name in seen or not bounds.scales:
            continue
        seen.add(model.name)
        count = sum(model.name in plan.served for plan in plans)
        replicas = f"{count} replica{'' if count == 1 else 's'}"
        if plans[0].fleet.memory is not None:
            yield f"{model.name} sleeps until somebody asks for it, and when another model needs its memory"
            continue
        yield f"{model.name} begins with {replicas} and has {bounds.min} to {bounds.max}, as its load wants it"
