"""Instances for prefill and others for decode, and KV that goes from one to the other: within a node (DistServe) or
over the network (MoonCake). A baseline of EcoServe's evaluation, on the engines and the clock of the simulator."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from stock import StockEngine, stock_instance

from muxserve.costs import EngineCosts, LatencyModel
from muxserve.costs.step_costs import StepWork
from muxserve.simulator import Link, Options, SimUnit
from muxserve.simulator.clock import Clock
from muxserve.simulator.engine import PrefillStep
from muxserve.simulator.events import TimedEvent
from muxserve.simulator.requests import SimRequest
from muxserve.workload.trace import TraceRequest


@dataclass(frozen=True)
class SplitOptions:
    """Nodes with `prefill[n]` and `decode[n]` instances on the n-th.

    With `within_node` a request decodes on the node of its prefill. `inside` is the link between two instances of a
    node, of which a node has one, `outside` that of a node's network card, which sends and receives at the same time.
    One transfer after the other goes over a link. `streamed`: layers are sent while later ones are computed, so that
    what is left at the first token is what the link was too slow for.
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    inside: Link
    outside: Link
    within_node: bool
    streamed: bool

    def __post_init__(self) -> None:
        if len(self.prefill) != len(self.decode) or not sum(self.prefill) or not sum(self.decode):
            raise ValueError("give as many prefill as decode counts, and at least one instance of either")
        if self.within_node and any((p == 0) != (d == 0) for p, d in zip(self.prefill, self.decode, strict=True)):
            raise ValueError("within a node there must be instances of both kinds or of neither")


@dataclass
class Node:
    """When its links are free."""

    inside: float = 0.0
    sends: float = 0.0
    receives: float = 0.0


class PrefillEngine(StockEngine):
    """Prompts only; their blocks are held until they are let go of."""

    owner: Split

    def _begin_chunks(self, work: StepWork, now: float) -> None:
        super()._begin_chunks(work, now)
        whole = [request for request, chunk in self.chunks if request.computed + chunk == request.tokens]
        self.owner.prefilling(self, whole, now, self.planned_time)

    def _end_chunks(self, now: float, decoded: int = 0) -> PrefillStep:
        done = super()._end_chunks(now, decoded)
        for _ in range(len(done.finished) + len(done.through)):
            self.waiting.popleft()
        self.owner.prefilled(self, done.through)
        return PrefillStep([], [], done.tokens)

    def boundary(self, now: float) -> None:
        super().boundary(now)
        self.owner.stepped(now)


class DecodeEngine(StockEngine):
    """Decodes only. Sequences that have `arrived` join between two steps."""

    owner: Split
    arrived: list[SimRequest]

    def join(self, request: SimRequest, now: float) -> None:
        """Its KV is here, in blocks that are taken already."""
        self.arrived.append(request)
        self.wake(now)

    def kick(self, now: float) -> None:
        for request in self.arrived:
            self.batch.add(request)
            self.joined.append(request)
            self._dirty = True
        self.arrived.clear()
        super().kick(now)

    def _preempt(self, now: float) -> list[SimRequest]:
        self.owner.preempted(self, super()._preempt(now), now)
        return []

    def boundary(self, now: float) -> None:
        super().boundary(now)
        self.owner.stepped(now)


class Split:
    """A request is prefilled where the fewest prompt tokens wait, and decodes where the fewest tokens are, of the
    instances that it may go to. Its KV is sent once the decoding one has room for it, and stays until it is there.

    `unit` is one instance, with stock engines. `transfers` counts those of KV, `transfer_seconds` sums from a first
    token to the KV being there.
    """

    def __init__(self, unit: SimUnit, latency: LatencyModel, split: SplitOptions, options: Options) -> None:
        self.split = split
        self.transfers = 0
        self.transfer_seconds = 0.0
        (self._model,) = unit.models
        self._clock = Clock()
        self._token_bytes = float(self._model.architecture.kv_bytes_per_token(self._model.dtype))
        self._nodes = [Node() for _ in split.prefill]
        # The nodes of the engines, by their order.
        self._node_of: dict[int, int] = {}
        self._prefill: list[PrefillEngine] = []
        self._decode: list[DecodeEngine] = []
        for node, (prefill, decode) in enumerate(zip(split.prefill, split.decode, strict=True)):
            for kind in [PrefillEngine] * prefill + [DecodeEngine] * decode:
                engine = stock_instance(kind, unit, latency, options, self._clock)
                engine.owner = self  # type: ignore[attr-defined]
                self._node_of[engine.order] = node
                if isinstance(engine, PrefillEngine):
                    self._prefill.append(engine)
                elif isinstance(engine, DecodeEngine):
                    engine.arrived = []
                    self._decode.append(engine)
        # Where each is sent, and who waits for room there.
        self._going: dict[SimRequest, DecodeEngine] = {}
        self._stalled: deque[tuple[PrefillEngine, SimRequest]] = deque()

    def run(self, workload: Sequence[TraceRequest]) -> list[SimRequest]:
        """Play the workload to its end."""
        requests = [SimRequest.of(each, number) for number, each in enumerate(workload)]
        self._clock.run(iter(requests), self._arrive, 0.0)
        return requests

    def _arrive(self, request: SimRequest, now: float) -> None:
        min(self._prefill, key=_queued).arrive(request, now)

    # ------------------------------------------------------------ told by engines

    def preempted(self, engine: DecodeEngine, requests: Sequence[SimRequest], now: float) -> None:
        """They are prefilled again, before others."""
        mine = [each for each in self._prefill if not self._apart(each, engine)]
        for request in requests:
            first = min(mine, key=_queued)
            # Those of the step under way stand in front.
            first.waiting.insert(len(first.chunks), request)
            first.wake(now)

    def prefilling(self, engine: PrefillEngine, requests: Sequence[SimRequest], now: float, end: float) -> None:
        """A step begins with which these prompts are computed to their ends: layers are sent as they are computed."""
        if self.split.streamed:
            for request in requests:
                if request.output > request.made + 1 and not self._stalled and request not in self._going:
                    self._send(engine, request, request.tokens, now, end)

    def prefilled(self, engine: PrefillEngine, requests: Sequence[SimRequest]) -> None:
        """They have their first token here."""
        self._stalled += [(engine, request) for request in requests if request not in self._going]

    def stepped(self, now: float) -> None:
        """Room may have come, or somebody to send."""
        stalled = self._stalled
        for _ in range(len(stalled)):
            source, request = stalled[0]
            if not self._send(source, request, request.tokens - 1, now, now):
                # Other nodes' may go; in a pool that all share the first must be served first.
                if not self.split.within_node:
                    break
                stalled.rotate(-1)
                continue
            stalled.popleft()

    # ------------------------------------------------------------ inside

    def _apart(self, one: StockEngine, other: StockEngine) -> bool:
        return self.split.within_node and self._node_of[one.order] != self._node_of[other.order]

    def _send(self, source: PrefillEngine, request: SimRequest, tokens: int, now: float, computed: float) -> bool:
        """Send that much KV, which is complete at `computed`; False: nobody has room."""
        split, seats = self.split, self._model.profile.engines.max_num_seqs
        able = [each for each in self._decode if not self._apart(source, each)]
        able = [each for each in able if len(each.batch.running) + len(each.arrived) < seats]
        target = min(able, key=lambda each: each.pages.held, default=None)
        if target is None or not target.pages.take(self._blocks(tokens), now, -1):
            return False
        here, there = self._node_of[source.order], self._node_of[target.order]
        link = split.inside if here == there else split.outside
        seconds = tokens * self._token_bytes / link.bandwidth
        sender, receiver = self._nodes[here], self._nodes[there]
        if here == there:
            start = max(now, sender.inside)
            sender.inside = start + seconds
        else:
            start = max(now, sender.sends, receiver.receives)
            sender.sends = receiver.receives = start + seconds
        # The last layer of a stream is sent when it is computed.
        last = computed + seconds / self._model.architecture.layers if computed > now else computed
        there_at = max(start + seconds, last) + link.latency
        self._going[request] = target
        self.transfers += 1
        self.transfer_seconds += max(0.0, there_at - computed)
        self._clock.at(there_at, _KvArrives(self, source, request))
        return True

    def kv_arrived(self, source: PrefillEngine, request: SimRequest, now: float) -> None:
        """A request's KV is where it decodes."""
        target = self._going.pop(request)
        source.pages.release(self._blocks(request.tokens - 1))
        source.wake(now)
        request.unit = target.machine.spec.name
        target.join(request, now)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._model.profile.kv.block_tokens)


@dataclass
class _KvArrives(TimedEvent):
    """A transfer is over."""

    split: Split
    source: PrefillEngine
    request: SimRequest

    def handle(self, now: float) -> None:
        self.split.kv_arrived(self.source, self.request, now)


def _queued(engine: StockEngine) -> int:
    """Prompt tokens that wait there, or one if it is at work on some."""
    return sum(request.tokens - request.computed for request in engine.waiting) + bool(engine.chunks)


def division(
    costs: EngineCosts, unit: SimUnit, step_seconds: float, instances: int, prompt: int, output: int, tpot: float
) -> tuple[int, float]:
    """How many of `instances` should prefill, the others decoding: the division whose slower side serves most requests;
    and how many per second it serves.

    An instance prefills prompts of `prompt` tokens one after the other, and decodes answers of `output` tokens in the
    largest batch that has room and keeps `tpot` seconds per step.
    """
    (model,), (pool,) = unit.models, unit.pools
    capacity = pool.pages // model.profile.kv.pages_per_block * model.profile.kv.block_tokens
    prefill = costs.prefill(prompt, prompt * (prompt + 1) // 2, 1) + step_seconds
    length = prompt + output // 2
    batch = max(1, min(model.profile.engines.max_num_seqs, capacity // (prompt + output)))
    while batch > 1 and costs.decode(batch, batch * length).seconds(batch * length) + step_seconds > tpot:
        batch -= 1
    decode = output * (costs.decode(batch, batch * length).seconds(batch * length) + step_seconds) / batch
    return max(((p, min(p / prefill, (instances - p) / decode)) for p in range(1, instances)), key=lambda pair: pair[1])
