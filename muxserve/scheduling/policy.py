"""What a policy of a unit is, and the grants that all policies make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeVar

from muxserve.scheduling.admission import Admission, admissible, entering, prefill_steps
from muxserve.scheduling.leases import Quanta
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.quotas import FixedQuotas, Quotas
from muxserve.scheduling.state import ModelState
from muxserve.scheduling.types import PREFILL, Grant, QuotaChange

T = TypeVar("T")

# After so long a policy is asked again that was due already when it was last asked: what is to be tried again waits for
# somebody else's lease, and whoever asked at once would do nothing but ask until that ends.
AGAIN_SECONDS = 0.001


class Policy(ABC):
    """Decides what runs next in a unit.

    The caller carries every grant out and tells the ledger (`UnitLedger.granted`) before it asks again; it asks after
    each batch of events, and at the latest at `wakeup`. Each model has a prefill and a decode engine, or one engine of
    both phases. A job of the latter is a decode job that carries prefill: its lease is one of both phases, and prompts
    enter it as hand-overs enter a decode engine.
    """

    name: ClassVar[str]

    def __init__(self, quanta: Quanta | None = None, quotas: Quotas | None = None) -> None:
        self.quanta = quanta or Quanta()
        self.quotas: Quotas = quotas or FixedQuotas()

    @abstractmethod
    def decide(self, ledger: UnitLedger, now: float) -> list[Grant]:
        """Leases to give, renew or cut short now; at most one per engine."""

    def rebalance(self, ledger: UnitLedger, now: float) -> list[QuotaChange]:
        """Quotas to change now, all at once; they sum to at most the pool. Cheap when nothing is due."""
        return self.quotas.rebalance(ledger, now)

    def wakeup(self, ledger: UnitLedger, now: float) -> float:
        """When to ask again even if nothing happens; infinity for never."""
        return min(self.quotas.due, ledger.next_retry())

    def limit(self, model: ModelState) -> int:
        """Pages up to which `model` admits requests now; less than its quota while that is being lowered."""
        return self.quotas.limit(model)

    def capacity(self, model: ModelState) -> int:
        """Most pages that `model` can ever be given: all of its pool. A request that needs more can never be served."""
        return self.quotas.capacity(model)

    # ------------------------------------------------------------ shared by the policies

    def _prefill_job(self, ledger: UnitLedger, model: ModelState, share: int | None = None) -> Grant:
        """A prefill job: what the engine still has to do, and what may be admitted beside it."""
        return self._prefill_grant(model, admissible(ledger, model, self.limit(model)), share)

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

    def _prefill_goes_on(self, ledger: UnitLedger, model: ModelState, share: int | None = None) -> Grant | None:
        """A running prefill job takes in what may be admitted, one step's tokens ahead; None: nothing may."""
        admission = admissible(ledger, model, self.limit(model), ahead=True) if model.queue else None
        return None if admission is None else self._prefill_grant(model, admission, share)

    def _decode_job(self, ledger: UnitLedger, model: ModelState, contended: bool, share: int | None = None) -> Grant:
        """A decode job: what the engine has, what was handed over to it, and the prompts that may enter it directly."""
        return self._decode_grant(model, contended, share, prompts=self._entering(ledger, model))

    def _decode_grant(
        self,
        model: ModelState,
        contended: bool,
        share: int | None = None,
        steps: int = 0,
        renewable: bool = True,
        prompts: tuple[str, ...] = (),
    ) -> Grant:
        """A lease for the decode engine, which takes in everything handed over to it. `steps` overrides its length."""
        engine = model.decode
        length = self.quanta.decode(engine.step_seconds, contended, model.profile.engines.depth)
        return Grant(
            model.name,
            engine.phase,
            steps or length.steps,
            length.seconds,
            engine.share if share is None else share,
            (*model.handed, *prompts),
            renewable=renewable,
        )

    def _entering(self, ledger: UnitLedger, model: ModelState) -> tuple[str, ...]:
        """The prompts that may enter the model's engine of both phases now."""
        if not model.both or not model.queue:
            return ()
        admission = entering(ledger, model, self.limit(model))
        return () if admission is None else admission.request_ids

    def _renewal(self, ledger: UnitLedger, model: ModelState, now: float, contended: bool) -> Grant | None:
        """What a running decode lease needs: more time when it is half used up and nobody waits, and in any case a
        place in the batch for requests that come in meanwhile, without more steps than it had."""
        engine = model.decode
        lease = engine.lease
        assert lease is not None
        if not lease.renewable:
            return None
        prompts = self._entering(ledger, model)
        if not contended:
            if model.handed or prompts or (engine.inside and lease.due(now)):
                return self._decode_grant(model, contended=False, share=lease.share, prompts=prompts)
        elif model.handed or prompts:
            steps = max(1, lease.left)
            grant = self._decode_grant(model, contended=True, share=lease.share, steps=steps, prompts=prompts)
            return grant._replace(seconds=max(lease.deadline - now, 0.001))
        return None

    def _shortened(self, model: ModelState) -> Grant | None:
        """Cut a long decode lease to a slice, now that others wait."""
        lease = model.decode.lease
        assert lease is not None
        if not lease.renewable or lease.left <= 2 * self.quanta.least_contended_steps:
            return None
        if lease.left <= 2 * self.quanta.decode_steps(model.decode.step_seconds, contended=True):
            return None
        return self._decode_grant(model, contended=True, share=lease.share)

    def _recall(self, model: ModelState) -> Grant | None:
        """Make a running decode engine stop after at most one more step; None if it is about to."""
        lease = model.decode.lease
        assert lease is not None
        if not lease.renewable:
            return None
        return self._decode_grant(model, contended=True, share=lease.share, steps=1, renewable=False)


def overdue(ready: Sequence[ModelState], since: float) -> list[ModelState]:
    """Models whose decode engines have waited since a time before `since`, longest first."""
    found = [m for m in ready if m.decode.wait_since is not None and m.decode.wait_since < since]
    if len(found) > 1:
        found.sort(key=lambda model: model.decode.wait_since or 0.0)
    return found


def cyclic(items: Sequence[T], start: int) -> list[T]:
    """`items` in cyclic order from index `start`."""
    return [*items[start:], *items[:start]]
