"""From planned units to the specs that their processes read, and from the fleet file to the rules of replicas."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import msgspec

from muxserve.cluster.units import PlannedUnit
from muxserve.config import ALL_MODELS, AUTO, Fleet, Model
from muxserve.config.adapters import slots_of
from muxserve.config.schema import Budgets
from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.calibration import graphs_of
from muxserve.costs.correction import predicted_cells
from muxserve.costs.devices import device
from muxserve.costs.latency import CostError, EngineCosts, EngineShape, LatencyModel, target_load
from muxserve.costs.profile import EngineProfile, ProfiledModel
from muxserve.costs.roofline import Roofline
from muxserve.gpu.nvml import device_name
from muxserve.gpu.unit import GpuUnit
from muxserve.planning.candidates.device_pool import CPU
from muxserve.planning.demand.demands import CPU_BATCH, batch_of
from muxserve.planning.specs.residency import host_copies_of
from muxserve.planning.specs.unit_plan import ResolvedUnit
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.priorities import Level
from muxserve.replicas.scaling import ScalingRules
from muxserve.rolling.rules import RollingRules
from muxserve.spec import (
    PRETENDED_PAGE_BYTES,
    BatchesSpec,
    BudgetPeriod,
    BudgetSpec,
    FallbackSpec,
    FleetSpec,
    GatewaySpec,
    HttpSpec,
    Keys,
    ModelSpec,
    PoolSpec,
    ResidencySpec,
    ResponsesSpec,
    SimulatedSpec,
    TenantLimits,
    TenantSpec,
    TlsSpec,
    UnitEntry,
    UnitSpec,
    WatchdogRules,
    in_chunks,
    offered,
    public_name,
)
from placement.unit import MAX_BLOCKS
from placement.unit_types import Device

# Stands for a GPU of which nothing is known. What is observed corrects predictions within some prefills.
UNKNOWN_GPU = "A100-80GB"
# How many times as many blocks as its pool holds whole ones a page table may have; the memory manager allows four.
MOST_BLOCKS = 3
# Predicted lengths, in tokens: 1, then these and so on, four times as long each.
_FIRST, _FACTOR = 16, 4


def unit_spec_of(plan: ResolvedUnit, run_dir: str) -> UnitSpec:
    """The spec of a planned unit whose models are all local."""
    pools = [PoolSpec(pool.name, pool.page_bytes, pool.num_pages) for pool in plan.unit.pools]
    if plan.fleet.memory is not None:
        pools = [in_chunks(pool, None if plan.gpu is None else plan.gpu.deployed) for pool in pools]
    models = [_model(plan, index) for index in range(len(plan.unit.models))]
    if plan.gpu is not None:
        shares = plan.gpu.shares
        models = [
            msgspec.structs.replace(m, prefill_share=shares[m.name].prefill, decode_share=shares[m.name].decode)
            for m in models
        ]
    return UnitSpec(
        run_dir=run_dir,
        unit=plan.name,
        policy=plan.policy,
        cores=plan.unit.cores,
        pools=pools,
        models=models,
        ranks=plan.demands[0].ranks,
        gpu=plan.gpu.deployed if plan.gpu else None,
        migration_bandwidth=float((plan.fleet.migration and plan.fleet.migration.bandwidth) or 0),
        migration=migration_of(plan.fleet) or MigrationRules(),
        levels=levels_of(plan.fleet),
        watchdog=watchdog_of(plan.fleet),
        host_copies=host_copies_of(plan),
        resting=plan.gpu.resting_room if plan.gpu is not None else None,
        decode_gives_way=plan.fleet.memory is not None and plan.gpu is None,
    )


def gateway_of(fleet: Fleet, host: str | None = None, port: int | None = None) -> GatewaySpec:
    """The endpoint of a fleet; `host` and `port` override the fleet file's."""
    gateway = fleet.gateway
    return GatewaySpec(
        host=gateway.host if host is None else host,
        port=gateway.port if port is None else port,
        api_keys=gateway.keys,
        http=HttpSpec(gateway.max_body, tuple(gateway.cors_origins), gateway.access_log, gateway.ui),
        drain_seconds=gateway.drain_seconds,
        count=gateway.count,
        tls=TlsSpec(gateway.tls.cert, gateway.tls.key) if gateway.tls is not None else None,
        responses=ResponsesSpec(gateway.responses) if gateway.responses else None,
        batches=BatchesSpec(gateway.batches) if gateway.batches else None,
    )


def _model(unit: ResolvedUnit, index: int) -> ModelSpec:
    model, plan, demand = unit.fleet.models[index], unit.unit.models[index], unit.demands[index]
    assert model.path is not None, "fetch() gives every model a path"
    batch, latent = batch_of(model, CPU_BATCH), demand.architecture.latent
    a = demand.architecture
    device: Device = "cpu" if unit.gpu is None else "cuda"
    pages, blocks = demand.pages_per_block > 0, plan.table.num_blocks
    windowed = a.windowed if a.window < plan.max_len and demand.gives_back else ()
    # vLLM computes no prompt in chunks whose tokens see what comes after them, nor, on CPU, with latent attention.
    in_one_piece = not demand.architecture.causal or (latent is not None and device == "cpu")
    return ModelSpec(
        name=model.name,
        path=model.path,
        pool=plan.pool,
        dtype=demand.dtype,
        layers=demand.layers,
        kv_heads=demand.kv_heads if pages else 0,
        head_dim=demand.architecture.head_dim,
        block_tokens=plan.table.block_tokens,
        num_blocks=_block_ids(blocks, a.layers, a.layers - len(windowed)) if pages else blocks,
        quota_pages=plan.quota_pages,
        floor_pages=plan.floor_pages,
        max_len=plan.max_len,
        rate=model.rate,
        request_tokens=model.workload.tokens,
        max_num_seqs=batch.seqs,
        max_num_batched_tokens=max(batch.tokens, plan.max_len) if in_one_piece else batch.tokens,
        prefix_caching=_caches_prefixes(model, demand.architecture),
        threads=plan.threads,
        prefill_share=plan.share,
        decode_share=plan.share,
        **_followed(model),
        engine_args=_engine_args(model, a),
        shape="one" if demand.one_engine else "split",
        stages=demand.stages,
        rolling=model.rolls,
        target_load=target_load(Roofline().engine(demand.architecture, _shape(unit, index))),
        pooling=demand.architecture.pooling,
        text_only=demand.architecture.text_only,
        sees_images=demand.architecture.sees_images,
        adapters=dict(model.adapters or {}),
        adapter_slots=slots_of(model),
        latent=latent.width if latent is not None and pages else 0,
        window=a.window if windowed else 0,
        windowed_layers=windowed,
        state_blocks=plan.table.state_blocks,
        zeroed=plan.table.zeroed,
        kv="private" if demand.private else "pool",
        kv_bytes=plan.cache_bytes,
    )


def _engine_args(model: Model, architecture: ModelArchitecture) -> dict[str, object]:
    """vLLM's options. The encoders of a multi-modal model that sees no images are not loaded."""
    text = architecture.multi_modal and not architecture.sees_images
    return {**({"language_model_only": True} if text else {}), **model.engine_args}


def _caches_prefixes(model: Model, architecture: ModelArchitecture) -> bool:
    """Whether prefixes are cached. With states only if the file asks for it: a snapshot takes the pages of thousands
    of tokens."""
    asked = "prefix_caching" in model.model_fields_set
    return model.prefix_caching and (asked or architecture.states is None)


def _block_ids(whole: int, layers: int, full: int) -> int:
    """Size of the page table of a model, where its pool holds `whole` blocks of all `layers`. A pool holds more blocks
    behind a window, which have pages of the `full` layers only; up to what the memory manager allows for a pool."""
    return min(MAX_BLOCKS, whole * min(MOST_BLOCKS, -(-layers // full) if full else MOST_BLOCKS))


def planned_unit(
    plan: ResolvedUnit,
    run_dir: str,
    keys: Keys | None = None,
    simulated: SimulatedSpec | None = None,
    latency: LatencyModel | None = None,
) -> PlannedUnit:
    """What starts a planned unit whose models are all local.

    Args:
        run_dir: of the fleet; the unit's is below it.
        keys: the fleet's, if it is reached from other machines.
        simulated: what its engines only pretend to compute on.
        latency: what their steps are predicted to cost; the roofline by default.
    """
    unit_spec = unit_spec_of(plan, os.path.join(run_dir, plan.name))
    costs = predicted_costs(plan, unit_spec, latency or Roofline())
    unit_spec = msgspec.structs.replace(unit_spec, keys=keys, costs=costs)
    if simulated is not None:
        return PlannedUnit(pretended(unit_spec, plan.gpu, simulated), plan.served, rolling=rolling_of(plan))
    return PlannedUnit(unit_spec, plan.served, plan.gpu_plan(), rolling_of(plan))


def pretended(unit_spec: UnitSpec, gpu: GpuUnit | None, simulated: SimulatedSpec) -> UnitSpec:
    """A unit as one that computes nothing: one process for each engine, and one pool for all of its ranks, since nobody
    reads what is in it. One on GPUs pretends to have them: it runs on the CPU, with as many pages as on each GPU, which
    take no memory to speak of."""
    simulated = msgspec.structs.replace(simulated, ranks=unit_spec.ranks)
    if gpu is None:
        return msgspec.structs.replace(unit_spec, ranks=1, simulated=simulated)
    # A chunk has the pages that it has on a GPU.
    pools = [
        pool if pool.chunk_bytes else msgspec.structs.replace(pool, page_bytes=PRETENDED_PAGE_BYTES)
        for pool in unit_spec.pools
    ]
    kind = device_name(gpu.gpus[0]) or UNKNOWN_GPU
    return msgspec.structs.replace(
        unit_spec,
        gpu=None,
        ranks=1,
        pools=pools,
        models=[msgspec.structs.replace(model, threads=1) for model in unit_spec.models],
        simulated=msgspec.structs.replace(simulated, device=kind, gpus=tuple(each.uuid for each in gpu.gpus)),
    )


def predicted_costs(plan: ResolvedUnit, unit_spec: UnitSpec, latency: LatencyModel) -> dict[str, list[EngineProfile]]:
    """The predicted costs of steps of the unit's models, at each share that engines can have. Models that answer with
    vectors, and models that `latency` does not know, are left out."""
    found: dict[str, list[EngineProfile]] = {}
    steps = unit_spec.share_steps
    for index, model in enumerate(unit_spec.models):
        architecture = plan.demands[index].architecture
        if model.pooling:
            continue
        shares = {model.prefill_share, model.decode_share, *(step / steps for step in range(1, steps + 1))}
        shape = _shape(plan, index)
        try:
            found[model.name] = [
                EngineProfile(
                    model.name,
                    ProfiledModel.of(architecture),
                    shape.device,
                    shape.dtype,
                    shape.tp,
                    share,
                    *predicted_cells(
                        latency.engine(architecture, replace(shape, share=share)),
                        model.max_num_batched_tokens,
                        model.max_num_seqs,
                        model.max_len,
                    ),
                )
                for share in sorted(shares)
            ]
        except CostError:
            continue
    return found


def fleet_spec_of(
    fleet: Fleet,
    units: Sequence[PlannedUnit],
    run_dir: str,
    host: str | None = None,
    port: int | None = None,
    keys: Keys | None = None,
    tokens_host: str = "",
    residency: Mapping[str, ResidencySpec] | None = None,
) -> FleetSpec:
    """The fleet as it is at the start. Arguments are those of `planned_unit`; `tokens_host` is the address under which
    engines of other machines reach the gateways. `residency`, by unit: by what memory decides who is awake."""
    return FleetSpec(
        run_dir=run_dir,
        gateway=gateway_of(fleet, host, port),
        models=offered((unit.unit_spec.models for unit in units), [model.name for model in fleet.models]),
        units=[
            UnitEntry(unit.unit_spec, unit.unit_spec.unit_address, unit.unit_spec.migrator_address, list(unit.serves))
            for unit in units
        ],
        scaling=scaling_of(fleet),
        migration=migration_of(fleet),
        dispatch=fleet.dispatch,
        levels=levels_of(fleet),
        key_levels=fleet.gateway.key_priorities,
        tenants=tenants_of(fleet),
        usage_file=fleet.gateway.usage_file if fleet.tenants else "",
        keys=keys,
        tokens_host=tokens_host,
        watchdog=watchdog_of(fleet),
        # Replicas of a model are alike, so that any of them says how long prefills take.
        residency=dict(residency or {}),
        aliases=fleet.aliases,
        fallbacks=fallbacks_of(fleet),
        rolling={model.name: unit.rolling for unit in units if unit.rolling for model in unit.unit_spec.models},
    )


def settings_of(wanted: Fleet, fleet: FleetSpec) -> FleetSpec:
    """`fleet` with keys, tenants, shared names, and of models limits, objectives, aliases and bounds of replicas of
    `wanted`."""
    declared = {model.name: model for model in wanted.models}
    rules, models, scaling = scaling_of(wanted), [], {}
    for model in fleet.models:
        name = public_name(model.name)
        new = declared.get(name)
        models.append(msgspec.structs.replace(model, **_followed(new)) if new is not None else model)
        known = rules.get(name) if new is not None else fleet.scaling.get(model.name)
        if known is not None:
            scaling[model.name] = known
    return msgspec.structs.replace(
        fleet,
        gateway=msgspec.structs.replace(fleet.gateway, api_keys=wanted.gateway.keys),
        key_levels=wanted.gateway.key_priorities,
        tenants=tenants_of(wanted),
        usage_file=fleet.usage_file or (wanted.gateway.usage_file if wanted.tenants else ""),
        models=models,
        scaling=fleet.scaling if fleet.residency else scaling,
        aliases=wanted.aliases,
        fallbacks=fallbacks_of(wanted),
    )


def _followed(model: Model) -> dict[str, Any]:
    """What of a model can change while it is served."""
    return {
        "aliases": tuple(model.aliases),
        "max_concurrency": model.limits.max_concurrency,
        "max_queue": model.limits.max_queue,
        "max_wait": model.limits.max_wait,
        "slo_ttft_ms": model.slo.ttft_ms,
        "slo_tpot_ms": model.slo.tpot_ms,
    }


# ---------------------------------------------------------------- rules


def _by_period(budgets: Budgets) -> dict[BudgetPeriod, dict[str, int] | None]:
    return {"day": budgets.day, "month": budgets.month}


def tenants_of(fleet: Fleet) -> tuple[TenantSpec, ...]:
    """Its tenants, with their keys by hash only."""
    return tuple(
        TenantSpec(
            name=name,
            key_hashes=tuple(hashlib.sha256(key.encode()).hexdigest() for key in tenant.keys),
            models=None if tenant.models is None else tuple(tenant.models),
            priority=tenant.priority,
            limits=TenantLimits(
                tenant.requests_per_minute or 0, tenant.tokens_per_minute or 0, tenant.max_concurrency or 0
            ),
            budgets=tuple(
                BudgetSpec(period, tokens, "" if model == ALL_MODELS else model)
                for period, budget in _by_period(tenant.budgets).items()
                for model, tokens in (budget or {}).items()
            ),
            weight=tenant.weight,
            admin=tenant.admin,
            shares_prefixes=tenant.share_prefixes,
        )
        for name, tenant in fleet.tenants.items()
    )


def fallbacks_of(fleet: Fleet) -> dict[str, FallbackSpec]:
    """What answers in place of a model, by its name."""
    return {
        model.name: FallbackSpec(model.fallback.model or model.name, model.fallback.url or "", model.fallback.key or "")
        for model in fleet.models
        if model.fallback is not None
    }


def scaling_of(fleet: Fleet) -> dict[str, ScalingRules]:
    """Rules by model, of those whose number of replicas changes by itself."""
    return {
        model.name: ScalingRules(
            minimum=r.min,
            maximum=r.max,
            idle_seconds=r.idle,
            wake_limit=r.wake,
        )
        for model in fleet.models
        if (r := model.replicas).scales
    }


def migration_of(fleet: Fleet) -> MigrationRules | None:
    """By which running requests move; None: they stay where they are."""
    return None if fleet.migration is None else MigrationRules()


def watchdog_of(fleet: Fleet) -> WatchdogRules | None:
    """When a silent process is suspect, and when it hangs; None: nobody looks."""
    return WatchdogRules() if fleet.watchdog else None


def levels_of(fleet: Fleet) -> tuple[Level, ...]:
    """The priority levels, from the highest."""
    levels = [Level(name, level.rank, level.target_load) for name, level in fleet.priorities.items()]
    return tuple(sorted(levels, key=lambda level: -level.rank))


def rolling_of(plan: ResolvedUnit, latency: LatencyModel | None = None) -> RollingRules | None:
    """The rules of a unit whose model is rolling; None for other units.

    Args:
        latency: where predictions come from; the roofline by default.

    Raises:
        muxserve.costs.latency.CostError: it knows nothing of the model.
    """
    (model, *_) = plan.fleet.models
    if not model.rolls:
        return None
    ttft, tpot = model.slo.ttft_ms, model.slo.tpot_ms
    assert ttft is not None, "the fleet file is refused without"
    assert tpot is not None, "the fleet file is refused without"
    costs = (latency or Roofline()).engine(plan.demands[0].architecture, _shape(plan))
    longest = plan.unit.models[0].max_len
    lengths = [1, *takewhile(lambda n: n < longest, (_FIRST * _FACTOR**n for n in range(32))), longest]
    step = batch_of(model, CPU_BATCH).tokens
    return RollingRules(
        ttft=ttft / 1000,
        tpot=tpot / 1000,
        prefill=tuple((length, prefill_seconds(costs, length, step)) for length in lengths),
        answer=model.workload.output_tokens,
    )


def prefill_seconds(costs: EngineCosts, tokens: int, step: int) -> float:
    """Seconds of one prompt of `tokens`, computed in chunks of `step` tokens."""
    seconds = 0.0
    for done in range(0, tokens, step):
        chunk = min(step, tokens - done)
        seconds += costs.prefill(chunk, chunk * done + chunk * (chunk + 1) // 2, 1)
    return seconds


def _shape(plan: ResolvedUnit, index: int = 0) -> EngineShape:
    demand, unit = plan.demands[index], plan.unit.models[index]
    if plan.gpu is not None:
        kind = device_name(plan.gpu.gpus[0]) or UNKNOWN_GPU
        return EngineShape(
            kind, demand.tensor_parallel, 1.0, demand.dtype, graphs_of(plan.fleet.models[index].engine_args)
        )
    # What an engine's threads get where those of all units compute at the same time.
    cores = (plan.fleet.cluster.cores if plan.fleet.cluster.cores != AUTO else plan.machine.cores) / plan.units
    # The figures of a CPU are those of a whole one with so many cores.
    share = min(1.0, min(unit.threads * demand.ranks, cores) / device(CPU).cores)
    return EngineShape(CPU, 1, share, demand.dtype)
