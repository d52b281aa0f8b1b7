"""Costs from first principles: a step takes as long as its operations at the device's speed or its bytes at the
device's bandwidth, plus attention, plus all-reduces, and never less than the host needs to launch it.

With W the weights of the layers on one device (n of them), t tokens, F the speed and B the bandwidth that the share
gives (both times an efficiency), norm p:

    linear  = ((2 W t / F)^p + (bytes(W) / B)^p)^(1/p) + L c       and the same for the LM head, one row per sequence
    prefill = linear + 4 L H d pairs / (n F_attention) + reduce(t)
    decode  = linear + kv_bytes context / B_kv + reduce(batch)
    reduce  = 2 L (2 (n-1)/n * t * hidden bytes / link + log2(n) latency)
              and the same again between m machines, with m for n and the network for the link
    step    = max(that, launches) + host                          host = host_step + host_sequence * sequences
              max(that, launches + host) where steps are scheduled ahead (costs/host.py)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from muxserve.costs.architecture import ITEM_BYTES, ModelArchitecture
from muxserve.costs.calibration import LINKS, Calibration, calibration_of
from muxserve.costs.devices import Device, device
from muxserve.costs.host import Host
from muxserve.costs.interference import slowdowns
from muxserve.costs.latency import CostError, Decode, EngineShape, Load, piece_at
from muxserve.costs.work import LayerWork, layer_work


class Roofline:
    """A `LatencyModel` that needs no measurement.

    Args:
        calibration: constants for every device; by default those of the device's kind.
    """

    def __init__(self, calibration: Calibration | None = None) -> None:
        self._calibration = calibration
        self._engines: dict[tuple[ModelArchitecture, EngineShape], RooflineCosts] = {}

    def engine(self, architecture: ModelArchitecture, shape: EngineShape) -> RooflineCosts:
        """Costs of that engine.

        Raises:
            CostError: unknown device or dtype, heads that cannot be split, or a share outside (0, 1].
        """
        key = (architecture, shape)
        costs = self._engines.get(key)
        if costs is None:
            on = device(shape.device)
            costs = RooflineCosts(architecture, shape, on, self._calibration or calibration_of(on.kind))
            self._engines[key] = costs
        return costs

    def slowdowns(self, device: str, loads: Sequence[Load]) -> list[float]:
        """See `costs.interference`; the same for all devices."""
        return slowdowns(loads)


class DeviceWork(NamedTuple):
    """How long a step's bytes alone, and its operations alone, would keep the whole device busy, in seconds."""

    memory: float
    compute: float

    def in_seconds(self, seconds: float) -> Load:
        """The load of a step with that work which takes `seconds`."""
        return Load(min(1.0, self.memory / seconds), min(1.0, self.compute / seconds))


class StepParts(NamedTuple):
    """Seconds of a step by what the engine waits for: a step whose operations take longer than its bytes waits for
    compute, another one for the memory's bandwidth; both may wait for the other devices, and then for the host."""

    compute: float
    bandwidth: float
    communication: float
    host: float


class RooflineCosts:
    """`EngineCosts` of one engine."""

    def __init__(self, architecture: ModelArchitecture, shape: EngineShape, on: Device, by: Calibration) -> None:
        if not 0.0 < shape.share <= 1.0:
            raise CostError(f"the share of an engine must be in (0, 1], not {shape.share}")
        peak = on.peak(shape.dtype)
        self.work: LayerWork = layer_work(architecture, shape.tp, shape.dtype)
        self._overlap = by.overlap
        self._full_speed = peak * by.compute_efficiency
        self._full_bandwidth = on.bandwidth * by.bandwidth_efficiency
        self._speed = self._full_speed * by.compute_share(shape.share)
        self._bandwidth = self._full_bandwidth * by.bandwidth_share(shape.share)
        self._attention_speed = peak * by.attention_efficiency * by.compute_share(shape.share)
        self._kv_bandwidth = on.bandwidth * by.kv_efficiency * by.bandwidth_share(shape.share)
        layers = architecture.layers
        self.host = Host.of(shape, layers, by)
        self._layer_seconds = layers * by.layer_seconds
        link = LINKS[on.link]
        token = 2.0 * layers * architecture.hidden * ITEM_BYTES[shape.dtype]
        self._reduce_token = token * 2.0 * (shape.tp - 1) / shape.tp / (on.link_bandwidth * link.efficiency)
        self._reduce_fixed = 2.0 * layers * math.log2(shape.tp) * link.latency
        self._kv_second = self.work.kv_bytes_per_token / self._kv_bandwidth
        self._state_second = self.work.state_bytes / self._kv_bandwidth
        self._batches: dict[int, tuple[Decode, ...]] = {}

    def layers(self, tokens: int) -> float:
        """Seconds of everything in the layers that is neither attention nor communication, for `tokens` tokens."""
        work, p = self.work, self._overlap
        compute = tokens * work.flops_per_token / self._speed
        memory = (work.weight_bytes(tokens) + tokens * work.activation_bytes) / self._bandwidth
        return float((compute**p + memory**p) ** (1.0 / p)) + self._layer_seconds

    def all_reduces(self, tokens: int) -> float:
        """Seconds of all that one step over `tokens` tokens sums up between devices."""
        return tokens * self._reduce_token + self._reduce_fixed

    def linear(self, tokens: int, rows: int) -> float:
        """Seconds of the layers as above and of the LM head for `rows` tokens."""
        work, p = self.work, self._overlap
        compute, memory = rows * work.head_flops / self._speed, work.head_bytes / self._bandwidth
        return self.layers(tokens) + float((compute**p + memory**p) ** (1.0 / p))

    def prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        """See `EngineCosts.prefill`."""
        return self.host.prefill(self._prefill(tokens, pairs, sequences), sequences)

    def _prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        """What the device computes of a prefill step."""
        attention = self.work.seen_pairs(pairs, tokens) * self.work.flops_per_pair / self._attention_speed
        states = sequences * self._state_second
        return self.linear(tokens, sequences) + attention + states + self.all_reduces(tokens)

    def decode(self, batch: int, context: int) -> Decode:
        """See `EngineCosts.decode`: flat while the host is slower than the device, then affine, and less steep where
        sequences are longer than a window."""
        pieces = self._batches.get(batch)
        if pieces is None:
            pieces = self._batches[batch] = self.host.decode(self._decode(batch), batch)
        return piece_at(pieces, context)

    def _decode(self, batch: int) -> list[Decode]:
        """What the device computes of a decode step."""
        fixed = self.linear(batch, batch) + batch * self._state_second + self.all_reduces(batch)
        windowed = self._kv_second * self.work.windowed
        if not windowed:
            return [Decode(fixed, self._kv_second)]
        filled = float(batch * self.work.window)
        return [
            Decode(fixed, self._kv_second, filled),
            Decode(fixed + windowed * filled, self._kv_second - windowed),
        ]

    def prefill_work(self, tokens: int, pairs: int, sequences: int) -> DeviceWork:
        """What a prefill step asks of the whole device."""
        work = self.work
        moved = work.weight_bytes(tokens) + work.head_bytes + tokens * work.activation_bytes
        flops = tokens * work.flops_per_token + sequences * work.head_flops
        computed = work.seen_pairs(pairs, tokens) * work.flops_per_pair
        attention = computed / self._attention_speed * (self._speed / self._full_speed)
        return DeviceWork(moved / self._full_bandwidth, flops / self._full_speed + attention)

    def decode_work(self, batch: int, context: int) -> DeviceWork:
        """What a decode step asks of the whole device."""
        work = self.work
        kv = work.seen_context(batch, context) * self._kv_second * (self._bandwidth / self._full_bandwidth)
        moved = work.weight_bytes(batch) + work.head_bytes + batch * work.activation_bytes
        flops = batch * (work.flops_per_token + work.head_flops)
        return DeviceWork(moved / self._full_bandwidth + kv, flops / self._full_speed)

    def prefill_parts(self, tokens: int, pairs: int, sequences: int) -> StepParts:
        """What that prefill step waits for."""
        work, device = self.prefill_work(tokens, pairs, sequences), self._prefill(tokens, pairs, sequences)
        return self._parts(work, device, tokens, self.host.prefill(device, sequences))

    def decode_parts(self, batch: int, context: int) -> StepParts:
        """What that decode step waits for."""
        device = piece_at(self._decode(batch), context).seconds(context)
        return self._parts(
            self.decode_work(batch, context), device, batch, self.decode(batch, context).seconds(context)
        )

    def _parts(self, work: DeviceWork, device: float, tokens: int, seconds: float) -> StepParts:
        reduces = self.all_reduces(tokens)
        memory = work.memory * self._full_bandwidth / self._bandwidth
        computes = work.compute * self._full_speed / self._speed > memory
        own = device - reduces
        return StepParts(own if computes else 0.0, 0.0 if computes else own, reduces, seconds - device)

    def prefill_load(self, tokens: int, pairs: int, sequences: int) -> Load:
        """See `EngineCosts.prefill_load`; 1 is what the device really reaches, not its peak."""
        return self.prefill_work(tokens, pairs, sequences).in_seconds(self.prefill(tokens, pairs, sequences))

    def decode_load(self, batch: int, context: int) -> Load:
        """See `EngineCosts.decode_load`; 1 is what the device really reaches, not its peak."""
        return self.decode_work(batch, context).in_seconds(self.decode(batch, context).seconds(context))
