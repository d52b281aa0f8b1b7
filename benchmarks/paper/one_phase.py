"""Steps of one phase at a time, for pipelines whose prefill rolls."""

from __future__ import annotations

from muxserve.scheduling.token_throttling import BudgetInputs, StepBudget, TokenThrottling


class OnePhase(TokenThrottling):
    """Prompts alone while any wait, then sequences alone: what a replica does whose prefill rolls (EcoServe,
    arXiv:2504.18154), in micro-batches that hold the same part of all sequences. Prompts take `tokens` at most; with
    no cache left only sequences can go on."""

    def __init__(self, tokens: int = 2048) -> None:
        super().__init__()
        self.tokens = tokens

    def next(self, state: BudgetInputs) -> StepBudget:
        if state.waiting_tokens and (state.kv_free > 0.0 or not state.decoding):
            return StepBudget(self.tokens, 0)
        return StepBudget(0, self.decode(state))
