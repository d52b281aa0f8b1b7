"""Token Throttling: how many prefill and decode tokens the next micro-batch of an engine may hold (gLLM,
arXiv:2504.14775).

A pipeline of engines' stages has bubbles when micro-batches that follow each other differ in size. A fixed token budget
(Sarathi-Serve) makes them differ: prompts fill it while there are prompts, and whichever micro-batch comes first takes
every sequence that is ready to decode. Token Throttling budgets the two kinds apart, from what the whole engine holds:

    decode  = #RD / #PP_depth
    prefill = max(min(#WP / #T, #MaxP * (KV_free - KV_thresh) / (1 - KV_thresh)), #MinP)              (Eq. 3)

Pure: it takes what the engine holds and answers a budget. One stage is a pipeline of depth 1: all decode in each
step, and only the prefill half throttles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple


class BudgetInputs(NamedTuple):
    """What a budget is made from, counted over all micro-batches of one engine.

    `waiting_tokens` are prompt tokens in no micro-batch yet (#WP; of preempted sequences their outputs too). `decoding`
    sequences have their first token (#RD), of which `ready` are in no micro-batch now. `kv_free` is the free fraction
    of the KV cache, in 0..1, of the fullest stage. `depth` is the number of micro-batches that may be in flight
    (#PP_depth).
    """

    waiting_tokens: int
    decoding: int
    ready: int
    kv_free: float
    depth: int


class StepBudget(NamedTuple):
    """At most so many prompt tokens, and so many sequences that decode, in the next micro-batch. One of them is above
    zero whenever something could run."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class Throttle:
    """Hyper-parameters of Eq. 3, with the paper's defaults.

    `iterations` (#T) micro-batches are to take the prompts that wait now, of at most `max_prefill` (#MaxP) and at least
    `min_prefill` (#MinP) tokens. Prefill is suspended while at most `kv_threshold` (KV_thresh, a fraction) of the cache
    is free.
    """

    iterations: int = 8
    max_prefill: int = 2048
    min_prefill: int = 32
    kv_threshold: float = 0.05

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"iterations (#T) must be at least 1, not {self.iterations}")
        if not 1 <= self.min_prefill <= self.max_prefill:
            raise ValueError(
                f"prefill tokens need 1 <= min_prefill <= max_prefill, not {self.min_prefill} and {self.max_prefill}"
            )
        if not 0.0 <= self.kv_threshold < 1.0:
            raise ValueError(f"kv_threshold must be in [0, 1), not {self.kv_threshold}")

    def prefill(self, state: BudgetInputs) -> int:
        """Eq. 3, in whole tokens.

        Below the threshold the formula would still grant #MinP; the paper suspends prefill there, and so does this. But
        memory comes back only from sequences that decode. With none of them the utilisation says nothing about what to
        do, and a prompt that fills the cache would wait for ever for its last tokens; so it does not count then.
        """
        most = float(self.max_prefill)
        if state.decoding:
            if state.kv_free <= self.kv_threshold:
                return 0
            most *= (state.kv_free - self.kv_threshold) / (1.0 - self.kv_threshold)
        return max(int(min(most, state.waiting_tokens / self.iterations)), self.min_prefill)


def prompt_tokens_ahead(stages: int, step_tokens: int, throttle: Throttle | None) -> int:
    """Prompt tokens that may be in an engine before they are computed: what the micro-batches under way may take, of
    `step_tokens` at most, and one more. With a throttled budget #T * #MaxP, beyond which the number of waiting tokens
    (#WP) does not matter."""
    tokens = (stages + 1) * step_tokens
    return tokens if throttle is None else max(tokens, throttle.iterations * throttle.max_prefill)


class TokenBudget(ABC):
    """Decides before each micro-batch of one engine how large it may be. May remember what it decided."""

    @abstractmethod
    def next(self, state: BudgetInputs) -> StepBudget:
        """The budget of the micro-batch that is made now. While no prompt waits and one micro-batch may be in flight,
        it depends on the number of sequences alone, and nothing is remembered of it."""


class TokenThrottling(TokenBudget):
    """gLLM's: prefill by Eq. 3, decode the same part of all sequences in each micro-batch.

    #RD / #PP_depth is seldom whole. What is cut off is owed to the micro-batches that follow, so that #PP_depth of them
    in a row hold every sequence once. Where there are fewer sequences than micro-batches each gets its own.
    """

    def __init__(self, throttle: Throttle | None = None) -> None:
        self.throttle = throttle or Throttle()
        self._owed = 0

    def next(self, state: BudgetInputs) -> StepBudget:
        return StepBudget(self.throttle.prefill(state), self.decode(state))

    def decode(self, state: BudgetInputs) -> int:
        """The sequences of the next micro-batch."""
        if not state.decoding:
            self._owed = 0
            return 0
        share, self._owed = divmod(state.decoding + min(self._owed, state.depth - 1), state.depth)
        return max(1, share)


class FixedBudget(TokenBudget):
    """Sarathi-Serve's: all that are ready decode, prompts take what is left of `tokens` (its token budget, vLLM's
    max_num_batched_tokens)."""

    def __init__(self, tokens: int = 2048) -> None:
        if tokens < 1:
            raise ValueError(f"the token budget must be at least 1, not {tokens}")
        self.tokens = tokens

    def next(self, state: BudgetInputs) -> StepBudget:
        decode = min(state.ready, self.tokens)
        return StepBudget(self.tokens - decode, decode)
