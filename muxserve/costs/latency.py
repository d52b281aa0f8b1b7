"""The interface of all latency models: how long one job of one engine takes.

A decode step's time is piecewise affine in the tokens of context that it reads. So is its sum over a run of steps in
which each sequence grows by a token a step, which is what lets the simulator leap over such runs in closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.calibration import Graphs


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Where an engine runs: on `tp` devices of type `device` (a name of `costs.devices`), with `share` in (0, 1] of the
    compute of each (SMs of a GPU, cores of a CPU), in `dtype`. `graphs` says how a GPU's steps are launched: kernel by
    kernel, in CUDA graphs between attention, or decode steps in one graph each. The devices are those of one machine.
    `ahead`: the host schedules a step while the device
    computes the one before (vLLM's `async_scheduling`)."""

    device: str
    tp: int = 1
    share: float = 1.0
    dtype: str = "bfloat16"
    graphs: Graphs = "piecewise"
    ahead: bool = False


class Load(NamedTuple):
    """What a job asks of its device while it runs alone: fractions of its memory bandwidth and of its compute."""

    bandwidth: float
    compute: float


class Decode(NamedTuple):
    """One decode step of a fixed batch: `fixed + per_token * context` seconds, while the batch's `context` (tokens of
    all its sequences together) is at most `until`."""

    fixed: float
    per_token: float
    until: float = float("inf")

    def seconds(self, context: float) -> float:
        """Seconds of the step at that context."""
        return self.fixed + self.per_token * context

    def run(self, batch: int, context: float, steps: int) -> float:
        """Seconds of `steps` steps in a row, the first at `context`, each sequence growing by a token a step."""
        return steps * (self.fixed + self.per_token * (context + batch * (steps - 1) / 2))


def piece_at(pieces: Sequence[Decode], context: float) -> Decode:
    """The piece of a decode step that holds at that context."""
    for piece in pieces[:-1]:
        if context <= piece.until:
            return piece
    return pieces[-1]


class EngineCosts(Protocol):
    """Jobs of one engine. All times are seconds, alone on the device."""

    def prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        """A prefill step that computes `tokens` prompt tokens of `sequences` prompts. `pairs` counts the (query, key)
        pairs of attention: a chunk of q tokens after c earlier ones adds q*c + q*(q+1)/2."""
        ...

    def decode(self, batch: int, context: int) -> Decode:
        """A decode step of `batch` sequences with `context` tokens of KV between them."""
        ...

    def prefill_load(self, tokens: int, pairs: int, sequences: int) -> Load:
        """What that prefill step asks of the device."""
        ...

    def decode_load(self, batch: int, context: int) -> Load:
        """What that decode step asks of the device."""
        ...


# By how much Llumnix's 1,600 tokens make a decode step of LLaMA-7B on an A10 longer than no context does.
_LONGER = 0.065


def target_load(costs: EngineCosts) -> int:
    """The tokens of KV at which a decode step is as little longer than at its shortest as with Llumnix's target load
    for high-priority requests (arXiv:2406.03243, section 4.4.2: 1,600 on an A10 with LLaMA-7B)."""
    most = costs.decode(1, 1).seconds(1) * (1.0 + _LONGER)
    low, high = 1, 2
    while costs.decode(1, high).seconds(high) <= most and high < 1 << 30:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if costs.decode(1, middle).seconds(middle) <= most else (low, middle)
    return low


class LatencyModel(Protocol):
    """A source of costs: roofline, measured profile."""

    def engine(self, architecture: ModelArchitecture, shape: EngineShape) -> EngineCosts:
        """Costs of the engine of that model and shape.

        Raises:
            CostError: this source knows nothing of that model or shape; the message says what it knows.
        """
        ...

    def slowdowns(self, device: str, loads: Sequence[Load]) -> list[float]:
        """By which factor (at least 1) each of the jobs with these loads is slower than alone while all of them run
        side by side on one device."""
        ...


class CostError(ValueError):
    """A latency model cannot answer; the message says what it knows and what to do."""
