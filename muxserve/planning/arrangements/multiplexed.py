"""An engine for prefill and one for decode, on shares of the same devices, which models may share, too (MuxServe)."""

from __future__ import annotations

from muxserve.config import Fleet
from muxserve.planning.arrangements.base import Arrangement
from muxserve.spec import PolicyName
from placement.cluster import PlacedUnit


class MultiplexedArrangement(Arrangement):
    """See the module."""

    name = "multiplexed"
    dedicated = False

    def policy(self, fleet: Fleet) -> PolicyName:
        """See `Arrangement`."""
        return fleet.policy

    def unit_words(self, unit: PlacedUnit) -> str:
        """See `Arrangement`."""
        return ""

    def plan_keys(self, unit: PlacedUnit) -> dict[str, object]:
        """See `Arrangement`."""
        return {}
