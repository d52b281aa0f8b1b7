"""Ways to serve a fleet, as units to simulate: MuxServe under each policy, and its baselines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from muxserve.costs.architecture import KV_ITEM_BYTES
from muxserve.scheduling.policies import DEFAULT_POLICY
from muxserve.scheduling.quotas import initial_quotas
from muxserve.scheduling.types import EngineSetup, KvLayout, ModelProfile, PoolProfile
from muxserve.simulator.clock import SimulationError
from muxserve.simulator.setup import Pipeline, SimModel, SimUnit
from placement.cluster import PlacedModel, PlacedUnit, Placement
from placement.demand import Demand
from placement.pools import BLOCK_STEP, KVShape, group_pools
from placement.unit import share_out


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to serve. `placement` names the kind of placement that belongs to it; the rest says how its units run
    (`SimUnit`). An empty `policy` is the unit's own. With `managed` shares jobs get the compute that the placement
    gives them, otherwise all of it, whatever runs beside them. `elastic`: engines can change their share, whatever the
    fleet's can. `one_engine`: each model has one engine of both phases; several of a unit divide its compute for
    good."""

    name: str
    about: str
    placement: str = "muxserve"
    policy: str = ""
    adapt_quotas: bool = True
    one_engine: bool = False
    managed: bool = True
    elastic: bool = False


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("muxserve", "colocated models, one KV cache with adaptive quotas"),
        Mode(
            "spatial",
            "every model has GPUs of its own, one engine prefills and decodes",
            placement="spatial",
            policy="free",
            adapt_quotas=False,
            one_engine=True,
        ),
        Mode("temporal", "colocated models take turns on whole GPUs (FCFS)", placement="temporal", policy="fcfs"),
        Mode(
            "slack",
            "muxserve with shares of compute that follow the load, and prefill batched under backlog",
            policy="slack",
            elastic=True,
        ),
        Mode("adbs", "muxserve with ADBS on planned shares, as in the paper", policy="adbs"),
        Mode("free", "muxserve with no lease withheld: every engine with work runs", policy="free"),
        Mode("fcfs", "muxserve's placement with the FCFS policy", policy="fcfs"),
    )
}


def mode_of(name: str) -> Mode:
    """The mode of that name.

    Raises:
        SimulationError: there is none.
    """
    try:
        return MODES[name]
    except KeyError:
        raise SimulationError(f"there is no mode {name!r}; there are {', '.join(MODES)}") from None


def adapt(unit: SimUnit, mode: Mode) -> SimUnit:
    """The unit as `mode` runs it."""
    models = unit.models
    if mode.one_engine:
        whole = sum(model.profile.engines.decode_share for model in models)
        shares = [1.0] if len(models) == 1 else [m.profile.engines.decode_share / max(1.0, whole) for m in models]
        models = tuple(_with_one_engine(model, share) for model, share in zip(models, shares, strict=True))
    if mode.elastic:
        models = tuple(replace(model, profile=model.profile.with_engines(elastic=True)) for model in models)
    if not mode.managed:
        # Leases of all engines fit beside each other, so that nobody waits for compute, and each job takes all of it.
        models = tuple(_shared(model, 1.0 / (2 * len(models)), 1.0) for model in models)
    return replace(
        unit,
        models=models,
        policy=mode.policy or unit.policy,
        adapt_quotas=mode.adapt_quotas,
    )


def _with_one_engine(model: SimModel, share: float) -> SimModel:
    profile = model.profile
    if profile.pooling:
        return _shared(model, share, None)
    both = profile.with_engines(both=True, elastic=False, prefill_share=share, decode_share=share)
    return replace(model, profile=both)


def _shared(model: SimModel, share: float, cost_share: float | None) -> SimModel:
    profile = model.profile.with_engines(prefill_share=share, decode_share=share)
    return replace(model, profile=profile, cost_share=cost_share)


def units_of(
    placement: Placement, models: Mapping[str, Demand], mode: Mode, share_steps: int | None = None
) -> list[SimUnit]:
    """The units of a placement as `mode` runs them; `share_steps` as of `sim_unit`.

    Raises:
        SimulationError: the placement names an unknown model, or a unit has no room for a block of each model alone.
    """
    return [adapt(sim_unit(unit, models, share_steps), mode) for unit in placement.units]


def sim_unit(unit: PlacedUnit, models: Mapping[str, Demand], share_steps: int | None = None) -> SimUnit:
    """A placed unit: its pools, block sizes and quotas are chosen as for a live one.

    Args:
        share_steps: the shares that a lease can give an engine, as of `SimUnit`; 0: that of its start for good, None:
            any.

    Raises:
        SimulationError: as `units_of`.
    """
    unknown = [placed.model for placed in unit.models if placed.model not in models]
    if unknown:
        raise SimulationError(f"unit {unit.name} serves {', '.join(unknown)}, which the fleet does not have")
    tp = len(unit.devices)
    placed = {each.model: each for each in unit.models}
    shapes = {name: models[name].architecture for name in placed}
    groups = group_pools(
        [
            KVShape(n, a.page_head_dim(models[n].dtype), a.kv_dtype(models[n].dtype))
            for n, a in shapes.items()
            if a.pages_per_block
        ],
    )
    weights = [sum(_kv_weight(models[name], placed[name].rate) for name in group.models) for group in groups]
    sizes = share_out(unit.kv_bytes, weights, [0] * len(groups)) if groups else []
    pools: list[PoolProfile] = []
    profiles: dict[str, ModelProfile] = {}
    for index, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        # Page 0 of a pool belongs to nobody.
        pool = PoolProfile(f"pool{index}", size // group.page_bytes - 1, group.page_bytes)
        members = [
            _profile(models[name], placed[name], tp, pool, tokens, len(group.models), share_steps != 0)
            for name, tokens in zip(group.models, group.block_tokens, strict=True)
        ]
        if pool.pages < max(member.kv.pages_per_block for member in members):
            raise SimulationError(
                f"unit {unit.name}: {size} bytes of KV cache per device are too few for {', '.join(group.models)}"
            )
        quotas = initial_quotas(members, pool.pages)
        profiles |= {member.name: replace(member, quota_pages=quotas[member.name]) for member in members}
        pools.append(pool)
    pools = pools or [PoolProfile("pool0", 1)]
    for name in placed:
        if name not in profiles:  # it keeps no KV
            profiles[name] = _profile(models[name], placed[name], tp, pools[0], BLOCK_STEP, 1, share_steps != 0)
    simulated = tuple(
        SimModel(
            profiles[name],
            models[name].architecture,
            models[name].dtype,
            max_len=models[name].context,
            graphs=models[name].graphs,
            prefix_caching=models[name].prefix_caching,
            ahead=models[name].ahead,
        )
        for name in placed
    )
    return SimUnit(
        unit.name,
        unit.device,
        unit.devices,
        simulated,
        tuple(pools),
        unit.policy or DEFAULT_POLICY,
        share_steps=share_steps or 0,
    )


def lone_unit(
    name: str,
    device: str,
    devices: tuple[int, ...],
    model: Demand,
    blocks: int,
    block_tokens: int = 16,
    share: float | None = None,
    pipeline: Pipeline | None = None,
    waiting_tokens: int = 0,
    policy: str = "free",
) -> SimUnit:
    """A unit of one model with one engine of both phases. `blocks` of `block_tokens` tokens are its KV cache, `share`
    is the part of each device on which it runs (None: all of it); `waiting_tokens` as in `EngineSetup`. A replica
    whose prefill rolls has the policy `rolling`."""
    stages = pipeline.stages if pipeline is not None else 1
    tp = max(1, len(devices) // stages)
    # Every stage has as many blocks in use; the one with the most layers has most pages.
    layers = max(pipeline.layers) if pipeline is not None else model.architecture.attention_layers
    kv_heads = max(1, model.architecture.kv_heads // tp)
    pages = blocks * layers * kv_heads
    pool, placed = PoolProfile("pool0", pages), PlacedModel(model.name, 1.0, 1.0, 1.0, "one")
    profile = _profile(model, placed, tp, pool, block_tokens, 1, elastic=False)
    profile = replace(
        profile.with_engines(depth=pipeline.in_flight if pipeline is not None else 1, waiting_tokens=waiting_tokens),
        kv=replace(profile.kv, layers=layers),
        quota_pages=pages,
        floor_pages=pages,
    )
    simulated = SimModel(
        profile, model.architecture, model.dtype, share, model.max_len, model.graphs, model.prefix_caching, model.ahead
    )
    return SimUnit(name, device, devices, (simulated,), (pool,), policy, pipeline=pipeline)


def _kv_weight(model: Demand, rate: float) -> float:
    return rate * model.sequence_tokens * model.architecture.kv_bytes_per_token(model.dtype)


def _profile(
    model: Demand,
    placed: PlacedModel,
    tp: int,
    pool: PoolProfile,
    block_tokens: int,
    members: int,
    elastic: bool,
) -> ModelProfile:
    architecture = model.architecture
    # Each device has its part of the KV heads; beyond their number, copies.
    kv_heads = max(1, architecture.kv_heads // tp) if architecture.causal else 0
    layers = architecture.attention_layers
    per_block = layers * kv_heads
    item = KV_ITEM_BYTES[architecture.kv_dtype(model.dtype)]
    block_bytes = 2 * per_block * block_tokens * architecture.page_head_dim(model.dtype) * item
    state_blocks = math.ceil(architecture.state_bytes(model.dtype, tp) / block_bytes) if per_block else 0
    longest = math.ceil(model.context / block_tokens) + state_blocks
    longest *= per_block
    # The longest sequence, but no more than half of an equal part, so that quotas can move. It is no bound to lengths.
    floor = min(longest, pool.pages // (2 * members))
    return ModelProfile(
        name=model.name,
        rate=placed.rate,
        kv=KvLayout(pool.name, layers, kv_heads, block_tokens, state_blocks),
        engines=EngineSetup(
            placed.prefill_share,
            placed.decode_share,
            model.max_num_seqs,
            model.max_num_batched_tokens,
            both=placed.shape == "one",
            elastic=elastic,
        ),
        quota_pages=0,
        floor_pages=floor,
        tokens=model.sequence_tokens,
        pooling=architecture.pooling,
    )
