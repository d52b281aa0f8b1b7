"""What one step of an engine costs, whatever it consists of: prompts, decoding sequences, or both.

Latency models know steps of one kind (`EngineCosts`). Every executor of steps asks here, the simulator's pipelines and
the engines of `muxserve deploy --simulated` alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from muxserve.costs.latency import Decode, EngineCosts, Load

# Where attention takes nearly all of a prefill step, whatever the model.
_MANY_PAIRS = 1 << 40


@dataclass(slots=True)
class StepWork:
    """What a step computes: `prefill` prompt tokens of `prompts` prompts with `pairs` (query, key) pairs of attention;
    `decode` sequences with `context` tokens of KV between them, the new ones included."""

    prefill: int = 0
    prompts: int = 0
    pairs: int = 0
    decode: int = 0
    context: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that go through the linear layers."""
        return self.prefill + self.decode

    def add_prompt(self, tokens: int, before: int) -> None:
        """The next `tokens` of a prompt of which `before` are computed."""
        self.prompts += 1
        self.prefill += tokens
        self.pairs += tokens * before + tokens * (tokens + 1) // 2

    def add_sequence(self, context: int) -> None:
        """The next token of a sequence that has `context` tokens of KV with it."""
        self.decode += 1
        self.context += context


class StepCosts:
    """Prices the steps of one engine by its costs alone (`engine`)."""

    def __init__(self, costs: EngineCosts) -> None:
        self.engine = costs
        longer = costs.prefill(1, 2 * _MANY_PAIRS, 1) - costs.prefill(1, _MANY_PAIRS, 1)
        self._pair_seconds = longer / _MANY_PAIRS

    def seconds(self, work: StepWork) -> float:
        """How long the step takes alone on its share of the device.

        In a mixed step all tokens go through the linear layers together, which is a prefill of as many tokens, and
        decoding sequences read their KV beside it. That is counted as so many pairs of prefill attention as take the
        same time, so that a step that waits for the host waits only once.
        """
        if not work.decode:
            return self.engine.prefill(work.prefill, work.pairs, work.prompts)
        if not work.prefill:
            return self.engine.decode(work.decode, work.context).seconds(work.context)
        reading = self.engine.decode(work.decode, _MANY_PAIRS).per_token * work.context
        tokens, rows = work.tokens, work.prompts + work.decode
        if self._pair_seconds > 0.0:
            return self.engine.prefill(tokens, work.pairs + round(reading / self._pair_seconds), rows)
        return self.engine.prefill(tokens, work.pairs, rows) + reading

    def decode(self, batch: int, context: int) -> Decode:
        """What a step takes that only decodes so many sequences (`EngineCosts.decode`)."""
        return self.engine.decode(batch, context)

    def load(self, work: StepWork) -> Load:
        """What the step asks of the device meanwhile."""
        if work.prefill:
            return self.engine.prefill_load(work.tokens, work.pairs, work.prompts + work.decode)
        return self.engine.decode_load(work.decode, work.context)
