"""What if there were more requests: fleets with other rates, sweeps over them, and the fleet file of an answer."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from muxserve.config import Fleet
from muxserve.config.include import DEFAULTS, INCLUDE, parse_whole
from muxserve.config.source import read_text
from muxserve.planning.report.document import SweepPoint
from placement.cluster import Cluster

_NUMBER = r"\d+(?:\.\d+)?"
_SCALES = re.compile(rf"scale=({_NUMBER})\.\.({_NUMBER})(?::({_NUMBER}))?")
_MOST = 50


def with_rates(fleet: Fleet, scale: float) -> Fleet:
    """The fleet with `scale` times the rates of its models."""
    if scale == 1.0:
        return fleet
    return fleet.with_models([model.model_copy(update={"rate": scale * model.rate}) for model in fleet.models])


def parse_scales(text: str) -> list[float]:
    """`scale=0.5..4` (each twice the one before) or, with a step, `scale=1..3:0.5` as factors of the rates.

    Raises:
        ValueError: it is something else.
    """
    match = _SCALES.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ValueError(f"{text!r} is not a sweep such as scale=0.5..4, or scale=1..3:0.5 with a step")
    first, last = float(match[1]), float(match[2])
    if not 0 < first <= last:
        raise ValueError(f"a sweep goes from more than 0 upwards, not from {first:g} to {last:g}")
    step = float(match[3]) if match[3] else None
    if step == 0:
        raise ValueError("the step of a sweep must be more than 0")
    found = [first]
    while found[-1] < last and len(found) <= _MOST:
        found.append(min(last, round(found[-1] * 2 if step is None else found[-1] + step, 9)))
    if len(found) > _MOST:
        raise ValueError(f"that is more than {_MOST} plans; give a larger step")
    return found


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """A `scale` of the rates, and what the same devices make of them."""

    scale: float
    point: SweepPoint

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        plan = self.point.plan
        return {
            "scale": self.scale,
            "throughput": plan.throughput,
            "attainment": plan.attainment,
            "devices_used": plan.devices,
            "meets": plan.meets,
            "missing": list(plan.missing),
            "simulated_attainment": self.point.simulated,
            "falls_short": self.point.short,
        }


def most_met(points: Sequence[ScalePoint]) -> float | None:
    """The largest scale of a sweep that is met, as all smaller ones are."""
    found = None
    for each in points:
        if not each.point.enough:
            break
        found = each.scale
    return found


def check_beside(file: Path, out: Path) -> None:
    """
    Raises:
        ValueError: `out` is in another directory than the fleet file, where the paths in it would name other files.
    """
    if out.resolve().parent != file.resolve().parent:
        raise ValueError(f"{out} must be in the directory of {file.name}, since paths in it are relative to that")


def save_fleet(file: Path, out: Path, cluster: Cluster | None, fleet: Fleet) -> None:
    """Write the fleet file `file` with the GPUs of `cluster` and the rates of `fleet`, as one file; comments are
    not kept.

    Raises:
        OSError: `out` cannot be written.
    """
    data = parse_whole(read_text(file, "fleet file"), str(file), file.parent, os.environ).data
    data.pop(INCLUDE, None)
    usual = data.get(DEFAULTS, {}).get("rate", 1.0)
    if cluster is not None:
        given = data.get("cluster")  # a mapping, or `auto`
        own = data["cluster"] = given if isinstance(given, dict) else {}
        if len(own.get("gpu_ids", ())) != cluster.devices:
            own.pop("gpu_ids", None)
        for key in ("gpus", "gpu_type", "nodes"):
            own.pop(key, None)
        kinds = {node.device for node in cluster.nodes}
        sizes = [node.count for node in cluster.nodes]
        if len(kinds) == 1 and len(set(sizes[:-1])) <= 1 and sizes[-1] <= sizes[0]:
            own |= {"gpus": cluster.devices, "gpu_type": kinds.pop()}
            if len(sizes) > 1 or sizes[0] > fleet.cluster.gpus_per_node:
                own["gpus_per_node"] = sizes[0]
        else:
            counts = Counter((node.device, node.count) for node in cluster.nodes)
            own["nodes"] = [{"count": count, "gpus": gpus, "gpu_type": kind} for (kind, gpus), count in counts.items()]
    for declared, model in zip(data["models"], fleet.models, strict=True):
        if declared.get("rate", usual) != model.rate:
            declared["rate"] = float(f"{model.rate:.9g}")
    out.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120))
