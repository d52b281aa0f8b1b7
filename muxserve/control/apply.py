"""What has to be changed so that a running fleet becomes what a fleet file says. Pure.

A file is compared with what the fleet was declared as, key by key, and with how many replicas there are. Some keys can
be followed at once, models come and go; the others are named together with what has to be started again for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from muxserve.config import Fleet, Model
from muxserve.spec import FleetSpec
from placement.format import format_size


class Effect(StrEnum):
    """What following a difference takes: nothing but telling the gateways and the global scheduler; a model's end and
    start; the whole fleet's."""

    NOW = "now"
    MODEL = "model"
    FLEET = "fleet"


# Of the fleet, and of a model: what is followed while they serve, with all that is below.
_FLEET_KEYS = {("tenants",), ("gateway", "api_keys")}
_MEMORY_KEYS = {"min_residence", "turns"}
_MODEL_KEYS = {"limits", "slo", "replicas"}
# What only planning or the start looks at.
_UNUSED = {"demo", "workload", "architecture"}
# In bytes.
_SIZES = {"limit", "size", "host_copies", "resting_engines"}
# Never shown.
_SECRET = {"keys", "api_keys"}


@dataclass(frozen=True)
class Difference:
    """One key that the file has otherwise. `model` is whose it is, empty for the fleet's."""

    model: str
    path: tuple[str, ...]
    before: object
    after: object
    effect: Effect

    def __str__(self) -> str:
        where = ".".join(((f"models.{self.model}",) if self.model else ()) + self.path)
        if _SECRET.intersection(self.path):
            what = "other keys"
        elif self.before is None or self.after is None:
            what = "set" if self.before is None else "left out"
            value = self.after if self.before is None else self.before
            what = f"{what} ({self._shown(value)})" if not isinstance(value, dict) else what
        else:
            what = f"{self._shown(self.before)} -> {self._shown(self.after)}"
        sign = "~" if self.effect is Effect.NOW else "!"
        return f"{sign} {where}: {what}{self._needs}"

    def _shown(self, value: object) -> str:
        if self.path[-1] in _SIZES and type(value) is int:
            return format_size(value)
        text = str(value)
        return text if len(text) <= 60 else f"{text[:57]}..."

    @property
    def _needs(self) -> str:
        if self.effect is Effect.MODEL:
            return f"; needs {self.model} started again: muxserve remove {self.model}, then apply once more"
        return "; needs the fleet deployed again" if self.effect is Effect.FLEET else ""


@dataclass
class ChangePlan:
    """What `muxserve apply` does. `scale`: replicas that models are to have, and have not. What needs a start of the
    fleet or of a model (`restarts`) is named only."""

    settings: list[Difference] = field(default_factory=list)
    restarts: list[Difference] = field(default_factory=list)
    add: list[str] = field(default_factory=list)
    remove: list[str] = field(default_factory=list)
    scale: dict[str, tuple[int, int]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """One per change, such as a diff has."""
        return [
            *(f"- model {name}" for name in self.remove),
            *(f"+ model {name}" for name in self.add),
            *(f"~ {name}: {before} -> {after} replicas" for name, (before, after) in self.scale.items()),
            *map(str, self.settings),
            *map(str, self.restarts),
        ]


def plan_changes(running: FleetSpec, declared: Fleet, wanted: Fleet) -> ChangePlan:
    """What makes `running`, which was `declared` so, what is `wanted`."""
    plan = _planned(running, declared, wanted)
    if running.residency:
        # Memory says which of its models are awake, and how long a request waits is the fleet's from its start.
        kept = [each for each in plan.settings if each.path[0] != "replicas"]
        plan.restarts += [replace(each, effect=Effect.FLEET) for each in plan.settings if each not in kept]
        return replace(plan, settings=kept, scale={})
    return plan


def _planned(running: FleetSpec, declared: Fleet, wanted: Fleet) -> ChangePlan:
    plan = ChangePlan()
    names = [model.name for model in running.models]
    plan.remove = [name for name in names if all(name != model.name for model in wanted.models)]
    for difference in _fleet_differences(running, declared, wanted):
        (plan.settings if difference.effect is Effect.NOW else plan.restarts).append(difference)
    for model in wanted.models:
        if model.name not in names:
            plan.add.append(model.name)
            continue
        for difference in _model_differences(declared.model(model.name), model):
            (plan.settings if difference.effect is Effect.NOW else plan.restarts).append(difference)
        count, have = wanted_replicas(model, len(running.replicas(model.name)))
        if count != have:
            plan.scale[model.name] = have, count
    return plan


def wanted_replicas(model: Model, have: int) -> tuple[int, int]:
    """How many replicas `model` is to have, and how many there are: where their number follows the load, as many as it
    has, within its bounds."""
    bounds = model.replicas
    return (min(max(have, bounds.min), bounds.max) if bounds.scales else bounds.at_start), have


def followed(declared: Fleet, wanted: Fleet) -> Fleet:
    """`declared` with all that is followed at once; what needs a start stays as it was."""
    models = []
    for model in declared.models:
        new = next((each for each in wanted.models if each.name == model.name), None)
        update = {key: getattr(new, key) for key in _MODEL_KEYS | _UNUSED} if new is not None else {}
        models.append(model.model_copy(update=update))
    gateway = {"api_keys": wanted.gateway.api_keys}
    memory = declared.memory
    if memory is not None and wanted.memory is not None:
        keys = {path[-1] for path in _memory_paths(declared)}
        memory = memory.model_copy(update={key: getattr(wanted.memory, key) for key in keys})
    return declared.model_copy(
        update={
            "tenants": wanted.tenants,
            "gateway": declared.gateway.model_copy(update=gateway),
            "models": models,
            "memory": memory,
        }
    )


def _fleet_differences(running: FleetSpec, declared: Fleet, wanted: Fleet) -> Iterator[Difference]:
    before, after = (fleet.model_dump(exclude={"models"}) for fleet in (declared, wanted))
    # It is used where there are tenants only; once there were some, it is open until the fleet ends.
    after["gateway"]["usage_file"] = wanted.gateway.usage_file if wanted.tenants else running.usage_file
    before["gateway"]["usage_file"] = running.usage_file or after["gateway"]["usage_file"]
    for path, old, new in _compare(before, after):
        known = any(path[: len(key)] == key for key in _FLEET_KEYS) or path in _memory_paths(declared)
        yield Difference("", path, old, new, Effect.NOW if known else Effect.FLEET)


def _memory_paths(declared: Fleet) -> set[tuple[str, ...]]:
    """What is followed of the rules by which memory decides. On GPUs pools were sized by the limit."""
    on_gpus = bool(declared.cluster.gpus or declared.cluster.gpu_ids)
    return {("memory", key) for key in (_MEMORY_KEYS if on_gpus else {*_MEMORY_KEYS, "limit"})}


def _model_differences(declared: Model, wanted: Model) -> Iterator[Difference]:
    before, after = declared.model_dump(exclude=_UNUSED), wanted.model_dump(exclude=_UNUSED)
    for path, old, new in _compare(before, after):
        if path[0] == "replicas" and not (declared.replicas.scales or wanted.replicas.scales):
            continue  # how many there are says it all
        yield Difference(declared.name, path, old, new, Effect.NOW if path[0] in _MODEL_KEYS else Effect.MODEL)


def _compare(
    before: Mapping[str, Any], after: Mapping[str, Any], at: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object, object]]:
    """Places where two mappings differ, as deep as both have mappings."""
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _compare(old, new, (*at, key))
        elif old != new:
            yield (*at, key), old, new
