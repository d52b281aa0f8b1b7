"""Steps that hold prompts and sequences: what an engine does whose stages are a pipeline (gLLM, arXiv:2504.14775).

What goes into each micro-batch is budgeted in the engine (`token_throttling`), which sees how much of the cache is free
at that moment. From here it gets what fits, well before it is needed, since the budget follows the prompt tokens that
wait in it (#WP); and leases that are renewed long before they end, so that the pipeline never runs empty while there is
work.
"""

from __future__ import annotations

from muxserve.scheduling.admission import Admission, admissible
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.state import ModelState
from muxserve.scheduling.types import BOTH, Grant

# Steps of a lease for each micro-batch that may be under way: with half of them left, as many are still to begin as
# are under way.
_STEPS_PER_MICRO_BATCH = 4


class Pipelined(Policy):
    """For one model with an engine of both phases, which does both in every step."""

    name = "pipelined"
    both = True

    def decide(self, ledger: UnitLedger, now: float) -> list[Grant]:
        grants = (self._next(ledger, model, now) for model in ledger.models if model.decode.takes_work)
        return [grant for grant in grants if grant is not None]

    def _next(self, ledger: UnitLedger, model: ModelState, now: float) -> Grant | None:
        engine, waiting = model.decode, model.profile.waiting_tokens
        admission = admissible(ledger, model, ahead=True, waiting=waiting) if model.queue else None
        if admission is None:
            if engine.lease is None:
                if not engine.ready(now):
                    return None
            elif not model.handed and not (engine.inside and engine.lease.due(now)):
                return None
        return self._grant(model, admission)

    def _grant(self, model: ModelState, admission: Admission | None) -> Grant:
        engine = model.decode
        length = self.quanta.decode(engine.step_seconds, contended=False)
        steps = max(length.steps, _STEPS_PER_MICRO_BATCH * model.profile.depth)
        seconds = max(length.seconds, self.quanta.slack * steps * engine.step_seconds)
        admit = (*model.handed, *(admission.request_ids if admission is not None else ()))
        return Grant(model.name, BOTH, steps, seconds, engine.share, admit)
