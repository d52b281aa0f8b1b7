"""What types cannot say of arrangements of prefill and decode: which keys go with which.

Like `checks`, these look at the raw data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from muxserve.config.phase_schema import Batching, Rolling
from muxserve.config.problems import KeyPath, Problem
from muxserve.config.source import Source

_ROLLING, _BATCHING = Rolling(), Batching()
_GOES_WITH = {
    "rolling": ("rolling", "auto"),
    "stages": ("pipelined", "auto"),
    "batching": ("pipelined", "auto"),
    "sm": ("multiplexed", "auto"),
}
_THROTTLED_ONLY = ("iterations", "max_prefill", "min_prefill", "kv_threshold")


def check(source: Source) -> Iterator[Problem]:
    """Every such mistake in `source`."""
    models = source.data.get("models")
    for index, model in enumerate(models if isinstance(models, list) else ()):
        if isinstance(model, dict):
            yield from _model(source, ("models", index), model)


def _model(source: Source, at: KeyPath, model: dict[str, Any]) -> Iterator[Problem]:
    phases = model.get("phases", "multiplexed")
    if phases not in ("multiplexed", "rolling", "pipelined", "auto"):
        return
    for key, kinds in _GOES_WITH.items():
        if key in model and phases not in kinds:
            said = f"`phases: {phases}`" if "phases" in model else "the default, `phases: multiplexed`"
            if key == "sm":
                message = f"is for `phases: multiplexed`; under {said} the model's one engine has all SMs"
            else:
                message = f"is for {' or '.join(f'`phases: {kind}`' for kind in kinds)}, not for {said}"
            yield source.problem((*at, key), message)
    if phases == "rolling":
        yield from _objectives(source, at, model.get("slo"))
        yield from _scaling(source, (*at, "replicas"), model.get("replicas"))
    if isinstance(model.get("rolling"), dict):
        yield from _bounds(source, (*at, "rolling"), model["rolling"])
    if isinstance(model.get("batching"), dict):
        yield from _batching(source, at, model)


def _objectives(source: Source, at: KeyPath, slo: object) -> Iterator[Problem]:
    """Algorithm 2 of EcoServe holds prefills and decodes against both objectives."""
    given = slo if isinstance(slo, dict) else {}
    missing = [f"slo.{key}" for key in ("ttft_ms", "tpot_ms") if given.get(key) is None]
    if missing:
        where = (*at, "slo") if isinstance(slo, dict) else (*at, "phases")
        message = f"`phases: rolling` needs {' and '.join(missing)}: prefill rolls on when the next would miss them"
        yield source.problem(where, message)


def _scaling(source: Source, at: KeyPath, given: object) -> Iterator[Problem]:
    for key in ("low", "high"):
        if isinstance(given, dict) and key in given:
            message = "is a freeness; replicas of a rolling model follow the objectives that are met instead"
            yield source.problem((*at, key), message)


def _bounds(source: Source, at: KeyPath, given: dict[str, Any]) -> Iterator[Problem]:
    lower, upper = given.get("lower", _ROLLING.lower), given.get("upper", _ROLLING.upper)
    if type(lower) is int and type(upper) is int and 1 <= upper < 2 * lower - 1:
        key = "upper" if "upper" in given else "lower"
        message = (
            f"upper ({upper}) must be at least 2 * lower - 1 ({2 * lower - 1}): a macro instance that grows beyond "
            f"upper is split, and both parts need lower ({lower}) replicas"
        )
        yield source.problem((*at, key), message)


def _batching(source: Source, at: KeyPath, model: dict[str, Any]) -> Iterator[Problem]:
    given = model["batching"]
    where = (*at, "batching")
    policy = given.get("policy", "throttled")
    if policy in ("fixed", "vllm"):
        for key in _THROTTLED_ONLY:
            if key in given:
                yield source.problem((*where, key), f"is for `policy: throttled`, not for `policy: {policy}`")
        return
    most, least = given.get("max_prefill", _BATCHING.max_prefill), given.get("min_prefill", _BATCHING.min_prefill)
    if type(most) is int and type(least) is int and 1 <= most < least:
        key = "max_prefill" if "max_prefill" in given else "min_prefill"
        yield source.problem((*where, key), f"min_prefill ({least}) must be at most max_prefill ({most})")
    step = model.get("max_num_batched_tokens", 2048)
    if "max_prefill" in given and type(most) is int and type(step) is int and 1 <= step < most:
        message = f"{most} tokens are more than a step has (max_num_batched_tokens: {step})"
        yield source.problem((*where, "max_prefill"), message)
