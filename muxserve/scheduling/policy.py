"""What a policy of a unit is, and what the policies have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeVar

from muxserve.scheduling.admission import Admission, admissible, prefill_steps
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.quanta import Quanta
from muxserve.scheduling.quotas import Claim, max_min, with_fitting_floors
from muxserve.scheduling.state import ModelState, PoolState
from muxserve.scheduling.types import DECODE, PREFILL, Grant, QuotaChange


def lend(pool: PoolState) -> list[QuotaChange]:
    """The changes that bring the pool's quotas towards where they belong; nothing when they are there.

    That is each model's own quota and, in proportion to it, what retired models have no use for; its floor at least.
    What was lent comes back as soon as its borrowers do not hold it any more: no quota is lowered under what its model
    holds and needs to grow, so that nobody is preempted for it.
    """
    serving = [model for model in pool.models if not model.retired]
    whole = sum(model.profile.quota_pages for model in pool.models)
    claims = [Claim(max(1, model.profile.quota_pages), model.profile.floor_pages) for model in serving]
    if len(serving) == len(pool.models):
        targets = {model.name: model.profile.quota_pages for model in serving}
    else:
        shares = max_min(whole, with_fitting_floors(whole, claims))
        targets = {model.name: pages for model, pages in zip(serving, shares, strict=True)}
    if all(model.quota == targets.get(model.name, 0) for model in pool.models):
        return []
    quotas: dict[str, int] = {}
    for model in pool.models:
        held = model.used + model.promised + model.in_engines * model.pages_per_block
        quotas[model.name] = min(model.quota, max(targets.get(model.name, 0), held))
    slack = pool.profile.pages - sum(quotas.values())
    for model in sorted(serving, key=lambda model: quotas[model.name] / max(1, targets[model.name])):
        raised = max(0, min(targets[model.name] - quotas[model.name], slack))
        quotas[model.name] += raised
        slack -= raised
    return [QuotaChange(model.name, quotas[model.name]) for model in pool.models if quotas[model.name] != model.quota]


T = TypeVar("T")

# Between two changes of fixed quotas: what was lent comes back page by page.
LEND_SECONDS = 0.1
# After so long a policy is asked again that was due already when it was last asked: what is to be tried again waits for
# somebody else's lease, and whoever asked at once would do nothing but ask until that ends.
AGAIN_SECONDS = 0.001


class Policy(ABC):
    """Decides what runs next in a unit.

    The caller carries every grant out and tells the ledger (`UnitLedger.granted`) before it asks again; it asks after
    each batch of events, and at the latest at `wakeup`.
    """

    name: ClassVar[str]
    # Whether it is for a model with one engine of both phases, which has a unit to itself, or for engines of each.
    both: ClassVar[bool] = False

    def __init__(self, quanta: Quanta | None = None) -> None:
        self.quanta = quanta or Quanta()
        self._lend_at = 0.0

    def check(self, ledger: UnitLedger) -> None:
        """See whether the policy is made for the unit.

        Raises:
            ValueError: it is not; the message says why.
        """
        for model in ledger.models:
            if model.both != self.both:
                has, wants = "one engine of both phases", "engines of prefill and of decode"
                has, wants = (has, wants) if model.both else (wants, has)
                raise ValueError(f"policy {self.name!r} is for models with {wants}, and {model.name!r} has {has}")
        if self.both and len(ledger.models) != 1:
            raise ValueError(f"policy {self.name!r} is for a unit with one model, and this has {len(ledger.models)}")

    @abstractmethod
    def decide(self, ledger: UnitLedger, now: float) -> list[Grant]:
        """Leases to give, renew or cut short now; at most one per engine, within the free compute."""

    def rebalance(self, ledger: UnitLedger, now: float) -> list[QuotaChange]:
        """Quotas to change now, all at once; they sum to at most the pool. Cheap when nothing is due.

        Unless a policy says otherwise quotas are fixed, and those of retired models are lent.
        """
        if now < self._lend_at or not ledger.memory_up:
            return []
        if all(model.quota == model.profile.quota_pages and not model.retired for model in ledger.models):
            return []
        changes = [change for pool in ledger.pools.values() for change in lend(pool)]
        if changes:
            self._lend_at = now + LEND_SECONDS
        return changes

    def wakeup(self, ledger: UnitLedger, now: float) -> float:
        """When to ask again even if nothing happens; infinity for never."""
        return ledger.next_retry()

    def limit(self, model: ModelState) -> int:
        """Pages up to which `model` admits requests now; less than its quota while that is being lowered."""
        return model.quota

    def capacity(self, model: ModelState) -> int:
        """Most pages that `model` can ever be given; a request that needs more can never be served. What is lent to it
        does not count, since its owner will have it back, but for its floor."""
        return max(model.profile.floor_pages, min(model.quota, model.profile.quota_pages))

    # ------------------------------------------------------------ shared by the policies

    def _decode_grant(
        self, model: ModelState, contended: bool, share: int | None = None, steps: int = 0, renewable: bool = True
    ) -> Grant:
        """A lease for the decode engine, which takes in everything handed over to it. `steps` overrides its length."""
        engine = model.decode
        length = self.quanta.decode(engine.step_seconds, contended)
        return Grant(
            model.name,
            DECODE,
            steps or length.steps,
            length.seconds,
            engine.share if share is None else share,
            tuple(model.handed),
            renewable=renewable,
        )

    def _prefill_job(
        self,
        ledger: UnitLedger,
        model: ModelState,
        limit: int | None = None,
        reserved: int = 0,
        share: int | None = None,
    ) -> Grant:
        """A prefill job: what the engine still has to do, and what may be admitted beside it."""
        return self._prefill_grant(model, admissible(ledger, model, limit, reserved), share)

    def _prefill_grant(self, model: ModelState, admission: Admission | None, share: int | None = None) -> Grant:
        engine = model.prefill
        steps = prefill_steps(model, admission.tokens if admission else 0)
        length = self.quanta.prefill(engine.of(PREFILL).step_seconds, steps)
        return Grant(
            model.name,
            PREFILL,
            length.steps,
            length.seconds,
            engine.share if share is None else share,
            admission.request_ids if admission else (),
        )

    def _renewal(self, model: ModelState, now: float, contended: bool) -> Grant | None:
        """What a running decode lease needs: more time when it is half used up and nobody waits, and in any case a
        place in the batch for requests handed over meanwhile, without more steps than it had."""
        engine = model.decode
        lease = engine.lease
        assert lease is not None
        if not contended and lease.renewable:
            if model.handed or (engine.inside and lease.due(now)):
                return self._decode_grant(model, contended=False, share=lease.share)
        elif model.handed and lease.renewable:
            grant = self._decode_grant(model, contended=True, share=lease.share, steps=max(1, lease.left))
            return grant._replace(seconds=max(lease.deadline - now, 0.001))
        return None

    def _recall(self, model: ModelState) -> Grant | None:
        """Make a running decode engine stop after at most one more step; None if it is about to."""
        lease = model.decode.lease
        assert lease is not None
        if not lease.renewable:
            return None
        return self._decode_grant(model, contended=True, share=lease.share, steps=1, renewable=False)


def cyclic(items: Sequence[T], start: int) -> list[T]:
    """`items` in cyclic order from index `start`."""
    return [*items[start:], *items[:start]]
