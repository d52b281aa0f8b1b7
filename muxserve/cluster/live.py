"""How many requests a unit has, by its own account."""

from __future__ import annotations

# Where a request can be in a unit (`muxserve.scheduling`).
_PLACES = ("queued", "prefilling", "handed", "decoding", "moving")


def live_requests(state: dict[str, object], model: str) -> int:
    """The requests of `model` in the unit whose `UnitState` is given."""
    models = state.get("models")
    of = models.get(model) if isinstance(models, dict) else None
    return sum(int(of.get(place, 0)) for place in _PLACES) if isinstance(of, dict) else 0
