"""Whose prefill job is next, where one runs at a time: models in cyclic order, and which of them are held back."""

from __future__ import annotations

from typing import Protocol

from muxserve.scheduling.admission import wants_prefill
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.quotas import Quotas
from muxserve.scheduling.state import ModelState


class HoldBack(Protocol):
    """A rule by which prefill jobs wait although they could run."""

    def waits(self, ledger: UnitLedger, model: ModelState, now: float) -> bool:
        """Whether the job of `model` waits now."""
        ...

    def forget(self, model: ModelState) -> None:
        """`model` has no job, or runs it."""
        ...

    def clear(self) -> None:
        """Nothing waits any more."""
        ...


class PrefillOrder:
    """Models with a prefill engine in cyclic order. `hold_back` holds while any model decodes."""

    def __init__(self, quotas: Quotas, hold_back: HoldBack | None = None) -> None:
        self._quotas = quotas
        self._hold_back = hold_back
        self._next = 0

    def next(self, ledger: UnitLedger, now: float, running: ModelState | None) -> ModelState | None:
        """The next model that has a prefill job to run, other than the `running` one."""
        models, limit = ledger.models, self._quotas.limit
        hold_back = self._hold_back
        if hold_back is not None and not any(model.decode.lease is not None for model in models):
            hold_back.clear()
            hold_back = None
        count, start = len(models), self._next
        found: ModelState | None = None
        for offset in range(count):
            model = models[(start + offset) % count]
            asks = model is not running and (model.queue or model.prefilling)
            if not asks or not wants_prefill(ledger, model, now, limit(model)):
                if hold_back is not None:
                    hold_back.forget(model)
            elif hold_back is None:
                return model
            elif found is None and not hold_back.waits(ledger, model, now):
                found = model
        return found

    def started(self, ledger: UnitLedger, model: ModelState) -> None:
        """The job of `model` runs."""
        self._next = (model.index + 1) % len(ledger.models)
        if self._hold_back is not None:
            self._hold_back.forget(model)
