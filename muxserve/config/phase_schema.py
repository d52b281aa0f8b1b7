"""The fleet file's objects for the arrangement of prefill and decode: rolling over replicas, and pipelines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from muxserve.config.values import Section

PhasesChoice = Literal["multiplexed", "rolling", "pipelined", "auto"]
BatchingPolicy = Literal["throttled", "fixed", "vllm"]


def _spared(value: object) -> object:
    if value == "mean":
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"must be a number of at least 0 and below 1, or mean, not {value!r}")
    return float(value)


Spared = Annotated[
    float | Literal["mean"],
    BeforeValidator(_spared),
    WithJsonSchema({"anyOf": [{"const": "mean"}, {"type": "number", "minimum": 0, "exclusiveMaximum": 1}]}),
]


class Rolling(Section):
    """How prefill rolls over the replicas of a model (EcoServe). Macro instances have between `lower` and `upper`
    members."""

    lower: int = Field(default=4, ge=1, description="Fewest replicas that a split leaves in a macro instance (N_l)")
    upper: int = Field(default=16, ge=1, description="Most replicas of a macro instance (N_u), at least 2 * lower - 1")
    spared: Spared = Field(
        default=0.25,
        description="Whose saved time decides whether decodes can wait for a prefill: the one that this part of them "
        "has less than, or the mean of all",
    )

    @property
    def quantile(self) -> float | None:
        """`spared` as a number; None: the mean."""
        return None if self.spared == "mean" else self.spared


class Batching(Section):
    """What one step of a pipelined model may hold. `throttled` is gLLM's Token Throttling (its Eq. 3), `fixed` fills
    `max_num_batched_tokens` up with prompts, `vllm` leaves it to vLLM."""

    policy: BatchingPolicy = Field(default="throttled", description="How prefill and decode tokens are budgeted")
    iterations: int = Field(default=8, ge=1, description="Steps in which the prompts that wait now are to be done (#T)")
    max_prefill: int = Field(default=2048, ge=1, description="Most prompt tokens of a step (#MaxP)")
    min_prefill: int = Field(default=32, ge=1, description="Fewest prompt tokens of a step that has some (#MinP)")
    kv_threshold: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Free part of the KV pool at which prefill is suspended (KV_thresh)",
    )
