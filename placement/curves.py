"""Tables of what one engine can do, made once per (architecture, shape, lengths) and read a million times."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import cached_property

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.latency import EngineCosts, EngineShape, LatencyModel, Load


@dataclass(frozen=True, slots=True)
class CurveLengths:
    """The part of a demand that shapes its curves."""

    prompt: int
    steps: int
    context: int
    max_seqs: int
    max_tokens: int


def batch_grid(largest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and `largest`."""
    grid = {1, largest}
    step = 2
    while step < largest:
        grid |= {step, min(largest, step * 3 // 2)}
        step *= 2
    return sorted(grid)


class DecodeCurve:
    """Decode of one engine by batch size.

    `capacity[i]` are requests per second that a batch of `batch[i]` serves while it always runs: b / (steps * t_d(b)),
    made non-decreasing. Below a batch of 1 the engine is idle part of the time.
    """

    def __init__(self, costs: EngineCosts, lengths: CurveLengths) -> None:
        self._costs, self._lengths = costs, lengths
        self.batch = [float(b) for b in batch_grid(lengths.max_seqs)]
        self.seconds: list[float] = []
        self.capacity: list[float] = []
        best, slowest = 0.0, 0.0
        steps = max(lengths.steps, 1e-3)
        for b in self.batch:
            context = int(b) * lengths.context
            slowest = max(slowest, costs.decode(int(b), context).seconds(context))
            best = max(best, b / (steps * slowest))
            self.seconds.append(slowest)
            self.capacity.append(best)

    @cached_property
    def loads(self) -> list[Load]:
        """What a step asks of the device, by batch size."""
        context = self._lengths.context
        return [self._costs.decode_load(int(b), int(b) * context) for b in self.batch]

    def batch_for(self, rate: float) -> float:
        """The smallest batch whose capacity is `rate`; infinite if none is."""
        capacity = self.capacity
        i = bisect.bisect_left(capacity, rate)
        if i == 0:
            return rate / capacity[0]
        if i == len(capacity):
            return float("inf")
        low, high = capacity[i - 1], capacity[i]
        return self.batch[i - 1] + (self.batch[i] - self.batch[i - 1]) * (rate - low) / (high - low)

    def capacity_at(self, batch: float) -> float:
        """Requests per second of a batch."""
        return batch * self.capacity[0] if batch <= 1.0 else _interpolate(self.batch, self.capacity, batch)

    def seconds_at(self, batch: float) -> float:
        """Seconds of one step."""
        return self.seconds[0] if batch <= 1.0 else _interpolate(self.batch, self.seconds, batch)

    def batch_within(self, seconds: float) -> float:
        """The largest batch whose step takes at most `seconds`; 0 if none does."""
        i = bisect.bisect_right(self.seconds, seconds)
        if i == 0 or i == len(self.seconds):
            return 0.0 if i == 0 else self.batch[-1]
        low, high = self.seconds[i - 1], self.seconds[i]
        return self.batch[i - 1] + (self.batch[i] - self.batch[i - 1]) * (seconds - low) / (high - low)

    def load_at(self, batch: float) -> Load:
        """Load of a step, of the nearest batch size in the table that is not smaller."""
        return self.loads[min(bisect.bisect_left(self.batch, batch), len(self.batch) - 1)]


class PrefillCurve:
    """Prefill of one engine: seconds per request, when `batch` prompts of the mean length are taken together."""

    def __init__(self, costs: EngineCosts, lengths: CurveLengths) -> None:
        p, limit = lengths.prompt, lengths.max_tokens
        if p > limit:
            self.batch, self.seconds = [1.0], [_chunked(costs, p, limit)]
            last = p % limit or limit
            self.load = costs.prefill_load(limit, limit * (p - last), 1)
            return
        self.batch = [float(b) for b in batch_grid(max(1, min(limit // p, lengths.max_seqs)))]
        pairs = p * (p + 1) // 2
        self.seconds = []
        cheapest = float("inf")
        for b in map(int, self.batch):
            cheapest = min(cheapest, costs.prefill(b * p, b * pairs, b) / b)
            self.seconds.append(cheapest)
        self.load = costs.prefill_load(p, pairs, 1)

    def seconds_at(self, batch: float) -> float:
        """Seconds per request when `batch` prompts wait together; beyond a full step it does not fall further."""
        return self.seconds[0] if batch <= 1.0 else _interpolate(self.batch, self.seconds, batch)


def _chunked(costs: EngineCosts, prompt: int, limit: int) -> float:
    """Seconds of a prompt that is longer than one step."""
    seconds = 0.0
    for start in range(0, prompt, limit):
        q = min(limit, prompt - start)
        seconds += costs.prefill(q, q * start + q * (q + 1) // 2, 1)
    return seconds


def _interpolate(xs: list[float], ys: list[float], x: float) -> float:
    if x >= xs[-1]:
        return ys[-1]
    i = bisect.bisect_right(xs, x)
    x0, y0 = xs[i - 1], ys[i - 1]
    return y0 + (ys[i] - y0) * (x - x0) / (xs[i] - x0)


class Curves:
    """The tables of a latency model, cached. Models of the same architecture and lengths share them.

    Raises:
        CostError: on the first use of a shape that the latency model does not know.
    """

    def __init__(self, latency: LatencyModel) -> None:
        self.latency = latency
        self._costs: dict[tuple[ModelArchitecture, EngineShape], EngineCosts] = {}
        self._decode: dict[tuple[ModelArchitecture, EngineShape, CurveLengths], DecodeCurve] = {}
        self._prefill: dict[tuple[ModelArchitecture, EngineShape, CurveLengths], PrefillCurve] = {}

    def _engine(self, architecture: ModelArchitecture, shape: EngineShape) -> EngineCosts:
        key = (architecture, shape)
        found = self._costs.get(key)
        if found is None:
            found = self._costs[key] = self.latency.engine(architecture, shape)
        return found

    def decode(self, architecture: ModelArchitecture, shape: EngineShape, lengths: CurveLengths) -> DecodeCurve:
        """The decode table of that engine."""
        key = (architecture, shape, lengths)
        found = self._decode.get(key)
        if found is None:
            found = self._decode[key] = DecodeCurve(self._engine(architecture, shape), lengths)
        return found

    def prefill(self, architecture: ModelArchitecture, shape: EngineShape, lengths: CurveLengths) -> PrefillCurve:
        """The prefill table of that engine."""
        key = (architecture, shape, lengths)
        found = self._prefill.get(key)
        if found is None:
            found = self._prefill[key] = PrefillCurve(self._engine(architecture, shape), lengths)
        return found
