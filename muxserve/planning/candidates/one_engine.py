"""What an engine of both phases serves by the costs of its steps: the slowest of its stages does either some prompts or
a decode step of some sequences at a time."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from muxserve.costs.architecture import split_layers
from muxserve.costs.latency import LatencyModel
from muxserve.costs.stages import costs_of_stages
from muxserve.costs.step_costs import StepCosts, StepWork
from muxserve.planning.candidates.layouts import LayoutRequest, SimulatedLayout
from placement.candidates import MEETS
from placement.demand import Demand, Member
from placement.estimator import ModelEstimate, ReplicaMemory, ServiceLevel


@dataclass(frozen=True, slots=True)
class OneEngine:
    """One replica. Its stages pass on micro-batches of decoding sequences, and prompts. At most `most` sequences
    decode at once; `token_bytes` of KV are on each device for a token. Rates are requests per second, times seconds."""

    demand: Demand
    stages: Sequence[StepCosts]
    most: int
    token_bytes: float

    @staticmethod
    def of(wanted: LayoutRequest, place: SimulatedLayout, latency: LatencyModel) -> OneEngine:
        """The engine of a place.

        Raises:
            CostError: the latency model does not know the model on these devices.
        """
        demand = wanted.demand
        layers = split_layers(demand.architecture.layers, len(place.blocks))
        stages = [StepCosts(each) for each in costs_of_stages(layers, latency, demand.architecture, place.shape)]
        room = min(place.blocks) * place.block_tokens // demand.sequence_tokens
        return OneEngine(
            demand,
            stages,
            max(1, min(demand.max_num_seqs, room)),
            place.kv_bytes / (min(place.blocks) * place.block_tokens),
        )

    # ------------------------------------------------------------ steps

    @property
    def _prompt(self) -> list[float]:
        """Seconds of a mean prompt in each stage."""
        work = StepWork()
        work.add_prompt(self.demand.prompt_tokens, 0)
        return [stage.seconds(work) for stage in self.stages]

    def _step(self, batch: float) -> float:
        """Seconds of the slowest stage for a micro-batch, of `batch` sequences in all stages."""
        decode = max(1, round(batch / len(self.stages)))
        context = decode * (self.demand.prompt_tokens + self.demand.output_tokens // 2)
        return max(stage.seconds(StepWork(decode=decode, context=context)) for stage in self.stages)

    def _work(self, batch: int) -> float:
        """Seconds that the slowest stage works for a request, while `batch` sequences decode."""
        in_step = max(1.0, batch / len(self.stages))
        return max(self._prompt) + self.demand.decode_steps * self._step(batch) / in_step

    def _tpot(self, batch: int) -> float:
        """Seconds between two tokens, if as many requests come as `batch` sequences are of."""
        busy = max(self._prompt) / self._work(batch)
        return len(self.stages) * self._step(batch) / max(1e-9, 1.0 - busy)

    # ------------------------------------------------------------ rates

    @property
    def _within(self) -> int:
        """The most sequences that decode at once within the objective for a token; 0: not even one does."""
        target = self.demand.slo_tpot
        if target is None or not self.demand.decode_steps:
            return self.most
        return bisect.bisect_right(range(1, self.most + 1), target, key=self._tpot)

    @property
    def capacity(self) -> float:
        """The largest rate that the engine serves."""
        return 1.0 / self._work(self.most)

    @property
    def within_objectives(self) -> float:
        """The largest rate at which requests meet their objectives in the mean."""
        if not self._within:
            return 0.0
        rate = 1.0 / self._work(self._within)
        target = self.demand.slo_ttft
        if target is None or self.ttft(rate) <= target:
            return rate
        # The wait grows with the rate: between 0 and the one that decoding allows.
        parts = range(1, 100)
        met = bisect.bisect_right(parts, target, key=lambda part: self.ttft(rate * part / 100))
        return rate * met / 100

    @property
    def limit(self) -> str:
        """What holds the engine back at that rate, as `ModelEstimate` names it."""
        if self._within < self.most or self.within_objectives < 0.99 * self.capacity:
            return "slo"
        if self.most < self.demand.max_num_seqs:
            return "memory"
        return "sequences" if self.demand.own_batch else "batch"

    def ttft(self, rate: float) -> float:
        """Mean seconds to the first token at a rate: the wait for the slowest stage (Pollaczek-Khinchine, lengths of
        prompts spread as an exponential distribution does), half a decode step, and the prompt in all stages."""
        slowest = max(self._prompt)
        busy = rate * slowest
        if busy >= 1.0:
            return math.inf
        return rate * slowest * slowest / (1.0 - busy) + self._step(self.batch(rate)) / 2 + sum(self._prompt)

    def batch(self, rate: float) -> float:
        """Sequences that decode at once at a rate, in the mean."""
        enough = 1 + bisect.bisect_left(range(1, self.most), rate, key=lambda batch: 1.0 / self._work(batch))
        return min(float(enough), rate * self.demand.decode_steps * self._tpot_at(rate, enough))

    def _tpot_at(self, rate: float, batch: int) -> float:
        busy = min(rate * max(self._prompt), 0.99)
        return len(self.stages) * self._step(batch) / (1.0 - busy)

    # ------------------------------------------------------------ for a plan

    def estimate(self, member: Member, rate: float, share: float, own_bytes: int) -> ModelEstimate:
        """What the engine does of `rate`."""
        served = min(rate, self.capacity)
        batch = self.batch(served)
        within = self.within_objectives
        return ModelEstimate(
            member=member,
            rate=rate,
            throughput=served,
            batch=batch,
            level=ServiceLevel(
                self.ttft(rate) if served >= MEETS * rate else math.inf,
                self._tpot_at(served, max(1, round(batch))) if self.demand.decode_steps else None,
                min(1.0, within / rate),
            ),
            decode_share=share,
            limit=self.limit,
            memory=ReplicaMemory(own_bytes, batch * self.demand.sequence_tokens * self.token_bytes),
        )
