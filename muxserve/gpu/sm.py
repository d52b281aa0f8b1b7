"""How much of a GPU an engine may compute on: a percentage of the SMs, or a set of its own; both under MPS.

A percentage is fixed for the life of an engine's process; what changes at run time is which engines hold a lease. So is
a set of SMs, unless the unit's policy gives shares per lease: then an engine has a few sets, and a lease says which. An
engine of both phases has the share of one that decodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from muxserve.spec import UnitSpec

# Phases of the engines that share SMs with others.
SHARING = ("prefill", "decode", "both")
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
# A whole unit, as leases count shares.
WHOLE = 1_000_000


@dataclass(frozen=True, slots=True)
class SmRange:
    """Parts `first` to `first + count - 1` of a GPU's SMs, in the order in which the driver divides them."""

    first: int
    count: int


def percentage(share: float) -> int:
    """A share as MPS takes it: whole percent, at least 1. MPS itself rounds down to what the GPU can divide."""
    return min(100, max(1, round(share * 100)))


def share_of(unit_spec: UnitSpec, model: str, phase: str) -> float:
    """The share of SMs of a model's engine.

    Raises:
        KeyError: no such model.
    """
    of = unit_spec.model(model)
    return of.prefill_share if phase == "prefill" else of.decode_share


def has_share(unit_spec: UnitSpec, model: str, phase: str) -> bool:
    """Whether a process of a model computes on a part of the SMs. One engine of both phases with a share of 1 has all,
    beside whoever else computes, and what holds weights computes nothing.

    Raises:
        KeyError: no such model.
    """
    if phase == "both" and not unit_spec.share_steps:
        return share_of(unit_spec, model, phase) < 1.0
    return phase in SHARING


def step_of(region: int, steps: int) -> int:
    """Which of `steps` sizes, from 0 on, an engine takes for a region of so many millionths: the nearest."""
    return min(max(round(region * steps / WHOLE), 1), steps) - 1


def step_range(phase: str, step: int, steps: int, parts: int) -> SmRange:
    """Which of a GPU's equal parts an engine computes on that has `step` of `steps`.

    Prefill has the front and decode the end, so that they do not meet where they have no more than all between them.
    Decode engines that run side by side have one region in common, for whose kernels the GPU finds room by itself:
    which of them run changes with each lease, and a place for each would move with it, while a context, and the graphs
    that were captured in it, cannot.
    """
    count = min(parts, max(1, round(parts * step / steps)))
    return SmRange(0 if phase == "prefill" else parts - count, count)


def sm_range(unit_spec: UnitSpec, model: str, phase: str, parts: int) -> SmRange:
    """Which of a GPU's equal parts an engine gets whose share does not change.

    Green contexts of different processes do not know of each other, so places are worked out from the unit's spec: one
    prefill job runs at a time and they all have the first parts; decode engines, which run side by side, are laid one
    before the other from the end on, beginning again at the end when the place beside the largest prefill is used up.

    Raises:
        KeyError: no such model.
    """
    if phase == "prefill":
        return SmRange(0, parts_of(share_of(unit_spec, model, phase), parts))
    floor = max(parts_of(each.prefill_share, parts) for each in unit_spec.models)
    end = parts
    for each in unit_spec.models:
        count = parts_of(each.decode_share, parts)
        if end - count < floor:
            end = parts
        first = end - count
        if each.name == model:
            return SmRange(first, count)
        end = first
    raise KeyError(model)


def parts_of(share: float, parts: int) -> int:
    """A share in parts: the nearest whole number, at least one."""
    return min(parts, max(1, round(share * parts)))
