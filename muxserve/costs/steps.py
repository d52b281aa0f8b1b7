"""What steps computed, as cost models count it."""

from __future__ import annotations

from typing import Annotated

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0)]


class StepSums(msgspec.Struct, array_like=True, gc=False):
    """Steps of one kind of one engine, summed up: `steps` of them took `seconds`, computed `tokens` for `sequences`
    with `pairs` of (query, key), and sequences that decoded read `context` tokens of KV. `seconds` contain what passed
    since the step before, where one followed the other at once, and all waiting for a core.

    Prefill steps may have decoding sequences among theirs (of which pairs are not counted); decode steps have no
    prompts, and no pairs.
    """

    steps: _Count = 0
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    tokens: _Count = 0
    pairs: _Count = 0
    sequences: _Count = 0
    context: _Count = 0

    def add(self, seconds: float, batch: StepBatch) -> None:
        """A step took so long."""
        self.steps += 1
        self.seconds += seconds
        self.tokens += batch.tokens
        self.pairs += batch.pairs
        self.sequences += batch.sequences
        self.context += batch.context

    def merge(self, other: StepSums) -> None:
        """These steps as well."""
        self.steps += other.steps
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.pairs += other.pairs
        self.sequences += other.sequences
        self.context += other.context


class StepBatch(msgspec.Struct, frozen=True, gc=False):
    """What one step computes, in the terms of `StepSums`; with `prompts` it is a prefill step."""

    prompts: bool
    tokens: int
    pairs: int
    sequences: int
    context: int
