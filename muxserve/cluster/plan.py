"""From a fleet file to what every process of the unit is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from muxserve.cluster.checkpoints import CheckpointError, Hub, HuggingFaceHub, architecture_of
from muxserve.config import AUTO, Fleet, FleetError, Model, Problem
from muxserve.costs.architecture import ModelArchitecture
from muxserve.deployment import Deployment, GatewayDeployment, ModelDeployment, PoolDeployment
from placement import Machine, ModelDemand, ModelPlan, PlanError, PlanProblem, UnitPlan, plan_unit

UNIT = "unit0"


@dataclass(frozen=True)
class FleetPlan:
    """A fleet that fits the machine. `unit` has the planner's notes for the user."""

    fleet: Fleet
    unit: UnitPlan
    architectures: tuple[ModelArchitecture, ...]

    def with_fleet(self, fleet: Fleet) -> FleetPlan:
        """The same plan for the same fleet with other model paths."""
        return replace(self, fleet=fleet)


def plan_fleet(fleet: Fleet, machine: Machine, hub: Hub | None = None) -> FleetPlan:
    """Read every model's architecture and plan the machine.

    Raises:
        FleetError: a model cannot be served or the fleet does not fit; all reasons, with file and line.
    """
    hub = hub or HuggingFaceHub()
    problems: list[Problem] = []
    demands: list[ModelDemand] = []
    # With temporal multiplexing an engine has the whole machine while it runs.
    threads = (_known(fleet.cluster.cores) or machine.cores) if fleet.policy == "fcfs" else None
    for key in ("gpus", "nodes"):
        if getattr(fleet.cluster, key):
            message = f"this version serves on CPU; {key} is for muxserve plan and simulate, leave it out here"
            problems.append(fleet.problem(("cluster", key), message))
    for index, model in enumerate(fleet.models):
        try:
            demands.append(_demand(model, architecture_of(model, hub), threads))
        except CheckpointError as error:
            problems.append(fleet.problem(("models", index, "path" if model.path else "hub"), str(error)))
    if problems:
        raise FleetError(problems)
    try:
        unit = plan_unit(demands, machine, _known(fleet.cluster.cores), _known(fleet.kv_pool.size))
    except PlanError as error:
        raise FleetError(_problem(fleet, problem) for problem in error.problems) from None
    return FleetPlan(fleet, unit, tuple(demand.architecture for demand in demands))


def fetch(fleet: Fleet, progress: Callable[[str], None], hub: Hub | None = None) -> Fleet:
    """`fleet` with a local directory for every model; what is on the hub is downloaded into its cache.

    Raises:
        FleetError: a download failed.
    """
    hub = hub or HuggingFaceHub()
    models, problems = [], []
    for index, model in enumerate(fleet.models):
        if model.hub is not None:
            progress(f"fetching {model.hub}")
            try:
                model = model.model_copy(update={"path": str(hub.snapshot(model.hub, model.revision))})
            except CheckpointError as error:
                problems.append(fleet.problem(("models", index, "hub"), str(error)))
        models.append(model)
    if problems:
        raise FleetError(problems)
    return fleet.model_copy(update={"models": models})


def deployment_of(plan: FleetPlan, run_dir: str, host: str | None = None, port: int | None = None) -> Deployment:
    """The deployment of a planned fleet whose models are all local; `host` and `port` override the fleet file's."""
    gateway = plan.fleet.gateway
    pools = [PoolDeployment(pool.name, pool.page_bytes, pool.num_pages) for pool in plan.unit.pools]
    models = [_model(*of) for of in zip(plan.fleet.models, plan.unit.models, plan.architectures, strict=True)]
    return Deployment(
        run_dir=run_dir,
        unit=UNIT,
        policy=plan.fleet.policy,
        cores=plan.unit.cores,
        pools=pools,
        models=models,
        gateway=GatewayDeployment(
            host=gateway.host if host is None else host,
            port=gateway.port if port is None else port,
            api_keys=list(gateway.api_keys),
            max_body_bytes=gateway.max_body,
            drain_seconds=gateway.drain_seconds,
        ),
    )


def _demand(model: Model, architecture: ModelArchitecture, threads: int | None) -> ModelDemand:
    return ModelDemand(
        name=model.name,
        architecture=architecture,
        dtype=None if model.dtype == AUTO else model.dtype,
        rate=model.rate,
        max_len=_known(model.max_len),
        max_num_seqs=model.max_num_seqs,
        threads=_known(model.threads) or threads,
    )


def _model(model: Model, plan: ModelPlan, architecture: ModelArchitecture) -> ModelDeployment:
    assert model.path is not None, "fetch() gives every model a path"
    return ModelDeployment(
        name=model.name,
        path=model.path,
        pool=plan.pool,
        dtype=plan.dtype,
        layers=architecture.layers,
        kv_heads=architecture.kv_heads,
        head_dim=architecture.head_dim,
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
        engine_args=dict(model.engine_args),
    )


def _problem(fleet: Fleet, problem: PlanProblem) -> Problem:
    if problem.model is None:
        return fleet.problem(tuple(problem.key.split(".")), problem.message)
    index = next(i for i, model in enumerate(fleet.models) if model.name == problem.model)
    return fleet.problem(("models", index, problem.key), problem.message)


def _known(value: int | str) -> int | None:
    return value if isinstance(value, int) else None
