"""Instances for prefill and others for decode, and KV that goes from one to the other: within a node (DistServe) or
over the network (MoonCake)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from muxserve.costs import EngineCosts, LatencyModel
from muxserve.simulator.instances.setup import InstanceSpec
from muxserve.simulator.rolling.clock import Arrangement
from muxserve.simulator.rolling.engine import DecodeEngine, Engine, PrefillEngine
from muxserve.simulator.rolling.requests import PhasedRequest
from muxserve.simulator.setup import Link


@dataclass(frozen=True, slots=True)
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


@dataclass(slots=True)
class _Node:
    """When its links are free."""

    inside: float = 0.0
    sends: float = 0.0
    receives: float = 0.0


class Split(Arrangement):
    """A request is prefilled where the fewest prompt tokens wait, and decodes where the fewest tokens are, of the
    instances that it may go to. Its KV is sent once the decoding one has room for it, and stays until it is there."""

    def __init__(self, spec: InstanceSpec, latency: LatencyModel, options: SplitOptions) -> None:
        super().__init__(spec, latency)
        self.options = options
        self._token_bytes = float(spec.architecture.kv_bytes_per_token(spec.shape.dtype))
        self._nodes = [_Node() for _ in options.prefill]
        self._node_of: dict[str, int] = {}
        self._prefill: list[PrefillEngine] = []
        self._decode: list[DecodeEngine] = []
        number = 0
        for node, (prefill, decode) in enumerate(zip(options.prefill, options.decode, strict=True)):
            for kind in [PrefillEngine] * prefill + [DecodeEngine] * decode:
                number += 1
                engine = kind(
                    f"n{node}-{'p' if kind is PrefillEngine else 'd'}{number}", number, spec, self.costs, self
                )
                self.add(engine)
                self._node_of[engine.name] = node
                (self._prefill if isinstance(engine, PrefillEngine) else self._decode).append(engine)  # type: ignore[arg-type]
        # Where each is sent, and who waits for room there.
        self._going: dict[PhasedRequest, DecodeEngine] = {}
        self._stalled: deque[tuple[PrefillEngine, PhasedRequest]] = deque()

    def place(self, request: PhasedRequest, now: float) -> None:
        """See `Arrangement.place`."""
        engine = min(self._prefill, key=lambda each: each.waiting_tokens + each.stepping)
        engine.enqueue(request)
        self.kick(engine, now)

    def preempted(self, engine: Engine, request: PhasedRequest, now: float) -> None:
        """It is prefilled again, before others."""
        mine = [each for each in self._prefill if not self._apart(each, engine)]
        first = min(mine, key=lambda each: each.waiting_tokens + each.stepping)
        first.enqueue(request, first=True)
        # Not at once: this engine is in the middle of making a step.
        self.at(now, lambda then: self.kick(first, then))

    def prefilling(self, engine: Engine, requests: Sequence[PhasedRequest], now: float, end: float) -> None:
        """Layers are sent as they are computed."""
        if self.options.streamed:
            assert isinstance(engine, PrefillEngine)
            for request in requests:
                if request.output > request.made + 1 and not self._stalled:
                    self._send(engine, request, request.tokens, now, end)

    def prefilled(self, engine: Engine, requests: Sequence[PhasedRequest], now: float, seconds: float) -> None:
        """See `engine.Told`."""
        assert isinstance(engine, PrefillEngine)
        for request in requests:
            if request.made < request.output and request not in self._going:
                self._stalled.append((engine, request))

    def stepped(self, engine: Engine, now: float) -> None:
        """Room may have come, or somebody to send."""
        stalled = self._stalled
        for _ in range(len(stalled)):
            source, request = stalled[0]
            if not self._send(source, request, request.tokens - 1, now, now):
                # Other nodes' may go; in a pool that all share the first must be served first.
                if not self.options.within_node:
                    break
                stalled.rotate(-1)
                continue
            stalled.popleft()

    # ------------------------------------------------------------ inside

    def _apart(self, one: Engine, other: Engine) -> bool:
        return self.options.within_node and self._node_of[one.name] != self._node_of[other.name]

    def _send(self, source: PrefillEngine, request: PhasedRequest, tokens: int, now: float, computed: float) -> bool:
        """Send that much KV, which is complete at `computed`; False: nobody has room."""
        options = self.options
        able = [each for each in self._decode if not self._apart(source, each)]
        able = [each for each in able if len(each.batch.running) < self.spec.max_num_seqs]
        target = min(able, key=lambda each: each.load, default=None)
        if target is None or not target.reserve(tokens):
            return False
        here, there = self._node_of[source.name], self._node_of[target.name]
        link = options.inside if here == there else options.outside
        seconds = tokens * self._token_bytes / link.bandwidth
        sender, receiver = self._nodes[here], self._nodes[there]
        if here == there:
            start = max(now, sender.inside)
            sender.inside = start + seconds
        else:
            start = max(now, sender.sends, receiver.receives)
            sender.sends = receiver.receives = start + seconds
        # Of a stream the last layer is sent when it is computed.
        last = computed + seconds / self.spec.architecture.layers if computed > now else computed
        there_at = max(start + seconds, last) + link.latency
        self._going[request] = target
        self.result.transfers += 1
        self.result.transfer_seconds += max(0.0, there_at - computed)
        self.at(there_at, lambda then: self._arrived(source, request, then))
        return True

    def _arrived(self, source: PrefillEngine, request: PhasedRequest, now: float) -> None:
        target = self._going.pop(request)
        source.let_go(request)
        target.arrive(request)
        self.kick(target, now)
        self.kick(source, now)


def division(
    costs: EngineCosts, spec: InstanceSpec, instances: int, prompt: int, output: int, tpot: float
) -> tuple[int, int]:
    """How many of `instances` should prefill and how many decode: the division whose slower side serves most requests.

    An instance prefills prompts of `prompt` tokens one after the other, and decodes answers of `output` tokens in the
    largest batch that has room and keeps `tpot` seconds per step.
    """
    prefill = costs.prefill(prompt, prompt * (prompt + 1) // 2, 1) + spec.step_seconds
    length = prompt + output // 2
    batch = max(1, min(spec.max_num_seqs, spec.capacity // (prompt + output)))
    while batch > 1 and costs.decode(batch, batch * length).seconds(batch * length) + spec.step_seconds > tpot:
        batch -= 1
    decode = output * (costs.decode(batch, batch * length).seconds(batch * length) + spec.step_seconds) / batch
    return max(
        ((p, instances - p) for p in range(1, instances)), key=lambda pair: min(pair[0] / prefill, pair[1] / decode)
    )
