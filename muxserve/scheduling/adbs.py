"""MuxServe's adaptive batch scheduling (arXiv:2404.02015, Algorithm 3) on leases.

Prefill goes first: at most one prefill job at a time runs in the unit, its models in cyclic order. Decode engines, in
the same order, take the remaining compute. While a prefill job waits for compute no decode engine is launched. Quotas
follow the load (`quotas.py`).

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

from muxserve.scheduling.admission import admissible, wants_prefill
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policy import Policy, cyclic
from muxserve.scheduling.quanta import Quanta
from muxserve.scheduling.quotas import QuotaAdapter, QuotaConfig
from muxserve.scheduling.state import ModelState
from muxserve.scheduling.types import WHOLE, Grant, QuotaChange


@dataclass(slots=True)
class AdbsConfig:
    """`patience` is how many seconds a decode engine is passed over, beyond a full round, before it takes
    precedence."""

    quanta: Quanta = field(default_factory=Quanta)
    quotas: QuotaConfig = field(default_factory=QuotaConfig)
    patience: float = 0.1


class Adbs(Policy):
    """Algorithm 3. One object serves one unit."""

    name = "adbs"

    def __init__(self, config: AdbsConfig | None = None) -> None:
        self.config = config or AdbsConfig()
        super().__init__(self.config.quanta)
        self._next_prefill = 0
        self._next_decode = 0
        self._prefill_is_owed = False
        self._firm: dict[int, float] = {}
        self._adapters: list[QuotaAdapter] = []
        self._limits: list[int] = []
        self._adapt_at = 0.0

    # ------------------------------------------------------------ jobs

    def decide(self, ledger: UnitLedger, now: float) -> list[Grant]:
        models = ledger.models
        if len(self._limits) != len(models):
            self._limits = [WHOLE * WHOLE] * len(models)
        free = ledger.share_free
        grants: list[Grant] = []
        ready: list[ModelState] = []
        leased: list[ModelState] = []
        prefilling: ModelState | None = None
        for model in models:
            decode = model.decode
            if decode.lease is not None:
                leased.append(model)
            elif (decode.inside or decode.incoming) and decode.takes_work and decode.retry_at <= now:
                ready.append(model)
            if model.prefill.lease is not None:
                prefilling = model

        candidate = self._candidate(ledger, now, prefilling)
        launched: list[ModelState] = []
        short_of = 0

        overdue = self._overdue(ready, now) if ready else []
        if overdue and not (self._prefill_is_owed and candidate is not None and prefilling is None):
            for model in overdue:
                if model.decode.share > free:
                    short_of = model.decode.share - free
                    break
                free -= model.decode.share
                launched.append(model)
                self._firm[model.index] = now
            self._prefill_is_owed = bool(launched)

        if prefilling is not None:
            if candidate is None and prefilling.queue and not short_of:
                admission = admissible(ledger, prefilling, self._limits[prefilling.index], ahead=True)
                if admission is not None:
                    grants.append(self._prefill_grant(prefilling, admission))
        elif candidate is not None and not short_of:
            model = candidate
            if model.prefill.share <= free:
                grants.append(self._prefill_job(ledger, model, self._limits[model.index]))
                free -= model.prefill.share
                self._next_prefill = (model.index + 1) % len(models)
                self._prefill_is_owed = False
            else:
                short_of = model.prefill.share - free

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
        grants.extend(self._decode_grant(model, contended) for model in launched)
        if leased:
            self._running(leased, grants, now, short_of, left_out)
        return grants

    def _candidate(self, ledger: UnitLedger, now: float, prefilling: ModelState | None) -> ModelState | None:
        """The next model in cyclic order that has a prefill job to run, other than the one that is running one."""
        models = ledger.models
        count, start = len(models), self._next_prefill
        for offset in range(count):
            model = models[(start + offset) % count]
            if model is prefilling or not (model.queue or model.prefilling):
                continue
            if wants_prefill(ledger, model, now, self._limits[model.index]):
                return model
        return None

    def _overdue(self, ready: list[ModelState], now: float) -> list[ModelState]:
        """Decode engines that waited for more than a round, longest first."""
        since = now - self.config.patience - len(ready) * self.quanta.contended_seconds
        overdue = [m for m in ready if m.decode.wait_since is not None and m.decode.wait_since < since]
        if len(overdue) > 1:
            overdue.sort(key=attrgetter("decode.wait_since"))
        return overdue

    def _running(
        self, leased: list[ModelState], grants: list[Grant], now: float, short_of: int, left_out: bool
    ) -> None:
        """Renew, shorten or recall running decode leases.

        When a job is `short_of` some millionths of compute, enough leases are recalled, the oldest first, and the
        others go on. When decode engines are `left_out`, nothing is renewed and no lease is longer than a slice.
        """
        if short_of:
            for model in leased:
                lease = model.decode.lease
                if lease is not None and not lease.renewable:
                    short_of -= lease.share
        recalled: set[int] = set()
        if short_of > 0:
            for model in sorted(leased, key=attrgetter("decode.lease.granted_at")):
                lease = model.decode.lease
                if short_of <= 0 or lease is None:
                    break
                grant = self._recall(model)
                # A lease that was waited for that long is not recalled.
                if grant is not None and self._firm.get(model.index) != lease.granted_at:
                    grants.append(grant)
                    recalled.add(model.index)
                    short_of -= grant.share
        for model in leased:
            if model.index in recalled:
                continue
            grant = self._renewal(model, now, left_out)
            if grant is None and left_out:
                grant = self._shortened(model)
            if grant is not None:
                grants.append(grant)

    def _shortened(self, model: ModelState) -> Grant | None:
        """Cut a long lease to a slice, now that others wait."""
        lease = model.decode.lease
        assert lease is not None
        if not lease.renewable or lease.left <= 2 * self.quanta.least_contended_steps:
            return None
        if lease.left <= 2 * self.quanta.decode(model.decode.step_seconds, contended=True).steps:
            return None
        return self._decode_grant(model, contended=True, share=lease.share)

    # ------------------------------------------------------------ quotas

    def rebalance(self, ledger: UnitLedger, now: float) -> list[QuotaChange]:
        if now < self._adapt_at or not ledger.memory_up:
            return []
        self._adapt_at = now + self.config.quotas.period
        if not self._adapters:
            self._adapters = [QuotaAdapter(pool, self.config.quotas) for pool in ledger.pools.values() if pool.models]
        if all(adapter.settled for adapter in self._adapters):
            return []
        changes = [change for adapter in self._adapters for change in adapter.adapt()]
        self._limits = [0] * len(ledger.models)
        for pool, adapter in zip((p for p in ledger.pools.values() if p.models), self._adapters, strict=True):
            for model, target in zip(pool.models, adapter.targets, strict=True):
                self._limits[model.index] = target
        changed = {change.model: change.pages for change in changes}
        for model in ledger.models:
            self._limits[model.index] = min(self._limits[model.index], changed.get(model.name, model.quota))
        return changes

    def wakeup(self, ledger: UnitLedger, now: float) -> float:
        return min(self._adapt_at, ledger.next_retry())

    def limit(self, model: ModelState) -> int:
        return min(model.quota, self._limits[model.index]) if self._limits else model.quota

    def capacity(self, model: ModelState) -> int:
        others = sum(m.profile.floor_pages for m in model.pool.models if m is not model and not m.retired)
        return max(model.quota, model.profile.floor_pages, model.pool.profile.pages - others)
