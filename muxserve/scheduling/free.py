"""No lease is withheld: every engine that has work runs, and the hardware shares itself among them.

Pages, seats and quotas are managed as under the other policies, and leases are renewed before they end, so that no
engine waits for its scheduler. Leases overlap: their shares say on how much of the unit each engine may compute, and
together they may be more than the unit.
"""

from __future__ import annotations

from muxserve.scheduling.admission import wants_decode, wants_prefill
from muxserve.scheduling.leases import Quanta
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.quotas import AdaptiveQuotas
from muxserve.scheduling.state import EngineState, ModelState
from muxserve.scheduling.types import WHOLE, Grant


class Free(Policy):
    """One object serves one unit."""

    name = "free"

    def __init__(self, quanta: Quanta | None = None) -> None:
        super().__init__(quanta, AdaptiveQuotas())

    def decide(self, ledger: UnitLedger, now: float) -> list[Grant]:
        grants = []
        for model in ledger.models:
            if not model.both and (grant := self._prefill(ledger, model, now)) is not None:
                grants.append(grant)
            if (grant := self._decode(ledger, model, now)) is not None:
                grants.append(grant)
        return grants

    def _prefill(self, ledger: UnitLedger, model: ModelState, now: float) -> Grant | None:
        share = _share(model, model.prefill)
        if model.prefill.lease is not None:
            return self._prefill_goes_on(ledger, model, share)
        return self._prefill_job(ledger, model, share) if wants_prefill(ledger, model, now, self.limit(model)) else None

    def _decode(self, ledger: UnitLedger, model: ModelState, now: float) -> Grant | None:
        if model.decode.lease is not None:
            return self._renewal(ledger, model, now, contended=False)
        if not wants_decode(ledger, model, now, self.limit(model)):
            return None
        return self._decode_job(ledger, model, contended=False, share=_share(model, model.decode))


def _share(model: ModelState, engine: EngineState) -> int:
    """The share that the engine computes on: everything, where it can change its share."""
    return WHOLE if model.profile.engines.elastic else engine.share
