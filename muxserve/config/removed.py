"""Keys of earlier versions that are no longer there, each with what to write instead."""

from __future__ import annotations

from muxserve.config.problems import KeyPath

# By key path without the positions of lists and the names of models, tenants and levels.
_REMOVED: dict[tuple[str, ...], str] = {
    ("migration", "models"): "remove it: models stay in the unit that the plan gives them; `muxserve scale` adds a "
    "replica elsewhere, and `muxserve drain` empties a unit",
    ("memory", "decode_niceness"): "remove it: decoding always gives way to wakes and prompts",
}


def removed_key(path: KeyPath) -> str | None:
    """What to write instead of a removed key; None: the key at `path` was never there."""
    advice = _REMOVED.get(tuple(part for part in path if isinstance(part, str)))
    return advice and f"is no longer a key; {advice}"
