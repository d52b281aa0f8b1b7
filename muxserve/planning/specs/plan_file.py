"""`plan.yaml`: a placement as a file, typed and versioned."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, ValidationError

from muxserve.config import Fleet, FleetError, Problem
from muxserve.config.loader import problems_of
from muxserve.config.problems import KeyPath, did_you_mean
from muxserve.config.source import Source, parse_yaml, read_text
from muxserve.config.values import NAME_PATTERN, PolicyName, Section
from muxserve.planning.candidates.device_pool import CPU
from muxserve.spec import ShapeName
from placement.cluster import ROLLING, Cluster, Node, PlacedModel, PlacedUnit, Placement

VERSION = 1
Share = Annotated[float, Field(gt=0, le=1)]


class PlanNode(Section):
    """One machine: `gpus` devices of a type."""

    device: str = Field(min_length=1)
    gpus: int = Field(ge=1)


class PlanModel(Section):
    """One replica in a unit: its part of the model's requests per second, its shares of each device's SMs, and its
    engines (one for prefill and one for decode where that is left out)."""

    model: str = Field(pattern=NAME_PATTERN)
    rate: float = Field(gt=0, allow_inf_nan=False)
    prefill_share: Share
    decode_share: Share
    engines: ShapeName = "split"


class PlanUnit(Section):
    """Models colocated on `devices`, numbered through the nodes. `kv_bytes` are the page pool and the private caches of
    each device; `stages` and `policy` (of the unit's scheduler) are left out where they say nothing new."""

    name: str = Field(pattern=NAME_PATTERN)
    device: str = Field(min_length=1)
    devices: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    kv_bytes: int = Field(ge=1)
    stages: int = Field(default=1, ge=1)
    policy: Literal[PolicyName, "", "rolling"] = ""
    models: list[PlanModel] = Field(min_length=1)

    @property
    def rolls(self) -> bool:
        """Whether prefill rolls over this replica and others."""
        return self.policy == ROLLING


class PlanFile(Section):
    """A plan file."""

    plan_version: Literal[1]
    about: str = ""
    nodes: list[PlanNode] = Field(min_length=1)
    units: list[PlanUnit] = Field(min_length=1)
    notes: list[str] = Field(default_factory=list)

    def placement(self) -> Placement:
        """The placement that it holds."""
        units = tuple(
            PlacedUnit(
                name=unit.name,
                device=unit.device,
                devices=tuple(unit.devices),
                models=tuple(
                    PlacedModel(m.model, m.rate, m.prefill_share, m.decode_share, m.engines) for m in unit.models
                ),
                kv_bytes=unit.kv_bytes,
                stages=unit.stages,
                policy=ROLLING if unit.rolls else unit.policy,
            )
            for unit in self.units
        )
        cluster = Cluster(tuple(Node(node.device, node.gpus) for node in self.nodes))
        return Placement(cluster, units, tuple(self.notes))


def plan_text(placement: Placement, about: str = "") -> str:
    """A placement as the text of a plan file."""
    data = {
        "plan_version": VERSION,
        "about": about,
        "nodes": [{"device": node.device, "gpus": node.count} for node in placement.cluster.nodes],
        "units": [
            {
                "name": unit.name,
                "device": unit.device,
                "devices": list(unit.devices),
                "kv_bytes": unit.kv_bytes,
                **({"stages": unit.stages} if unit.stages > 1 else {}),
                **({"policy": unit.policy} if unit.policy else {}),
                "models": [
                    {
                        "model": m.model,
                        "rate": m.rate,
                        "prefill_share": m.prefill_share,
                        "decode_share": m.decode_share,
                        **({"engines": m.shape} if m.shape != "split" else {}),
                    }
                    for m in unit.models
                ],
            }
            for unit in placement.units
        ],
        "notes": list(placement.notes),
    }
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Lists of numbers and mappings of plain values on one line."""


def _sequence(dumper: yaml.SafeDumper, value: list[object]) -> yaml.SequenceNode:
    return dumper.represent_sequence(
        "tag:yaml.org,2002:seq", value, flow_style=bool(value) and all(isinstance(item, int) for item in value)
    )


def _mapping(dumper: yaml.SafeDumper, value: dict[str, object]) -> yaml.MappingNode:
    plain = not any(isinstance(item, (list, dict)) for item in value.values())
    return dumper.represent_mapping("tag:yaml.org,2002:map", value.items(), flow_style=plain)


_Dumper.add_representer(list, _sequence)
_Dumper.add_representer(dict, _mapping)


def save_plan(placement: Placement, path: str | os.PathLike[str], about: str = "") -> None:
    """Write a plan file.

    Raises:
        OSError: it cannot be written.
    """
    Path(path).write_text(plan_text(placement, about), encoding="utf-8")


def load_plan(path: str | os.PathLike[str], fleet: Fleet | None = None) -> Placement:
    """Read a plan file; with `fleet`, also check that it is a plan of this fleet.

    Raises:
        FleetError: with every mistake, its line and key.
    """
    source = parse_yaml(read_text(path, "plan file"), str(path))
    if not isinstance(source.data, dict):
        raise FleetError([Problem("must be a mapping with `units:`, as `muxserve plan -o` writes it", str(path), 1)])
    version = source.data.get("plan_version")
    if version is None:
        raise FleetError([Problem("has no plan_version; is it a plan that `muxserve plan -o` wrote?", str(path), 1)])
    if version != VERSION:
        message = f"{version!r} is not a version that is read here ({VERSION}); make the plan anew"
        raise FleetError([source.problem(("plan_version",), message)])
    try:
        plan = PlanFile.model_validate(source.data)
    except ValidationError as error:
        raise FleetError(problems_of(source, error, PlanFile)) from None
    problems = [*_devices(plan, source), *_shapes(plan, source), *(_models(plan, fleet, source) if fleet else ())]
    if problems:
        raise FleetError(problems)
    return plan.placement()


def _devices(plan: PlanFile, source: Source) -> Iterator[Problem]:
    kinds = [node.device for node in plan.nodes for _ in range(node.gpus)]
    homes = [number for number, node in enumerate(plan.nodes) for _ in range(node.gpus)]
    owner: dict[int, str] = {}
    names: set[str] = set()
    for index, unit in enumerate(plan.units):
        at: KeyPath = ("units", index)
        if unit.name in names:
            yield source.problem((*at, "name"), f"{unit.name!r} is already the name of another unit")
        names.add(unit.name)
        for number in unit.devices:
            where = (*at, "devices")
            if number >= len(kinds):
                yield source.problem(where, f"there is no device {number}; the nodes have {len(kinds)}")
            elif kinds[number] != unit.device:
                yield source.problem(where, f"device {number} is a {kinds[number]}, not a {unit.device}")
            elif number in owner:
                yield source.problem(where, f"device {number} belongs to {owner[number]} already")
            else:
                owner[number] = unit.name
        machines = len({homes[number] for number in unit.devices if number < len(homes)})
        if machines > 1:
            yield source.problem((*at, "devices"), f"are on {machines} machines; a unit is served by one")
        models = [m.model for m in unit.models]
        for name in sorted({name for name in models if models.count(name) > 1}):
            yield source.problem((*at, "models"), f"{name} is in this unit more than once")


def _shapes(plan: PlanFile, source: Source) -> Iterator[Problem]:
    seen: dict[str, tuple[str, str]] = {}
    for index, unit in enumerate(plan.units):
        at: KeyPath = ("units", index)
        shapes = {each.model: each.engines for each in unit.models}
        if (unit.stages > 1 or unit.rolls) and len(unit.models) > 1:
            what = "whose layers are in stages" if unit.stages > 1 else "whose prefill rolls over its replicas"
            message = f"a model {what} has a unit to itself, but {unit.name} has {len(unit.models)} models"
            yield source.problem((*at, "models"), message)
        if "split" in shapes.values() and (unit.stages > 1 or unit.rolls):
            key = "stages" if unit.stages > 1 else "policy"
            yield source.problem((*at, key), "is for models with `engines: one`")
        elif unit.device != CPU and len(unit.devices) % unit.stages:
            message = f"{unit.stages} stages do not divide the unit's {len(unit.devices)} devices evenly"
            yield source.problem((*at, "stages"), message)
        for model, shape in shapes.items():
            here = _words(unit, shape)
            name, there = seen.setdefault(model, (unit.name, here))
            if there != here:
                message = f"{model} has {here} here and {there} in {name}; replicas of a model must be alike"
                yield source.problem((*at, "models"), message)


def _words(unit: PlanUnit, shape: ShapeName) -> str:
    if shape == "split":
        return "two engines"
    rolling = ", rolling" if unit.rolls else ""
    return f"one engine over {unit.stages} stages" if unit.stages > 1 else f"one engine{rolling}"


def _models(plan: PlanFile, fleet: Fleet, source: Source) -> Iterator[Problem]:
    known = [model.name for model in fleet.models]
    planned = set()
    for i, unit in enumerate(plan.units):
        for j, each in enumerate(unit.models):
            planned.add(each.model)
            if each.model not in known:
                message = f"the fleet has no model {each.model!r}{did_you_mean(each.model, known)}"
                yield source.problem(("units", i, "models", j, "model"), message)
    left_out = [name for name in known if name not in planned]
    if left_out:
        yield source.problem(("units",), f"the plan has no place for {', '.join(left_out)}; make it anew")
