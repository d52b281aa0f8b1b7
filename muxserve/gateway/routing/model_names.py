"""Which model serves a request, by the name that it asks for. Pure: no socket, no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from muxserve.spec import FleetSpec, public_name

_KEY_BYTES = 8


@dataclass(frozen=True)
class ModelNames:
    """The names that requests may ask for.

    Args:
        models: the models behind each name, whether they can be reached at present or not.
        shared: the weights of the models behind each name that several of them share.
    """

    models: Mapping[str, Collection[str]] = field(default_factory=dict)
    shared: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, fleet: FleetSpec) -> ModelNames:
        """Those of a fleet."""
        models: dict[str, set[str]] = {}
        for model in fleet.models:
            for name in (*fleet.names_of(model), *model.adapters):
                models.setdefault(name, set()).add(public_name(model.name))
        return cls(models, fleet.aliases)

    def choose(self, asked: str, request_id: str, able: Collection[str]) -> str | None:
        """The model that serves a request for the shared name `asked`: each of those that are `able` gets its part of
        all requests, by its weight, and the same request always goes to the same one. None: none of them may."""
        weights = {model: weight for model, weight in self.shared[asked].items() if model in able and weight > 0}
        return pick(weights, request_id) if weights else None


def pick(weights: Mapping[str, float], key: str) -> str:
    """One of the names in `weights`, which are positive: of many keys, each gets its part. Equal keys get equal names;
    where weights change, a name that gets more keeps what it had if those before it keep theirs."""
    part = int.from_bytes(blake2b(key.encode(), digest_size=_KEY_BYTES).digest()) / (1 << 8 * _KEY_BYTES)
    left = part * sum(weights.values())
    for name, weight in weights.items():
        left -= weight
        if left < 0:
            return name
    return name  # the sum was rounded up
