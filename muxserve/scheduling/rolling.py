"""Prefill or decode, one at a time: what a replica does whose prefill rolls (EcoServe, arXiv:2504.18154, section 3.4,
intra-instance scheduling: temporal disaggregation with prefill priority).

Everything that waits and fits is prefilled before decoding goes on. A prompt that comes while sequences decode cuts the
decode lease: the prefill lease that replaces it is met between two steps. The sequences sit still meanwhile and keep
their blocks. How much may come before decoding must go on is not decided here but by whoever places requests
(`muxserve.rolling`), which knows how much time the sequences have saved.
"""

from __future__ import annotations

from muxserve.scheduling.admission import head_fits
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.state import ModelState
from muxserve.scheduling.types import DECODE, PREFILL, Grant


class Rolling(Policy):
    """For one model with an engine of both phases, which does one of them at a time."""

    name = "rolling"

    def decide(self, ledger: UnitLedger, now: float) -> list[Grant]:
        grants = (self._next(ledger, model, now) for model in ledger.models if model.decode.takes_work)
        return [grant for grant in grants if grant is not None]

    def _next(self, ledger: UnitLedger, model: ModelState, now: float) -> Grant | None:
        engine = model.decode
        decodes = bool(model.decoding or model.handed)
        if engine.lease is not None and engine.lease.phase is PREFILL:
            grant = self._prefill_goes_on(ledger, model)
            return grant or (None if model.prefilling or not decodes else self._decode(model))
        if self._prompts(ledger, model, now):
            return self._prefill_job(ledger, model)
        if engine.lease is not None:
            goes_on = bool(model.handed) or (bool(engine.inside) and engine.lease.due(now))
        else:
            goes_on = engine.retry_at <= now
        return self._decode(model) if decodes and goes_on else None

    def _decode(self, model: ModelState) -> Grant:
        return self._decode_grant(model, contended=False)._replace(phase=DECODE)

    @staticmethod
    def _prompts(ledger: UnitLedger, model: ModelState, now: float) -> bool:
        """There is something to prefill: what the engine has, unless that has to wait for pages, or what may enter."""
        if model.prefilling:
            return model.prefill.of(PREFILL).retry_at <= now
        return head_fits(ledger, model)
