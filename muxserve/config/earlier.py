"""Keys of earlier versions: those that are still read, with a note that says what to write instead, and those that are
no longer there."""

from __future__ import annotations

from typing import Any

from muxserve.config.problems import KeyPath, Problem, did_you_mean, shown
from muxserve.config.source import Source

_VALUES = ("multiplexed", "rolling", "pipelined", "auto")
# What `phases: pipelined` without `stages` had on a CPU.
_CPU_STAGES = 2


def read_earlier(source: Source) -> tuple[list[Problem], list[Problem]]:
    """Put today's keys in the place of `phases` in `source.data`.

    Returns:
        Notes on what to write instead, and mistakes.
    """
    notes: list[Problem] = []
    mistakes: list[Problem] = []
    given = source.data.get("models")
    models = given if isinstance(given, list) else []
    gpus = _gpus(source.data.get("cluster"), models)
    for index, model in enumerate(models):
        if not isinstance(model, dict) or "phases" not in model:
            continue
        at: KeyPath = ("models", index, "phases")
        value = model.pop("phases")
        if "engines" in model:
            mistakes.append(source.problem(at, "is what `engines` says in this version; leave `phases` out"))
            continue
        if value not in _VALUES:
            message = f"must be one of {', '.join(_VALUES)}, not {shown(value)}{did_you_mean(str(value), _VALUES)}"
            mistakes.append(source.problem(at, f"{message} (this version has `engines` in its place)"))
            continue
        keys = _today(value, model, gpus)
        for key in keys:
            if place := source.place(at):
                source.places.setdefault(("models", index, key), place._replace(path=(*place.path[:-1], key)))
        model.update(keys)
        words = ", ".join(f"{key}: {of}" for key, of in keys.items())
        notes.append(source.problem(at, f"is a key of earlier versions; write `{words}` instead of `phases: {value}`"))
    return notes, mistakes


def _today(value: str, model: dict[str, Any], gpus: int | None) -> dict[str, Any]:
    """The keys that say what `phases: VALUE` said."""
    if value == "multiplexed":
        return {"engines": "split"}
    if value == "auto":
        return {"engines": "auto"}
    if value == "rolling":
        return {"engines": "one", "dispatch": "rolling"}
    stages = model.get("stages", "auto")
    if stages == "auto" and gpus is not None:
        stages = gpus or _CPU_STAGES
    return {"engines": "one", "stages": stages, "batching": model.get("batching", "throttled")}


def _gpus(cluster: object, models: list[Any]) -> int | None:
    """GPUs of each unit, 0 for a CPU; None where that cannot be read from the file."""
    if not isinstance(cluster, dict):
        return 0
    ids, count = cluster.get("gpu_ids"), cluster.get("gpus")
    if not ids and not count and not cluster.get("nodes"):
        return 0
    replicas = models[0].get("replicas", 1) if len(models) == 1 and isinstance(models[0], dict) else None
    gpus = len(ids) if isinstance(ids, list) and ids else count
    if not isinstance(replicas, int) or not isinstance(gpus, int) or replicas < 1 or gpus % replicas:
        return None
    return gpus // replicas


# ---------------------------------------------------------------- no longer there

# By key path without the positions of lists and the names of models, tenants and levels.
_REMOVED: dict[tuple[str, ...], str] = {
    ("migration", "models"): "remove it: models stay in the unit that the plan gives them; `muxserve scale` adds a "
    "replica elsewhere, and `muxserve drain` empties a unit",
    ("migration", "source_below"): "remove it: requests leave a replica below a freeness of 48 tokens per request",
    ("migration", "destination_above"): "remove it: requests go to replicas above a freeness of 96 tokens per request",
    ("migration", "in_flight"): "remove it: one request at a time leaves or enters a replica",
    ("models", "replicas", "low"): "remove it: one replica more starts below a freeness of 160 tokens per request",
    ("models", "replicas", "high"): "remove it: a replica goes above a freeness of 960 tokens per request",
    ("models", "replicas", "hold"): "remove it: the number of replicas changes after 10 s outside the bounds",
    ("models", "rolling"): "remove it: macro instances have 4 to 16 replicas, and a quarter of the decodes may have "
    "saved less time than a prefill takes (docs/rolling.md)",
    ("gateway", "structured_output"): "remove it: the limits of grammars are constants (docs/gateway.md)",
    ("default_priority",): "remove it, and call the level of requests that name none `normal`",
    ("cluster", "decode_first"): "remove it: engines share their GPUs by SMs, without priorities",
    ("cluster", "span_machines"): "remove it: a unit is served by one machine",
    ("memory", "max_wait"): "remove it: a request that has waited for its model for 10 s goes before all others",
    ("memory", "decode_niceness"): "remove it: decoding always gives way to wakes and prompts",
}


def removed_key(path: KeyPath) -> str | None:
    """What to write instead of a removed key; None: the key at `path` was never there."""
    advice = _REMOVED.get(tuple(part for part in path if isinstance(part, str)))
    return advice and f"is no longer a key; {advice}"
