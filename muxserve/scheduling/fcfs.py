"""Temporal multiplexing: the whole unit is given to one model at a time.

The model whose work has waited longest gets the unit; prefill and decode of that model run one after the other, prefill
first. When others wait, its slice of time ends, and the model joins the end of the line.

A prefill that finds too few pages gives up those that it has, so that there seem to be some again. Only decode frees
pages for good: it gets a whole lease before the prefill is tried once more.
"""

from __future__ import annotations

from muxserve.scheduling.admission import wants_decode, wants_prefill
from muxserve.scheduling.leases import Quanta
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.state import ModelState
from muxserve.scheduling.types import WHOLE, Grant


class Fcfs(Policy):
    """First come, first served, model by model; a slice lasts `slice_seconds` while others wait."""

    name = "fcfs"

    def __init__(self, quanta: Quanta | None = None, slice_seconds: float = 0.25) -> None:
        super().__init__(quanta)
        self.slice_seconds = slice_seconds
        self._current: ModelState | None = None
        self._slice_ends = slice_seconds
        self._slice_ended: dict[str, float] = {}
        self._prefilled = False

    def decide(self, ledger: UnitLedger, now: float) -> list[Grant]:
        others = self._others(ledger, now)
        over = bool(others) and now >= self._slice_ends
        if ledger.share_used:
            grant = self._continue(ledger, now, over, bool(others))
            return [] if grant is None else [grant]
        current = self._current
        if current is None or over or not self._has_work(ledger, current, now):
            if current is not None:
                self._slice_ended[current.name] = now
            if not others:
                return []
            current = self._current = min(others, key=self._waits_since)
            self._slice_ends = now + self.slice_seconds
        decodes_first = self._prefilled and self._short(current) and current.decode.ready(now)
        self._prefilled = not decodes_first and wants_prefill(ledger, current, now, self.limit(current))
        if self._prefilled:
            return [self._prefill_job(ledger, current, share=WHOLE)]
        return [self._decode_job(ledger, current, contended=bool(others), share=WHOLE)]

    def _others(self, ledger: UnitLedger, now: float) -> list[ModelState]:
        """Models with work that do not have the unit."""
        return [m for m in ledger.models if m is not self._current and self._has_work(ledger, m, now)]

    def _has_work(self, ledger: UnitLedger, model: ModelState, now: float) -> bool:
        limit = self.limit(model)
        return wants_decode(ledger, model, now, limit) or wants_prefill(ledger, model, now, limit)

    @staticmethod
    def _short(model: ModelState) -> bool:
        """The model's prefill found no pages when it was tried last."""
        return model.prefill.retry_delay > 0.0

    def _waits_since(self, model: ModelState) -> tuple[float, int]:
        since = model.work_since if model.work_since is not None else 0.0
        return max(since, self._slice_ended.get(model.name, since)), model.index

    def _continue(self, ledger: UnitLedger, now: float, over: bool, contended: bool) -> Grant | None:
        """What the one running lease needs."""
        model = self._current
        if model is None:
            return None
        if model.decode.lease is None:
            prefills = model.prefill.lease is not None and not over
            return self._prefill_goes_on(ledger, model, WHOLE) if prefills else None
        prefills = wants_prefill(ledger, model, now, self.limit(model))
        if over or (prefills and not self._short(model)):
            return self._recall(model)
        if prefills:
            return None
        return self._turn_goes_on(ledger, model, now) if contended else self._renewal(ledger, model, now, contended)

    def _turn_goes_on(self, ledger: UnitLedger, model: ModelState, now: float) -> Grant | None:
        """Within its slice a model keeps running although others wait, on short leases."""
        lease = model.decode.lease
        assert lease is not None
        prompts = self._entering(ledger, model)
        if lease.renewable and (model.handed or prompts or (model.decode.inside and lease.due(now))):
            return self._decode_grant(model, contended=True, share=WHOLE, prompts=prompts)
        return None
