"""Costs out of a profile: what was measured, interpolated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.calibration import Calibration, calibration_of
from muxserve.costs.devices import Device, device
from muxserve.costs.interference import slowdowns
from muxserve.costs.latency import CostError, Decode, EngineCosts, EngineShape, LatencyModel, Load
from muxserve.costs.llama_tables import read_llama_tables
from muxserve.costs.outliers import Outlier, Place, find_outliers
from muxserve.costs.profile import (
    DecodeCell,
    EngineProfile,
    Overheads,
    PrefillCell,
    Profile,
    ProfiledModel,
    load_profile,
)
from muxserve.costs.roofline import Roofline
from muxserve.costs.slower import Slower
from muxserve.costs.tables import DecodeTable, PrefillTable
from muxserve.costs.work import LayerWork, layer_work

# Two shares are the same when they differ by less than this: 33 % and a third.
_SAME_SHARE = 0.005
# `Overheads.turn` where it was not measured, here between processes of one machine
# (benchmarks/results/profile_quickstart_cpu.json).
TURN_SECONDS = 0.000744


class ProfileModel:
    """A `LatencyModel` over a profile file. Outliers are found when it is made, listed in `outliers`, and left out.

    Shares between two measured ones are interpolated in 1/share, larger ones than the largest cost as much as that, and
    smaller ones than the smallest cost inversely to the share.

    Args:
        beyond: answers for models, devices and tensor parallelism that were not measured; by default they are errors.
        file: where the profile is from, for people.
    """

    def __init__(self, profile: Profile, beyond: LatencyModel | None = None, file: str = "") -> None:
        self.profile = profile
        self.outliers: list[Outlier] = []
        self.beyond, self.file = beyond, file
        self._groups: dict[tuple[ProfiledModel, str, str, int], list[EngineProfile]] = {}
        self._engines: dict[tuple[ModelArchitecture, EngineShape], EngineCosts] = {}
        groups: defaultdict[tuple[ProfiledModel, str, str, int], list[EngineProfile]] = defaultdict(list)
        for engine in profile.engines:
            groups[_key(engine.shape, engine.where)].append(engine)
        for key, engines in groups.items():
            found = find_outliers(engines, ideal_seconds)
            self.outliers += found
            kept = [_without(engine, found) for engine in engines]
            self._groups[key] = sorted((e for e in kept if e.prefill and e.decode), key=lambda e: e.share)

    def knows(self, architecture: ModelArchitecture, shape: EngineShape) -> bool:
        """Whether that engine was measured, at whatever share."""
        return bool(self._measured(architecture, shape))

    def _measured(self, architecture: ModelArchitecture, shape: EngineShape) -> list[EngineProfile]:
        return self._groups.get(_key(ProfiledModel.of(architecture), shape), [])

    def engine(self, architecture: ModelArchitecture, shape: EngineShape) -> EngineCosts:
        """Costs of that engine.

        Raises:
            CostError: it was not measured and `beyond` was not given, or cannot answer either.
        """
        known = self._engines.get((architecture, shape))
        if known is not None:
            return known
        if not 0.0 < shape.share <= 1.0:
            raise CostError(f"the share of an engine must be in (0, 1], not {shape.share}")
        engines = self._measured(architecture, shape)
        costs: EngineCosts
        if engines:
            costs = MeasuredCosts(architecture, shape, engines, self.profile)
        elif self.beyond is not None:
            costs = self.beyond.engine(architecture, shape)
        else:
            raise CostError(self._unknown(architecture, shape))
        self._engines[architecture, shape] = costs
        return costs

    def slowdowns(self, device: str, loads: Sequence[Load]) -> list[float]:
        """See `costs.interference`; the same for all devices."""
        return slowdowns(loads)

    def _unknown(self, architecture: ModelArchitecture, shape: EngineShape) -> str:
        same = [e for e in self.profile.engines if e.shape == ProfiledModel.of(architecture)]
        if same:
            ways = sorted({f"{e.tp} x {e.device} in {e.dtype}" for e in same})
            return (
                f"the profile has {architecture.name} ({same[0].model}) on {'; '.join(ways)}, but not on "
                f"{shape.tp} x {shape.device} in {shape.dtype}; measure it with `muxserve profile`, or use the roofline"
            )
        models = ", ".join(sorted({engine.model for engine in self.profile.engines})) or "none"
        return (
            f"the profile has no model shaped like {architecture.name} ({architecture.layers} layers of "
            f"{architecture.hidden}); its models: {models}. Measure it with `muxserve profile`, or use the roofline"
        )


class MeasuredCosts:
    """`EngineCosts` of one engine, from cells of the same model on the same devices at one or more shares."""

    def __init__(
        self, architecture: ModelArchitecture, shape: EngineShape, engines: Sequence[EngineProfile], profile: Profile
    ) -> None:
        on = _device(shape.device)
        prefill, decode = at_share(engines, shape.share)
        self._prefill = PrefillTable(prefill)
        self._decode = DecodeTable(decode)
        self._work: LayerWork = layer_work(architecture, shape.tp, shape.dtype)
        by: Calibration = calibration_of(on.kind)
        machine = profile.machines.get(on.name)
        if machine is None:
            self._speed = on.peak(shape.dtype) * by.compute_efficiency
            self._bandwidth = on.bandwidth * by.bandwidth_efficiency
        else:
            self._speed = machine.flops.get(shape.dtype) or on.peak(shape.dtype) * by.compute_efficiency
            self._bandwidth = machine.bandwidth
        # The threads of a CPU engine keep their cores busy whatever they wait for.
        self._busy = shape.share if on.kind == "cpu" else None

    def prefill(self, tokens: int, pairs: int, sequences: int) -> float:
        """See `EngineCosts.prefill`."""
        return self._prefill.seconds(tokens, pairs, sequences)

    def decode(self, batch: int, context: int) -> Decode:
        """See `EngineCosts.decode`."""
        return self._decode.decode(batch, context)

    def prefill_load(self, tokens: int, pairs: int, sequences: int) -> Load:
        """See `EngineCosts.prefill_load`."""
        work = self._work
        flops = tokens * work.flops_per_token + sequences * work.head_flops
        flops += work.seen_pairs(pairs, tokens) * work.flops_per_pair
        moved = work.weight_bytes(tokens) + work.head_bytes + tokens * work.activation_bytes
        return self._load(flops, moved, self.prefill(tokens, pairs, sequences))

    def decode_load(self, batch: int, context: int) -> Load:
        """See `EngineCosts.decode_load`."""
        work = self._work
        seen = work.seen_context(batch, context)
        flops = batch * (work.flops_per_token + work.head_flops) + seen * work.flops_per_pair
        moved = work.weight_bytes(batch) + work.head_bytes + seen * work.kv_bytes_per_token
        seconds = self.decode(batch, context).seconds(context)
        return self._load(flops, moved + batch * work.activation_bytes, seconds)

    def _load(self, flops: float, moved: float, seconds: float) -> Load:
        compute = flops / self._speed / seconds if self._busy is None else self._busy
        return Load(min(1.0, moved / self._bandwidth / seconds), min(1.0, compute))


def overheads_on(latency: LatencyModel, device: str) -> Overheads:
    """Seconds outside of steps as measured on that device; the `turn` as everywhere where it was not measured."""
    if isinstance(latency, Slower):
        return overheads_on(latency.latency, device)
    known = latency.profile.overheads.get(device, Overheads()) if isinstance(latency, ProfileModel) else Overheads()
    return known if known.turn else msgspec.structs.replace(known, turn=TURN_SECONDS)


def ideal_seconds(engine: EngineProfile, phase: str, place: Place) -> float:
    """What the roofline makes of a measured cell."""
    costs = _ROOFLINE.engine(engine.shape.architecture(engine.model), engine.where)
    if phase == "prefill":
        sequences, tokens, context = place
        cell = PrefillCell(sequences, tokens, context, 0.0)
        return costs.prefill(cell.total, cell.pairs, cell.sequences)
    batch, context = place
    return costs.decode(batch, batch * context).seconds(batch * context)


_ROOFLINE = Roofline()


def _device(name: str) -> Device:
    return device(name)


def _key(model: ProfiledModel, where: EngineShape) -> tuple[ProfiledModel, str, str, int]:
    on = _device(where.device)
    # GPUs compute in both 16-bit types at the same speed.
    half = on.kind == "gpu" and where.dtype in ("float16", "bfloat16")
    return model, on.name, "16 bit" if half else where.dtype, where.tp


def _without(engine: EngineProfile, outliers: Sequence[Outlier]) -> EngineProfile:
    left_out = {(o.phase, o.place) for o in outliers if o.share == engine.share}
    return msgspec.structs.replace(
        engine,
        prefill=[cell for cell in engine.prefill if ("prefill", cell.place) not in left_out],
        decode=[cell for cell in engine.decode if ("decode", cell.place) not in left_out],
    )


def at_share(engines: Sequence[EngineProfile], share: float) -> tuple[list[PrefillCell], list[DecodeCell]]:
    """Cells as they would be at `share`, out of engines in order of theirs."""
    for engine in engines:
        if abs(engine.share - share) < _SAME_SHARE:
            return engine.prefill, engine.decode
    if share > engines[-1].share:
        return engines[-1].prefill, engines[-1].decode
    if share < engines[0].share:
        factor = engines[0].share / share
        return (
            [_with_seconds(cell, cell.seconds * factor) for cell in engines[0].prefill],
            [_with_decode_seconds(cell, cell.seconds * factor) for cell in engines[0].decode],
        )
    above = next(i for i, engine in enumerate(engines) if engine.share > share)
    low, high = engines[above - 1], engines[above]
    weight = (1 / share - 1 / high.share) / (1 / low.share - 1 / high.share)
    prefill_low, prefill_high = PrefillTable(low.prefill), PrefillTable(high.prefill)
    prefill = {cell.place: cell for cell in [*low.prefill, *high.prefill]}
    decode = {cell.place: cell for cell in [*low.decode, *high.decode]}
    decode_low, decode_high = DecodeTable(low.decode), DecodeTable(high.decode)

    def prefill_seconds(table: PrefillTable, cell: PrefillCell) -> float:
        return table.seconds(cell.total, cell.pairs, cell.sequences)

    def decode_seconds(table: DecodeTable, cell: DecodeCell) -> float:
        context = cell.batch * cell.context
        return table.decode(cell.batch, context).seconds(context)

    return (
        [
            _with_seconds(c, weight * prefill_seconds(prefill_low, c) + (1 - weight) * prefill_seconds(prefill_high, c))
            for c in prefill.values()
        ],
        [
            _with_decode_seconds(
                c, weight * decode_seconds(decode_low, c) + (1 - weight) * decode_seconds(decode_high, c)
            )
            for c in decode.values()
        ],
    )


def _with_seconds(cell: PrefillCell, seconds: float) -> PrefillCell:
    return PrefillCell(cell.sequences, cell.tokens, cell.context, seconds)


def _with_decode_seconds(cell: DecodeCell, seconds: float) -> DecodeCell:
    return DecodeCell(cell.batch, cell.context, seconds)


def latency_model(profile: Path | None) -> LatencyModel:
    """The roofline; with a profile file, its measurements, and the roofline for what was not measured.

    Raises:
        CostError: the file cannot be read.
    """
    return Roofline() if profile is None else ProfileModel(read_profile(profile), beyond=Roofline())


def read_profile(file: Path) -> Profile:
    """A profile; the file may also be in the format of the step times that MuxServe's authors published.

    Raises:
        CostError: it cannot be read.
    """
    try:
        return load_profile(file)
    except CostError as own:
        try:
            return read_llama_tables(file)
        except CostError:
            raise own from None
