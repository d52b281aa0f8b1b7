"""A plan file as `muxserve deploy --plan` takes it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from muxserve.config import Fleet, FleetError, load_fleet
from muxserve.gpu.nvml import Gpu, GpuMachine
from muxserve.planning.demand.checkpoints import CheckpointError, HuggingFaceHub
from muxserve.planning.demand.demands import batch_of, demands_of, gpu_batch, least_batch
from muxserve.planning.specs.fleet_planner import FleetPlanner
from muxserve.planning.specs.plan_file import save_plan
from muxserve.planning.specs.unit_plan import ResolvedUnit
from placement import Machine
from placement.cluster import Cluster, Node, PlacedModel, PlacedUnit, Placement

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ("arithmetic", "atlas", "frontdesk")


@pytest.fixture
def fleet() -> Fleet:
    return load_fleet(ROOT / "configs/quickstart.yaml")


def saved(path: Path, device: str = "CPU", share: float = 0.5) -> Path:
    models = tuple(PlacedModel(name, 2.0, share / 2, share) for name in MODELS)
    save_plan(Placement(Cluster((Node(device, 1),)), (PlacedUnit("unit0", device, (0,), models, 64 << 20),)), path)
    return path


H200 = GpuMachine(tuple(Gpu(i, f"GPU-{i}", "NVIDIA H200", 143771 << 20, (500 + i) << 20) for i in range(3)))
NONE = GpuMachine(why_none="the NVIDIA driver is not installed")


def plan(fleet: Fleet, file: Path | None, cores: int, gpus: GpuMachine = NONE) -> ResolvedUnit:
    (planned,) = FleetPlanner(fleet, Machine(cores, 16 << 30), lambda: gpus).at_start(file)
    return planned


def test_pool_rates_and_threads_are_the_plans(fleet: Fleet, tmp_path: Path) -> None:
    planned = plan(fleet, saved(tmp_path / "plan.yaml"), cores=8)
    assert {model.name: (model.rate, model.threads) for model in planned.fleet.models} == dict.fromkeys(
        MODELS, (2.0, 4)
    )
    assert (64 << 20) - (1 << 20) < planned.unit.pool_bytes <= 64 << 20
    assert {model.name: (model.threads, model.share) for model in planned.unit.models} == dict.fromkeys(
        MODELS, (4, 0.5)
    )


@pytest.mark.parametrize(
    ("engine_args", "graphs"),
    [
        ({}, "piecewise"),
        ({"enforce_eager": True}, "eager"),
        ({"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}, "full"),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, "eager"),
        ({"compilation_config": {"level": 3}}, "piecewise"),
    ],
)
def test_demands_say_how_steps_are_launched(fleet: Fleet, engine_args: dict[str, Any], graphs: str) -> None:
    first = fleet.models[0].model_copy(update={"engine_args": engine_args})
    (demand,) = demands_of(fleet.with_models([first]), ROOT / "configs")
    assert demand.graphs == graphs


@pytest.mark.parametrize(("gpus", "ahead"), [((("A100", 80 << 30),), True), ((), False)])
def test_demands_say_whether_steps_are_scheduled_ahead(
    fleet: Fleet, gpus: tuple[tuple[str, int], ...], ahead: bool
) -> None:
    models = [fleet.models[0].model_copy(update={"engine_args": args}) for args in ({"async_scheduling": True}, {})]
    for model, expected in zip(models, (ahead, False), strict=True):
        (demand,) = demands_of(fleet.with_models([model]), ROOT / "configs", gpus=gpus)
        assert demand.ahead == expected


def test_a_share_of_less_than_a_core_is_one_thread(fleet: Fleet, tmp_path: Path) -> None:
    planned = plan(fleet, saved(tmp_path / "plan.yaml", share=0.2), cores=2)
    assert {model.threads for model in planned.unit.models} == {1}


def test_what_cannot_be_served_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="no usable GPU: the NVIDIA driver is not installed"):
        plan(fleet, saved(tmp_path / "plan.yaml", "H200-141GB"), cores=2)


def test_a_plan_of_another_fleet_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    file = saved(tmp_path / "plan.yaml")
    file.write_text(file.read_text().replace("atlas", "globe"))
    with pytest.raises(FleetError, match="globe"):
        plan(fleet, file, cores=2)


def test_a_plan_for_gpus_gives_shares_and_rates(fleet: Fleet, tmp_path: Path) -> None:
    halves = fleet.model_copy(update={"models": [m.model_copy(update={"dtype": "bfloat16"}) for m in fleet.models]})
    planned = plan(halves, saved(tmp_path / "plan.yaml", "H200-141GB", share=0.8), 4, H200)
    assert planned.gpu is not None
    assert [gpu.index for gpu in planned.gpu.gpus] == [0]  # the one with the most free memory
    assert {(s.prefill, s.decode) for s in planned.gpu.shares.values()} == {(0.4, 0.8)}
    assert {model.rate for model in planned.fleet.models} == {2.0}
    assert planned.unit.pool_bytes > 64 << 20  # all that is left, not the plan's estimate


def test_a_plan_must_be_for_the_gpus_that_are_there(fleet: Fleet, tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="plan is for A100-80GB, but this machine has NVIDIA H200"):
        plan(fleet, saved(tmp_path / "plan.yaml", "A100-80GB"), 4, H200)


@pytest.mark.parametrize(
    ("given", "seqs", "tokens"),
    [
        ({}, 256, 2048),
        ({"max_num_seqs": 4096}, 4096, 4096),
        ({"max_num_batched_tokens": 128}, 128, 128),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 512}, 8, 512),
    ],
)
def test_batches_fit_what_the_fleet_file_says(fleet: Fleet, given: dict[str, int], seqs: int, tokens: int) -> None:
    model = fleet.models[0].model_copy(update=given)
    assert batch_of(model, gpu_batch("A100-80GB", 80 << 30)) == (seqs, tokens)


def test_the_smallest_of_several_gpus_says_what_a_batch_holds() -> None:
    assert least_batch([("H100-80GB", 80 << 30), ("L20-48GB", 48 << 30)]) == (256, 2048)
    assert least_batch([("H100-80GB", 80 << 30)]) == (1024, 8192)
    assert least_batch([]) == (64, 2048)


def test_what_the_hubs_library_says_of_each_try_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = logging.getLogger("huggingface_hub.utils._http")

    def unreachable(*_: object, **__: object) -> str:
        library.warning("Retrying in 1s [Retry 1/5].")
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    logging.getLogger("huggingface_hub").addHandler(caplog.handler)
    try:
        hub = HuggingFaceHub(reaches=lambda: True)
        for ask in (hub.config, hub.snapshot):
            with pytest.raises(CheckpointError, match="org/model"):
                ask("org/model", None)
    finally:
        logging.getLogger("huggingface_hub").removeHandler(caplog.handler)
    assert not [each for each in caplog.records if each.name.startswith("huggingface_hub")]
    assert library.isEnabledFor(logging.WARNING), "for others"
