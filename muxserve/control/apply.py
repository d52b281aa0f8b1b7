"""What has to be changed so that a running fleet becomes what a fleet file says. Pure, but for reading adapters' ranks.

A file is compared with what the fleet was declared as, key by key, and with how many replicas there are. Some keys can
be followed at once, models come, go and get other versions; the keys left are named, since the fleet would have to be
deployed again for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from muxserve.config import Fleet, Model
from muxserve.config.adapters import AdapterError, check_rank
from muxserve.spec import FleetSpec, ModelSpec
from placement.format import format_size


class Effect(StrEnum):
    """What following a difference takes: nothing but telling the gateways and the global scheduler; another version of
    a model; the whole fleet's end and start."""

    NOW = "now"
    MODEL = "model"
    FLEET = "fleet"


# Keys of the fleet and of a model that are followed while they serve, with all keys below them.
_FLEET_KEYS = {("tenants",), ("gateway", "api_keys"), ("aliases",)}
_MEMORY_KEYS = {"min_residence", "turns"}
_MODEL_KEYS = {"limits", "slo", "replicas", "aliases", "fallback"}
# What only planning or the start looks at.
_UNUSED = {"demo", "workload", "architecture"}
# In bytes.
_SIZES = {"limit", "size", "host_copies", "resting_engines"}
# Never shown.
_SECRET = {"keys", "api_keys", "key"}


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
        needs = "; needs the fleet deployed again" if self.effect is Effect.FLEET else ""
        return f"{'!' if needs else '~'} {where}: {what}{needs}"

    def _shown(self, value: object) -> str:
        if self.path[-1] in _SIZES and type(value) is int:
            return format_size(value)
        text = str(value)
        return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass
class ChangePlan:
    """What `muxserve apply` does. `replace`: models that get another version, each with its differences. `adapters`:
    directories of LoRA adapters, by model and name; empty: it is served no longer. `scale`: replicas that models are to
    have, and have not. What needs a start of the fleet (`restarts`) is named only. `refused`: models that are not
    replaced, and why."""

    settings: list[Difference] = field(default_factory=list)
    restarts: list[Difference] = field(default_factory=list)
    replace: dict[str, list[Difference]] = field(default_factory=dict)
    adapters: dict[tuple[str, str], str] = field(default_factory=dict)
    add: list[str] = field(default_factory=list)
    remove: list[str] = field(default_factory=list)
    scale: dict[str, tuple[int, int]] = field(default_factory=dict)
    in_place: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """One per change, such as a diff has, without those of `left`."""
        return [
            *(f"- model {name}" for name in self.remove),
            *(f"+ model {name}" for name in self.add),
            *(f"~ {name}: {before} -> {after} replicas" for name, (before, after) in self.scale.items()),
            *map(str, self.settings),
            *(f"{'~' if path else '-'} adapter {name} of {model}" for (model, name), path in self.adapters.items()),
            *(
                f"{each}; {_IN_PLACE if name in self.in_place else _BESIDE}"
                for name, differences in self.replace.items()
                if name not in self.refused
                for each in differences
            ),
        ]

    def left(self) -> list[str]:
        """One per change that is not made."""
        refused = [
            f"! {str(each)[2:]}; {reason}" for name, reason in self.refused.items() for each in self.replace[name]
        ]
        return [*refused, *map(str, self.restarts)]


# What becomes of a model that is replaced.
_BESIDE = "loaded beside the version that serves"
_IN_PLACE = "loaded in place of the version that serves, which ends first"


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
    names = running.served_names
    plan.remove = [name for name in names if all(name != model.name for model in wanted.models)]
    for difference in _fleet_differences(running, declared, wanted):
        (plan.settings if difference.effect is Effect.NOW else plan.restarts).append(difference)
    for model in wanted.models:
        if model.name not in names:
            plan.add.append(model.name)
            continue
        version, before = running.serving(model.name), declared.model(model.name)
        (spec,) = (each for each in running.models if each.name == version)
        adapters = _adapters_followed(spec, before, model)
        for difference in _model_differences(before, model):
            if difference.effect is Effect.NOW:
                plan.settings.append(difference)
            elif adapters is None or difference.path[0] != "adapters":
                plan.replace.setdefault(model.name, []).append(difference)
        if model.name not in plan.replace:
            plan.adapters |= {(model.name, name): path for name, path in (adapters or {}).items()}
        count, have = wanted_replicas(model, len(running.replicas(version)))
        if count != have:
            plan.scale[model.name] = have, count
    return plan


def _adapters_followed(spec: ModelSpec, before: Model, after: Model) -> dict[str, str] | None:
    """The adapters that change, of a model whose engines have room for those of `after`; None if they have not."""
    if spec.adapter_slots is None or before.adapters is None or after.adapters is None:
        return None
    changed = {name: path for name, path in after.adapters.items() if before.adapters.get(name) != path}
    try:
        for path in changed.values():
            check_rank(path, spec.adapter_slots)
    except AdapterError:
        return None
    return changed | {name: "" for name in before.adapters if name not in after.adapters}


def wanted_replicas(model: Model, have: int) -> tuple[int, int]:
    """How many replicas `model` is to have, and how many there are: where their number follows the load, as many as it
    has, within its bounds."""
    bounds = model.replicas
    return (min(max(have, bounds.min), bounds.max) if bounds.scales else bounds.at_start), have


def with_declared_adapter(declared: Fleet, model: str, name: str, path: str) -> Fleet:
    """`declared` with the adapter in `path` of a model under that name; "": without it."""
    models = []
    for each in declared.models:
        if each.name == model:
            others = {key: where for key, where in (each.adapters or {}).items() if key != name}
            each = each.model_copy(update={"adapters": {**others, name: path} if path else others})
        models.append(each)
    return declared.with_models(models)


def followed(declared: Fleet, wanted: Fleet) -> Fleet:
    """`declared` with all that is followed at once; what needs another version or a start stays as it was."""
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
            "aliases": wanted.aliases,
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
