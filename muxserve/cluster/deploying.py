"""From a planned unit whose models are all local to what its processes are told."""

from __future__ import annotations

import msgspec

from muxserve.cluster.arrangement import batching_of, phases_of, policy_of
from muxserve.cluster.plan import FleetPlan
from muxserve.cluster.rules import levels_of, migration_of, watchdog_of
from muxserve.config import Fleet, Model
from muxserve.replicas.migration import MigrationRules
from muxserve.spec import GatewaySpec, GrammarLimits, ModelSpec, PoolSpec, UnitSpec
from placement import ModelDemand, ModelPlan


def unit_spec_of(plan: FleetPlan, run_dir: str, host: str | None = None, port: int | None = None) -> UnitSpec:
    """The unit's spec of a planned unit whose models are all local; `host` and `port` override the fleet file's."""
    pools = [PoolSpec(pool.name, pool.page_bytes, pool.num_pages) for pool in plan.unit.pools]
    models = [_model(*of) for of in zip(plan.fleet.models, plan.unit.models, plan.demands, strict=True)]
    if plan.gpu is not None:
        shares = plan.gpu.shares
        models = [
            msgspec.structs.replace(m, prefill_share=shares[m.name].prefill, decode_share=shares[m.name].decode)
            for m in models
        ]
    return UnitSpec(
        run_dir=run_dir,
        unit=plan.name,
        policy=policy_of(plan.fleet),
        cores=plan.unit.cores,
        pools=pools,
        models=models,
        gateway=gateway_of(plan.fleet, host, port),
        ranks=plan.demands[0].ranks,
        stages=plan.demands[0].stages,
        gpu=plan.gpu.deployed if plan.gpu else None,
        migration_bandwidth=float((plan.fleet.migration and plan.fleet.migration.bandwidth) or 0),
        migration=migration_of(plan.fleet) or MigrationRules(),
        levels=levels_of(plan.fleet),
        default_level=plan.fleet.default_level,
        watchdog=watchdog_of(plan.fleet),
    )


def gateway_of(fleet: Fleet, host: str | None = None, port: int | None = None) -> GatewaySpec:
    """The endpoint of a fleet; `host` and `port` override the fleet file's."""
    gateway = fleet.gateway
    return GatewaySpec(
        host=gateway.host if host is None else host,
        port=gateway.port if port is None else port,
        api_keys=gateway.keys,
        max_body_bytes=gateway.max_body,
        drain_seconds=gateway.drain_seconds,
        count=gateway.count,
        cors_origins=tuple(gateway.cors_origins),
        access_log=gateway.access_log,
        grammars=GrammarLimits(
            max_bytes=gateway.structured_output.max_bytes,
            max_expansion=gateway.structured_output.max_expansion,
            max_depth=gateway.structured_output.max_depth,
            compile_seconds=gateway.structured_output.compile_timeout,
            compile_bytes=gateway.structured_output.compile_memory,
            workers=gateway.structured_output.workers,
        ),
    )


def _model(model: Model, plan: ModelPlan, demand: ModelDemand) -> ModelSpec:
    assert model.path is not None, "fetch() gives every model a path"
    return ModelSpec(
        name=model.name,
        path=model.path,
        pool=plan.pool,
        dtype=plan.dtype,
        layers=demand.layers,
        kv_heads=demand.kv_heads,
        head_dim=demand.architecture.head_dim,
        block_tokens=plan.block_tokens,
        num_blocks=plan.num_blocks,
        quota_pages=plan.quota_pages,
        floor_pages=plan.floor_pages,
        max_len=plan.max_len,
        rate=model.rate,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        prefix_caching=model.prefix_caching,
        threads=plan.threads,
        prefill_share=plan.share,
        decode_share=plan.share,
        max_concurrency=model.limits.max_concurrency,
        max_queue=model.limits.max_queue,
        slo_ttft_ms=model.slo.ttft_ms,
        slo_tpot_ms=model.slo.tpot_ms,
        max_wait=model.limits.max_wait,
        engine_args=dict(model.engine_args),
        phases=phases_of(model),
        batching=batching_of(model),
        aliases=tuple(model.aliases),
    )
