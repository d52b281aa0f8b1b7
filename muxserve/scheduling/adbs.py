"""MuxServe's adaptive batch scheduling (arXiv:2404.02015, Algorithm 3) on leases.

Prefill goes first: at most one prefill job at a time runs in the unit, its models in cyclic order. Decode engines, in
the same order, take the remaining compute. While a prefill job waits for compute no decode engine is launched. Quotas
follow the load (`quotas.py`). An engine of both phases is one of the decode engines, and its prompts are part of its
steps.

Where leases of real engines ask for more than the paper's loop says:

* A prefill that waits for *pages* does not hold decode back: only decode frees pages.
* Decode leases are renewed ahead while nobody waits. For a waiting prefill, just enough of them are recalled.
* What was passed over for long goes first: a decode engine that waited much longer than a round takes
  precedence, over a prefill every other time, so that neither a stream of prompts nor small engines starve it.
* A running prefill job takes in more requests of its model while no other model wants to prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

from muxserve.scheduling.admission import wants_decode
from muxserve.scheduling.leases import Quanta
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policy import Policy, cyclic, overdue
from muxserve.scheduling.prefill_order import PrefillOrder
from muxserve.scheduling.quotas import AdaptiveQuotas, QuotaConfig, Quotas
from muxserve.scheduling.state import ModelState
from muxserve.scheduling.types import Grant


@dataclass(slots=True)
class AdbsConfig:
    """`patience` is how many seconds a decode engine is passed over, beyond a full round, before it takes
    precedence."""

    quanta: Quanta = field(default_factory=Quanta)
    quotas: QuotaConfig = field(default_factory=QuotaConfig)
    patience: float = 0.1


class Adbs(Policy):
    """Algorithm 3. One object serves one unit. Another policy may have its own `quotas` and `order` of prefill jobs."""

    name = "adbs"

    def __init__(
        self, config: AdbsConfig | None = None, quotas: Quotas | None = None, order: PrefillOrder | None = None
    ) -> None:
        self.config = config or AdbsConfig()
        super().__init__(self.config.quanta, quotas or AdaptiveQuotas(self.config.quotas))
        self._order = order or PrefillOrder(self.quotas)
        self._next_decode = 0
        self._prefill_is_owed = False
        self._firm: dict[int, float] = {}

    def decide(self, ledger: UnitLedger, now: float) -> list[Grant]:
        models = ledger.models
        free = ledger.share_free
        grants: list[Grant] = []
        ready: list[ModelState] = []
        leased: list[ModelState] = []
        prefilling: ModelState | None = None
        for model in models:
            if model.decode.lease is not None:
                leased.append(model)
            elif wants_decode(ledger, model, now, self.limit(model)):
                ready.append(model)
            if model.prefill.lease is not None and not model.both:
                prefilling = model

        candidate = self._order.next(ledger, now, prefilling)
        launched: list[ModelState] = []
        short_of = 0

        waited = overdue(ready, now - self.config.patience - len(ready) * self.quanta.contended_seconds)
        if waited and not (self._prefill_is_owed and candidate is not None and prefilling is None):
            for model in waited:
                if model.decode.share > free:
                    short_of = model.decode.share - free
                    break
                free -= model.decode.share
                launched.append(model)
                self._firm[model.index] = now
            self._prefill_is_owed = bool(launched)

        if prefilling is not None:
            if candidate is None and not short_of:
                grant = self._prefill_goes_on(ledger, prefilling)
                if grant is not None:
                    grants.append(grant)
        elif candidate is not None and not short_of:
            if candidate.prefill.share <= free:
                grants.append(self._prefill_job(ledger, candidate))
                free -= candidate.prefill.share
                self._order.started(ledger, candidate)
                self._prefill_is_owed = False
            else:
                short_of = candidate.prefill.share - free

        left_out = False
        if ready and not short_of:
            start = next((i for i, m in enumerate(ready) if m.index >= self._next_decode), 0)
            first_left_out: ModelState | None = None
            for model in cyclic(ready, start):
                if model in launched:
                    continue
                if model.decode.share <= free:
                    free -= model.decode.share
                    launched.append(model)
                elif first_left_out is None:
                    first_left_out = model
            left_out = first_left_out is not None
            if first_left_out is not None:
                self._next_decode = first_left_out.index
            elif launched:
                self._next_decode = (launched[-1].index + 1) % len(models)

        contended = left_out or short_of > 0
        grants.extend(self._decode_job(ledger, model, contended) for model in launched)
        if leased:
            recalled = self._recalled(leased, short_of) if short_of else {}
            grants.extend(recalled.values())
            for model in leased:
                if model.index in recalled:
                    continue
                goes_on = self._renewal(ledger, model, now, left_out)
                if goes_on is None and left_out:
                    goes_on = self._shortened(model)
                if goes_on is not None:
                    grants.append(goes_on)
        return grants

    def _recalled(self, leased: list[ModelState], short_of: int) -> dict[int, Grant]:
        """Recall enough decode leases, the oldest first, for a job that is `short_of` some millionths of compute; the
        others go on. By index of the model."""
        for model in leased:
            lease = model.decode.lease
            if lease is not None and not lease.renewable:
                short_of -= lease.share
        recalled: dict[int, Grant] = {}
        for model in sorted(leased, key=attrgetter("decode.lease.granted_at")):
            lease = model.decode.lease
            if short_of <= 0 or lease is None:
                break
            grant = self._recall(model)
            # A lease that was waited for that long is not recalled.
            if grant is not None and self._firm.get(model.index) != lease.granted_at:
                recalled[model.index] = grant
                short_of -= grant.share
        return recalled
