"""Keys that are no longer there, with what to write instead."""

from __future__ import annotations

from muxserve.config.problems import KeyPath

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
    ("models", "batching"): "remove it: steps over several stages are throttled, and others are vLLM's own",
    ("models", "phases"): "write `engines: split` for multiplexed, `engines: auto` for auto, `dispatch: rolling` for "
    "rolling, and `stages: 2` or more for pipelined",
    ("models", "rolling"): "remove it: macro instances have 4 to 16 replicas, and a quarter of the decodes may have "
    "saved less time than a prefill takes (docs/rolling.md)",
    ("units", "phases"): "make the plan anew, with `muxserve plan -o`",
    ("units", "batching"): "remove it: steps over several stages are throttled, and others are vLLM's own",
    ("gateway", "structured_output"): "remove it: the limits of grammars are constants (docs/gateway.md)",
    ("default_priority",): "remove it, and call the level of requests that name none `normal`",
    ("cluster", "decode_first"): "remove it: engines share their GPUs by SMs, without priorities",
    ("cluster", "span_machines"): "remove it: a unit is served by one machine",
    ("memory", "max_wait"): "remove it: a request that has waited for its model for 10 s goes before all others",
    ("memory", "hibernate"): "remove it: a model that is woken is loaded again",
    ("memory", "decode_niceness"): "remove it: decoding always gives way to wakes and prompts",
}


def removed_key(path: KeyPath) -> str | None:
    """What to write instead of a removed key; None: the key at `path` was never there."""
    names = tuple(part for part in path if isinstance(part, str))
    if names[:1] == ("model_defaults",):
        names = ("models", *names[1:])
    advice = _REMOVED.get(names)
    return advice and f"is no longer a key; {advice}"
