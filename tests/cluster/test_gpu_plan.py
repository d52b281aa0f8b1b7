"""From a fleet file and the GPUs of a machine to a unit's spec, before and after measuring."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from muxserve.config import FleetError, Model, parse_fleet
from muxserve.control.changes import NoRoomError
from muxserve.costs.architecture import read_architecture
from muxserve.gpu import unit
from muxserve.gpu.budget import Needs
from muxserve.gpu.nvml import Gpu, GpuMachine, GpuModes
from muxserve.gpu.unit import GpuPlan, GpuUnit, PoolSizer, SizingError, SmShares, from_json
from muxserve.planning.demand.checkpoints import architecture_of
from muxserve.planning.specs.fleet_planner import FleetPlanner
from muxserve.planning.specs.joining import JoinedModel
from muxserve.planning.specs.residency import residency_of
from muxserve.planning.specs.unit_plan import ResolvedUnit
from muxserve.planning.specs.unit_specs import fleet_spec_of, planned_unit, unit_spec_of
from muxserve.spec import ResidencySpec, RestingSpec, UnitSpec, load
from muxserve.vllm.args import engine_args
from muxserve.vllm.language_models import TextOnly
from placement import Machine
from placement.format import format_size
from placement.unit import MAX_BLOCKS
from tests.cluster.test_plan import CONFIG, LATENT, STATEFUL, FakeHub
from tests.control.fakes import fleet_of
from tests.support.checkpoint_files import write_checkpoint

GIB = 1 << 30
MODELS = """
  - {name: a, path: a, rate: 4, max_len: 512}
  - {name: b, path: b, rate: 1, max_len: 512}
"""
SPLIT = MODELS.replace("max_len: 512", "max_len: 512, engines: split")


def gpus(count: int, name: str = "NVIDIA H200", gib: int = 140) -> GpuMachine:
    return GpuMachine(tuple(Gpu(i, f"GPU-{i}", name, gib * GIB, GIB // 2) for i in range(count)), "580", "13.0")


def planner(
    directory: Path,
    cluster: str,
    models: str = MODELS,
    found: GpuMachine | None = None,
    config: dict[str, Any] | None = None,
    top: str = "",
    shared_memory: int = 16 * GIB,
) -> FleetPlanner:
    """A fleet file with these models and `top` above them; `config` is model a's, which has 32 layers otherwise."""
    usual = {**CONFIG, "num_hidden_layers": 32}
    write_checkpoint(directory / "a", config or usual)
    write_checkpoint(directory / "b", usual)
    fleet = parse_fleet(f"{top}cluster: {cluster}\nmodels:{models}", "f.yaml", directory, {})
    return FleetPlanner(fleet, Machine(8, 64 * GIB, shared_memory), lambda: found or gpus(2))


def plan(directory: Path, cluster: str, models: str = MODELS, **more: Any) -> ResolvedUnit:
    """The first unit of that fleet."""
    return planner(directory, cluster, models, **more).at_start()[0]


def test_one_unit_over_the_chosen_gpus(tmp_path: Path) -> None:
    made = unit_spec_of(plan(tmp_path, "{gpus: 2, gpu_memory: 0.5}"), "/run/x")
    assert made.device == "cuda"
    assert made.ranks == 2
    assert made.gpu is not None
    assert (made.gpu.uuids, made.gpu.sm_sharing) == (["GPU-0", "GPU-1"], "mps")
    assert {model.kv_heads for model in made.models} == {1}  # of two, one on each rank
    (pool,) = made.pools
    assert 0.9 * 70 * GIB < pool.num_pages * pool.page_bytes < 70 * GIB
    assert all(0 < m.prefill_share <= 1 and 0 < m.decode_share <= 1 for m in made.models)
    a, b = made.models
    assert a.quota_pages > 3 * b.quota_pages


def test_gpu_ids_are_enough(tmp_path: Path) -> None:
    made = plan(tmp_path, "{gpu_ids: [1]}")
    assert made.gpu is not None
    assert [gpu.uuid for gpu in made.gpu.gpus] == ["GPU-1"]


def test_shares_of_the_file_go_before_the_planners(tmp_path: Path) -> None:
    models = MODELS.replace("max_len: 512}", "max_len: 512, engines: split, sm: {prefill: 0.7, decode: 0.15}}", 1)
    deployed = unit_spec_of(plan(tmp_path, "{gpus: 1}", models), "/run/x")
    assert (deployed.models[0].prefill_share, deployed.models[0].decode_share) == (0.7, 0.15)
    planned = unit_spec_of(plan(tmp_path, "{gpus: 1}"), "/run/x").models[1]
    assert (deployed.models[1].prefill_share, deployed.models[1].decode_share) == (
        planned.prefill_share, planned.decode_share,
    )  # fmt: skip


def test_one_engine_has_the_share_of_the_file_unless_it_is_alone(tmp_path: Path) -> None:
    models = MODELS.replace("max_len: 512}", "max_len: 512, engines: one, sm: {decode: 0.15}}", 1)
    deployed = unit_spec_of(plan(tmp_path, "{gpus: 1}", models), "/run/x")
    assert (deployed.models[0].shape, deployed.models[0].decode_share) == ("one", 0.15)
    alone = plan(tmp_path, "{gpus: 1}", "".join(models.splitlines(keepends=True)[:2]))
    assert unit_spec_of(alone, "/run/x").models[0].decode_share == 1.0
    assert any("`sm` of a says nothing here" in note for note in alone.notes)


def test_temporal_multiplexing_gives_everyone_everything(tmp_path: Path) -> None:
    made = plan(tmp_path, "{gpus: 1}", top="policy: fcfs\n")
    assert made.gpu is not None
    assert {(s.prefill, s.decode) for s in made.gpu.shares.values()} == {(1.0, 1.0)}


def test_a_gpu_of_unknown_speed_gets_default_shares_and_a_note(tmp_path: Path) -> None:
    made = plan(tmp_path, "{gpus: 1}", SPLIT, found=gpus(1, "NVIDIA Unheard-Of"))
    assert made.gpu is not None
    assert {(s.prefill, s.decode) for s in made.gpu.shares.values()} == {(0.6, 0.4)}
    assert any("nothing is known of the speed of a NVIDIA Unheard-Of" in note for note in made.notes)


def test_another_type_than_the_file_says_is_noted(tmp_path: Path) -> None:
    assert not any("the fleet file says" in note for note in plan(tmp_path, "{gpus: 1, gpu_type: h200}").notes)
    made = plan(tmp_path, "{gpus: 1, gpu_type: A100-80GB}")
    assert "the fleet file says A100-80GB, but this machine has NVIDIA H200; it is served on that" in made.notes


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_layer_s_state_begins_with_a_page_of_a_gpu(tmp_path: Path, ranks: int) -> None:
    """On each rank, of its heads."""
    spec = unit_spec_of(plan(tmp_path, f"{{gpus: {ranks}}}", config=STATEFUL), "/run/x")
    model, states = spec.model("a"), read_architecture(STATEFUL).on_gpus().states
    assert states is not None
    pages = states.count * -(-states.layer_bytes("bfloat16", ranks) // spec.pool(model.pool).page_bytes)
    assert model.state_blocks == -(-pages // model.pages_per_block)
    # Those of prompts are copied for a step.
    assert engine_args(spec, "a", "prefill")["max_num_active_seqs"] == 16
    assert "max_num_active_seqs" not in engine_args(spec, "a", "decode")


def test_states_whose_heads_ranks_cannot_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"18 heads with states in 3 groups and MLP of .* over 2 ranks"):
        plan(tmp_path, "{gpus: 2}", config={**STATEFUL, "mamba_n_heads": 18, "mamba_n_groups": 3})


def test_heads_with_which_no_kernel_computes_prompts_from_latents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"keys of 64 numbers and values of 64, .* \(64 and 128, 128 and 128, 192"):
        plan(tmp_path, "{gpus: 1}", config={**LATENT, "qk_nope_head_dim": 64, "v_head_dim": 64})


def test_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"f.yaml:2: models\[0\]\.adapters: LoRA adapters are served on CPU only"):
        plan(tmp_path, "{gpus: 1}", " [{name: a, path: a, adapters: {}}]")


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "idefics3", "aria"])
def test_with_a_cache_of_its_own_it_sees_images_on_gpus(tmp_path: Path, kind: str) -> None:
    """There vLLM has what it needs for them: it is not asked on the machine that plans."""
    text = {**CONFIG, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [8, 12, 12]}}
    config = {"architectures": ["AriaForConditionalGeneration"], "model_type": kind, "text_config": text}
    models = " [{name: a, path: a, kv: private, max_len: 512}]"
    unit = plan(tmp_path, "{gpus: 2}", models, config={**config, "vision_config": {"hidden_size": 32}})
    spec = unit_spec_of(unit, "/run/x")
    (model,) = spec.models
    assert (spec.ranks, model.kv, model.sees_images, model.text_only) == (2, "private", True, False)
    options = engine_args(spec, "a", "both")
    assert (options["mm_processor_cache_gb"], options["limit_mm_per_prompt"]["image"]) == (0, 8)
    assert not isinstance(options.get("hf_overrides"), TextOnly)


@pytest.mark.parametrize("ranks", [1, 2])
def test_latents_lie_whole_on_every_rank_and_prompts_come_in_chunks(tmp_path: Path, ranks: int) -> None:
    models = " [{name: a, path: a, max_len: 4096, max_num_batched_tokens: 2048}]"
    config = {**LATENT, "max_position_embeddings": 8192}
    spec = unit_spec_of(plan(tmp_path, f"{{gpus: {ranks}}}", models, config=config), "/run/x")
    (model,), (pool,) = spec.models, spec.pools
    assert spec.ranks == ranks
    assert (model.latent, model.kv_heads, 2 * model.head_dim) == (576, 1, 576)
    assert model.max_num_batched_tokens == 2048
    assert pool.page_bytes == model.block_tokens * 576 * 2
    options = engine_args(spec, "a", "decode")
    assert options["attention_backend"] == "TRITON_MLA"
    # Nothing is compiled with the CUDA toolkit.
    assert options["compilation_config"]["custom_ops"] == ["-rotary_embedding"]


class TestQuantised:
    """Engines map weights that another process has loaded, which vLLM can do with some methods only."""

    def test_what_cannot_be_shared_is_refused_before_anything_is_loaded(self, tmp_path: Path) -> None:
        words = r"models\[0\].path: weights quantised by torchao.* cannot be shared.*not quantised"
        with pytest.raises(FleetError, match=words):
            self.planned(tmp_path, {"quant_method": "torchao"})

    @pytest.mark.parametrize(
        "config",
        [
            {"quant_method": "fp8"},
            {"quant_method": "mxfp4"},
            {"quant_method": "gptq", "bits": 4},
            {"quant_method": "awq", "bits": 4},
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        ],
    )
    def test_others_are_served(self, tmp_path: Path, config: dict[str, Any]) -> None:
        assert self.planned(tmp_path, config).gpu is not None

    def test_where_modelopt_says_it_in_a_file_of_its_own(self, tmp_path: Path) -> None:
        plan(tmp_path, "{gpus: 1}")
        told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
        (tmp_path / "a" / "hf_quant_config.json").write_text(json.dumps(told))
        found = architecture_of(Model(name="a", path=str(tmp_path / "a")), FakeHub(tmp_path))
        assert found.quantisation == "modelopt FP8"

    @pytest.mark.parametrize(
        ("option", "words"),
        [
            ("kv_cache_dtype: fp8", r"models\[0\].engine_args: kv_cache_dtype: .* on GPUs"),
            ("quantization: fp8", r"cannot be shared by engines on a GPU: leave engine_args\.quantization"),
        ],
    )
    def test_fp8_made_while_serving_is_refused(self, tmp_path: Path, option: str, words: str) -> None:
        models = MODELS.replace("max_len: 512}", f"max_len: 512, engine_args: {{{option}}}}}", 1)
        with pytest.raises(FleetError, match=words):
            plan(tmp_path, "{gpus: 1}", models)

    def planned(self, tmp_path: Path, quantisation: dict[str, Any]) -> ResolvedUnit:
        return plan(tmp_path, "{gpus: 1}", config={**CONFIG, "quantization_config": quantisation})


def test_without_mps_ranks_of_several_engines_take_turns(tmp_path: Path) -> None:
    """Time slices would take the ranks of an engine off their GPUs at different times, while each waits for others."""
    policies = []
    for cluster in ("{gpus: 2}", "{gpus: 2, mps: off}", "{gpus: 1, mps: off}"):
        policies.append(unit_spec_of(plan(tmp_path, cluster, found=gpus(2)), "/run/x").policy)
    assert policies == ["slack", "fcfs", "slack"]


def test_more_clients_than_mps_takes_are_refused(tmp_path: Path) -> None:
    unit = plan(tmp_path, "{gpus: 1}").gpu
    assert unit is not None

    def words(models: int, **more: Any) -> str:
        shares = {f"m{n}": SmShares(0.5, 0.5) for n in range(models)}
        return replace(unit, shares=shares, **more).too_many_clients()

    assert words(23) == ""
    assert "24 models are 49 clients of the MPS server on each GPU, which takes 48" in words(24)
    assert words(24, sharing="off") == ""
    one = [Needs(f"m{n}", 0, GIB, GIB, GIB, GIB, engine_count=1) for n in range(48)]
    assert (words(47, needs=tuple(one)), bool(words(48, needs=tuple(one)))) == ("", True)
    exclusive = (replace(unit.gpus[0], modes=GpuModes(compute="exclusive_process")),)
    assert (words(15, gpus=exclusive), bool(words(16, gpus=exclusive))) == ("", True)


def test_a_plan_asks_for_no_more_clients_than_mps_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models have two engines, or four, beside the migrator."""
    monkeypatch.setattr(unit, "MOST_CLIENTS", 4)
    with pytest.raises(FleetError, match="2 models are 5 clients of the MPS server on each GPU, which takes 4; serve"):
        plan(tmp_path, "{gpus: 1, sm_sharing: mps}", SPLIT)
    assert plan(tmp_path, "{gpus: 1, sm_sharing: mps}").gpu is not None
    assert plan(tmp_path, "{gpus: 1, mps: off}").gpu is not None
    # Nobody insists on it.
    made = plan(tmp_path, "{gpus: 1}", SPLIT)
    assert made.gpu is not None
    assert made.gpu.sharing == "off"
    assert any("engines alternate, since 2 models are 5 clients" in note for note in made.notes)
    monkeypatch.setattr(unit, "MOST_CLIENTS", 5)
    assert plan(tmp_path, "{gpus: 1, sm_sharing: mps}", SPLIT).gpu is not None


class TestJoining:
    """A model joins a unit that runs on GPUs, whose pools are as large as they were measured to be."""

    def joined(
        self,
        tmp_path: Path,
        cluster: str = "{gpus: 1}",
        config: dict[str, Any] | None = None,
        more: str = "",
        length: int = 256,
    ) -> tuple[UnitSpec, JoinedModel]:
        write_checkpoint(tmp_path / "c", {**CONFIG, "num_hidden_layers": 16, **(config or {})})
        new = parse_fleet(f"models: [{{name: c, path: c, rate: 1, max_len: {length}{more}}}]", "c.yaml", tmp_path, {})
        before = planner(tmp_path, cluster)
        (made,) = before.at_start()
        planned = planned_unit(made, "/run")
        running = fleet_spec_of(before.fleet, [planned], "/run")
        before.declare(new)
        return running.unit("u0").unit_spec, before.joined(planned, "c", running)

    def test_engines_keep_their_percentage_and_the_new_ones_get_what_is_free(self, tmp_path: Path) -> None:
        before, (after, planned, needs) = self.joined(tmp_path)
        assert after.pools == before.pools
        (pool,) = after.pools
        assert [model.name for model in after.models] == ["a", "b", "c"]
        assert sum(model.quota_pages for model in after.models) == pool.num_pages - 1
        for old, new in zip(before.models, after.models, strict=False):
            assert new == msgspec.structs.replace(old, quota_pages=new.quota_pages, floor_pages=new.floor_pages)
            assert new.quota_pages < old.quota_pages
        a, b, c = after.models
        assert c.prefill_share == max(a.prefill_share, b.prefill_share)
        assert 0 < c.decode_share <= 1
        assert c.decode_share >= 1 - c.prefill_share - a.decode_share - b.decode_share - 1e-9
        assert [(each.model, each.rank, each.measured) for each in needs] == [("c", 0, False)]
        # Started again, all three are measured before the pools are made.
        assert planned.gpu is not None
        assert [each.name for each in planned.gpu.demands] == [each.name for each in planned.unit_spec.models]
        size = [Needs(name, 0, GIB, GIB, GIB, GIB, measured=True) for name in "abc"]
        again, _ = PoolSizer(planned.gpu, planned.unit_spec, tmp_path / "unit.json").size(size)
        assert [each.name for each in again.models] == ["a", "b", "c"]

    def test_where_leases_bring_shares_all_are_planned_anew(self, tmp_path: Path) -> None:
        before, (after, planned, _) = self.joined(tmp_path, "{gpus: 1, sm_sharing: green_contexts}")
        assert before.share_steps
        shares = {model.name: (model.prefill_share, model.decode_share) for model in after.models}
        assert planned.gpu is not None
        assert shares == {name: (s.prefill, s.decode) for name, s in planned.gpu.unit.shares.items()}
        assert set(shares) == {"a", "b", "c"}

    def test_the_file_may_say_its_share(self, tmp_path: Path) -> None:
        _, (after, _, _) = self.joined(tmp_path, more=", engines: split, sm: {prefill: 0.3, decode: 0.2}")
        assert (after.models[2].prefill_share, after.models[2].decode_share) == (0.3, 0.2)

    def test_on_several_gpus_it_is_split_as_the_others(self, tmp_path: Path) -> None:
        _, (after, _, needs) = self.joined(tmp_path, "{gpus: 2}")
        assert {model.kv_heads for model in after.models} == {1}
        assert [each.rank for each in needs] == [0, 1]

    @pytest.mark.parametrize(
        ("config", "length", "words"),
        [
            ({"head_dim": 48}, 256, r"c cannot join u0: its KV does not divide into pages of"),
            ({"max_position_embeddings": 1 << 30}, 1 << 29, r"c cannot join u0: .*GiB"),
        ],
        ids=["other pages", "too small"],
    )
    def test_a_pool_that_is_none_for_it_says_so(
        self, tmp_path: Path, config: dict[str, Any], length: int, words: str
    ) -> None:
        with pytest.raises(NoRoomError, match=words):
            self.joined(tmp_path, config=config, length=length)

    def test_mps_takes_so_many_processes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(unit, "MOST_CLIENTS", 3)
        with pytest.raises(NoRoomError, match=r"c cannot join u0: 3 models are 4 clients of the MPS server"):
            self.joined(tmp_path)


class TestTypes:
    def test_float32_checkpoints_become_bfloat16_with_a_note(self, tmp_path: Path) -> None:
        made = plan(tmp_path, "{gpus: 1}", config={**CONFIG, "num_hidden_layers": 32, "dtype": "float32"})
        assert {demand.dtype for demand in made.demands} == {"bfloat16"}
        assert any(note.startswith("a is served in bfloat16") for note in made.notes)

    def test_explicit_float32_is_refused_with_its_line(self, tmp_path: Path) -> None:
        models = MODELS.replace("max_len: 512}", "max_len: 512, dtype: float32}", 1)
        with pytest.raises(FleetError, match=r"f.yaml:3: models\[0\].dtype: FlashAttention has no float32"):
            plan(tmp_path, "{gpus: 1}", models)


@pytest.mark.parametrize(
    ("cluster", "found", "said"),
    [
        ("{gpus: 3}", gpus(2), "f.yaml:1: cluster.gpus: 3 GPUs of one type are wanted, this machine has 2 NVIDIA H200"),
        ("{gpus: 1}", GpuMachine(why_none="no driver"), "f.yaml:1: cluster.gpus: this machine has no usable GPU: no"),
        ("{gpu_ids: [4]}", gpus(2), "f.yaml:1: cluster.gpu_ids: there is no GPU 4"),
        ("{gpus: 1}", gpus(1, gib=4), "f.yaml:1: cluster.gpu_memory: GPU 0 (NVIDIA H200): of 3.68 GiB that may be"),
        ("{gpus: 3}", gpus(3), "models[0].path: its 4 heads, 2 KV heads and MLP of"),
        ("{nodes: [{gpus: 8, gpu_type: H200}]}", gpus(1), "cluster.nodes: nodes are for muxserve plan and simulate"),
    ],
)
def test_what_cannot_be_is_told_with_line_and_key(tmp_path: Path, cluster: str, found: GpuMachine, said: str) -> None:
    with pytest.raises(FleetError) as caught:
        plan(tmp_path, cluster, found=found)
    assert said in str(caught.value)


class Planned(NamedTuple):
    """A fleet in which memory decides."""

    unit: ResolvedUnit
    gpu: GpuUnit
    residency: ResidencySpec
    others: list[ResolvedUnit]


def gpu_plan(planned: ResolvedUnit) -> GpuPlan:
    """What the unit's host has, wherever that runs."""
    made = planned.gpu_plan()
    assert made is not None
    there = from_json(made.to_json())
    assert there == made
    return there


class TestSizing:
    def test_measured_memory_makes_the_pools(self, tmp_path: Path) -> None:
        planned = plan(tmp_path, "{gpus: 2}")
        assert planned.gpu is not None
        file = tmp_path / "unit.json"
        before = unit_spec_of(planned, str(tmp_path))
        measured = [replace(each, weights_bytes=10 * GIB, measured=True) for each in planned.gpu.needs]
        after, budgets = PoolSizer(gpu_plan(planned), before, file).size(measured)
        assert load(file) == after
        (pool,), (smaller,) = before.pools, after.pools
        estimated = sum(each.weights_bytes for each in planned.gpu.needs if each.rank == 0)
        less = (pool.num_pages - smaller.num_pages) * pool.page_bytes
        assert less == pytest.approx(20 * GIB - estimated, abs=64 << 20)
        assert [each.quota_pages for each in after.models] < [each.quota_pages for each in before.models]
        assert {each.pool_bytes for each in budgets} == {budgets[0].pool_bytes}
        assert smaller.num_pages * smaller.page_bytes <= budgets[0].pool_bytes

    def test_too_little_is_told_in_words(self, tmp_path: Path) -> None:
        planned = plan(tmp_path, "{gpus: 1}")
        assert planned.gpu is not None
        measured = [replace(each, weights_bytes=80 * GIB, measured=True) for each in planned.gpu.needs]
        unit_spec = unit_spec_of(planned, str(tmp_path))
        sizer = PoolSizer(gpu_plan(planned), unit_spec, tmp_path / "unit.json")
        with pytest.raises(SizingError, match=r"weights take 160 GiB.*\(measured\); nothing is left for the KV pool"):
            sizer.size(measured)

    def test_a_pool_of_given_size_stays_so(self, tmp_path: Path) -> None:
        made = plan(tmp_path, "{gpus: 1}", top="kv_pool: {size: 1GiB}\n")
        assert made.gpu is not None
        assert GIB - (1 << 20) < made.unit.pool_bytes <= GIB
        assert gpu_plan(made).pools(made.gpu.needs)[0] == made.unit


class TestSleeping:
    """Memory decides which models are awake: their weights need not fit."""

    def plan(
        self, directory: Path, memory: str, count: int = 20, more: str = "", cluster: str = "{gpus: 1}"
    ) -> Planned:
        models = "".join(f"\n  - {{name: m{n}, path: a, max_len: 512{more if n == 0 else ''}}}" for n in range(count))
        of = planner(directory, cluster, models, gpus(2, gib=80), top=f"memory: {memory}\n")
        made, *others = of.at_start()
        spec = residency_of(of.fleet, [made, *others], of.machine)[made.name]
        assert made.gpu is not None
        return Planned(made, made.gpu, spec, others)

    def test_weights_of_all_models_need_not_fit(self, tmp_path: Path) -> None:
        made, gpu, spec, _ = self.plan(tmp_path, "auto", 80)
        assert made.served == ()
        assert {each.model for each in gpu.sleeping} == {f"m{n}" for n in range(80)} == set(spec.models)
        assert len(gpu.needs) == 1, "room for one of them"
        costs = spec.models["m0"]
        assert sum(each.bytes for each in spec.models.values()) > 80 * GIB > 4 * costs.bytes
        assert spec.rules.limit == int(0.92 * 80 * GIB)
        # Pages take what models leave, at most all but one of them. The others have room while pages do not need it.
        assert gpu.resting_room is not None
        page_tables = 0.01 * made.unit.pool_bytes
        assert spec.rules.fixed == pytest.approx(1.5 * GIB + gpu.resting_room.bytes, abs=page_tables)
        assert spec.rules.kv is not None
        assert spec.rules.kv.most == made.unit.pool_bytes
        room = spec.rules.limit - spec.rules.fixed
        assert made.unit.pool_bytes + costs.bytes == pytest.approx(room, rel=0.01)
        assert (room - spec.rules.kv.least) / costs.bytes > 9
        (pool,) = unit_spec_of(made, "/run/x").pools
        assert pool.start_bytes == pytest.approx(spec.rules.kv.least, rel=0.01)
        assert pool.chunk_bytes
        assert spec.on_gpus
        assert not unit_spec_of(made, "/run/x").decode_gives_way

    @pytest.mark.parametrize(
        ("memory", "expected"),
        [
            ("auto", True),
            ("{resting_engines: off}", False),
            ("{host_copies: off}", False),
            ("{resting_engines: off, turns: true}", True),
            ("{turns: false}", False),
        ],
    )
    def test_models_whose_engines_stay_take_turns(self, tmp_path: Path, memory: str, expected: bool) -> None:
        """Unless the fleet file says otherwise: a switch that starts engines takes too long."""
        *_, spec, _ = self.plan(tmp_path, memory, 80)
        assert (spec.turns is not None) is expected

    def test_its_limit_is_none_of_the_host_s_memory(self, tmp_path: Path) -> None:
        """Nor while the fleet serves, when other rules are followed."""
        memory = "memory: {limit: 70GiB, min_residence: 4s}\n"
        of = planner(tmp_path, "{gpus: 1}", found=gpus(2, gib=80), top=memory)
        residency = residency_of(of.fleet, of.at_start(), of.machine)
        running = msgspec.structs.replace(fleet_of("/run", {"u0": ["a", "b"]}), residency=residency)
        followed = of.settings(of.fleet, running).residency["u0"]
        assert followed.rules.limit == residency["u0"].rules.limit > 64 * GIB
        assert followed.rules.min_residence == 4.0

    @pytest.mark.parametrize(("given", "expected"), [("auto", 16), ("10GiB", 5), ("off", 0)])
    def test_units_share_the_host_s_memory(self, tmp_path: Path, given: str, expected: int) -> None:
        """Half of 64 GiB, unless the fleet file says otherwise."""
        first = self.plan(tmp_path, f"{{host_copies: {given}}}", cluster="{gpus: 2}")
        for each in (first.unit, *first.others):
            assert unit_spec_of(each, "/run/x").host_copies == expected * GIB

    def test_what_never_sleeps_is_loaded_first_and_takes_its_part(self, tmp_path: Path) -> None:
        memory = "{limit: 40GiB, resting_engines: off}"
        _, _, all_sleep, _ = self.plan(tmp_path, memory)
        made, gpu, spec, _ = self.plan(tmp_path, memory, more=", keep: always")
        assert made.served == ("m0",)
        assert "m0" not in spec.models
        assert {each.model for each in gpu.needs} == {"m0", "m9"}
        assert spec.rules.limit == all_sleep.rules.limit == pytest.approx(40 * GIB, abs=16)
        taken = spec.rules.fixed - all_sleep.rules.fixed
        assert taken == pytest.approx(all_sleep.models["m0"].bytes, rel=0.01)

    def test_the_host_asks_for_no_more_than_what_is_there(self, tmp_path: Path) -> None:
        made, gpu, spec, _ = self.plan(tmp_path, "{limit: 40GiB}", more=", keep: always")
        sizer = PoolSizer(gpu_plan(made), unit_spec_of(made, str(tmp_path)), tmp_path / "unit.json")
        m0 = next(each for each in gpu.needs if each.model == "m0")
        after, _ = sizer.size([replace(m0, measured=True)])
        assert sum(pool.page_bytes * pool.num_pages for pool in after.pools) == made.unit.pool_bytes
        alone = sizer.used([m0], after.pools)
        assert alone.models == {}
        assert alone.total - alone.pools == pytest.approx(spec.rules.fixed, rel=0.01)
        assert alone.pools == after.pools[0].start_bytes < after.pools[0].bytes
        m1 = next(each for each in sizer.sleeping if each.model == "m1")
        beside = sizer.used([m0, replace(m1, weights_bytes=m1.weights_bytes + GIB)], after.pools)
        assert beside.models == {"m1": spec.models["m1"].bytes + GIB}
        assert beside.total - alone.total == pytest.approx(beside.models["m1"], rel=0.01)

    def test_on_several_gpus_each_has_models_of_its_own(self, tmp_path: Path) -> None:
        first = self.plan(tmp_path, "auto", 9, cluster="{gpus: 2}")
        (other,) = first.others
        assert first.unit.gpu is not None
        assert other.gpu is not None
        assert [gpu.uuid for gpu in (*first.unit.gpu.gpus, *other.gpu.gpus)] == ["GPU-0", "GPU-1"]
        names = [[model.name for model in each.fleet.models] for each in (first.unit, other)]
        assert sorted(map(len, names)) == [4, 5]
        assert sorted([*names[0], *names[1]]) == [f"m{n}" for n in range(9)]
        assert set(first.residency.models) == set(names[0])

    def test_a_model_that_one_gpu_has_little_room_for_is_split(self, tmp_path: Path) -> None:
        first = self.plan(tmp_path, "{limit: 3GiB}", 9, cluster="{gpus: 2}")
        assert first.others == []
        assert first.gpu.ranks == 2
        assert {each.rank for each in first.gpu.sleeping} == {0, 1}

    def test_mps_takes_as_many_clients_as_have_room(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """40 models with an engine each would be 41."""
        cluster = "{gpus: 1, sm_sharing: mps}"
        memory = "{limit: 40GiB, resting_engines: off}"
        _, gpu, spec, _ = self.plan(tmp_path, memory, 40, cluster=cluster)
        at_once = int(38.5 * GIB) // spec.models["m0"].bytes
        assert gpu.sharing == "mps"
        monkeypatch.setattr(unit, "MOST_CLIENTS", at_once)
        with pytest.raises(FleetError, match=f"{at_once} models that have room at once are {at_once + 1} clients"):
            self.plan(tmp_path, memory, 40, cluster=cluster)

    def test_engines_that_rest_have_half_of_the_gpu_at_most(self, tmp_path: Path) -> None:
        made, gpu, spec, _ = self.plan(tmp_path, "auto", 80)
        assert gpu.sharing == "off", "with those that rest there would be more clients than an MPS server takes"
        assert gpu.resting_room == RestingSpec(40 * GIB, 80)
        assert unit_spec_of(made, "/run/x").resting == gpu.resting_room
        assert any("40 GiB of each GPU are for engines that stay" in note for note in gpu.notes)
        # Half a GiB of context and of graphs.
        assert spec.resting == 40
        _, none, ended, _ = self.plan(tmp_path, "{resting_engines: off}", 80)
        assert none.resting_room is None
        assert ended.resting == 0
        assert spec.models["m0"] == ended.models["m0"]

    def test_engines_rest_where_models_sleep_and_are_copied_back(self, tmp_path: Path) -> None:
        for memory, count in (
            ("auto", 3),
            ("{host_copies: off}", 40),
            ("{host_copies: off, resting_engines: 4GiB}", 40),
        ):
            made, gpu, _, _ = self.plan(tmp_path, memory, count)
            assert gpu.resting_room is None, (memory, count)
            assert unit_spec_of(made, "/run/x").resting is None
        _, gpu, _, _ = self.plan(tmp_path, "{resting_engines: 20GiB}", 40, cluster="{gpus: 1, mps: off}")
        assert gpu.resting_room == RestingSpec(20 * GIB, 40)

    def test_engines_that_rest_are_clients_of_mps(self, tmp_path: Path) -> None:
        cluster = "{gpus: 1, sm_sharing: mps}"
        _, gpu, spec, _ = self.plan(tmp_path, "{limit: 40GiB}", 40, cluster=cluster)
        at_once = (spec.rules.limit - spec.rules.fixed) // spec.models["m0"].bytes
        assert gpu.resting_room is not None
        assert at_once + gpu.resting_room.models + 1 <= unit.MOST_CLIENTS
        assert at_once + gpu.resting_room.models + 3 > unit.MOST_CLIENTS
        # They have no more memory than they need.
        each = max(gpu.resting(gpu.sleeping).values())
        assert gpu.resting_room.bytes <= (gpu.resting_room.models + 1) * each

    @pytest.mark.parametrize(
        ("memory", "said"),
        [
            ("{limit: 81GiB}", "memory.limit: 81 GiB are more than a GPU has (80 GiB)"),
            ("{limit: 2GiB}", "m0 needs 1."),
        ],
    )
    def test_limits_without_room(self, tmp_path: Path, memory: str, said: str) -> None:
        with pytest.raises(FleetError) as caught:
            self.plan(tmp_path, memory)
        assert said in str(caught.value)


def test_a_pool_is_no_larger_than_a_page_table_can_name(tmp_path: Path) -> None:
    made = plan(tmp_path, "{gpus: 1}", found=gpus(1, gib=1400))
    assert max(model.table.num_blocks for model in made.unit.models) == MAX_BLOCKS
    (pool,) = made.unit.pools
    assert pool.num_pages == 1 + (MAX_BLOCKS - 1) * made.demands[0].pages_per_block
    assert "pool0 takes no more: a page table has at most 1048576 blocks" in made.notes


def test_page_tables_must_fit_into_shared_memory(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"kv_pool.size: the page tables take .* only 8 MiB of shared memory"):
        plan(tmp_path, "{gpus: 1}", shared_memory=8 << 20)


def test_ranks_on_a_cpu(tmp_path: Path) -> None:
    models = MODELS.replace("}", ", engines: split}")
    single = unit_spec_of(plan(tmp_path, "{cores: 8}", models), "/run/x")
    double = unit_spec_of(plan(tmp_path, "{cores: 8, ranks: 2}", models), "/run/x")
    assert (single.ranks, double.ranks, double.device) == (1, 2, "cpu")
    assert [m.kv_heads for m in single.models] == [2, 2]
    assert [m.kv_heads for m in double.models] == [1, 1]
    assert [m.threads for m in single.models] == [2, 2]
    assert [m.threads for m in double.models] == [1, 1]  # of each rank
    assert single.models[0].decode_share == double.models[0].decode_share


@pytest.mark.parametrize(("engines", "said"), [("one", "2 engines, 2 contexts"), ("split", "4 engines, 4 contexts")])
def test_memory_in_words_is_that_of_the_budget(tmp_path: Path, engines: str, said: str) -> None:
    models = "".join(f"\n  - {{name: {name}, path: {name}, engines: {engines}}}" for name in "ab")
    made = plan(tmp_path, "{gpus: 1}", models, found=gpus(1))
    assert made.gpu is not None
    first, second = made.gpu.memory_words(made.demands)
    (budget,) = made.gpu.budgets(made.demands)
    weights = sum(line.bytes for line in budget.lines if "weights" in line.what)
    assert f"weights {format_size(weights)}, contexts" in first
    assert f"left for the KV pool {format_size(budget.pool_bytes)} (estimated); {said}" in first
    assert second.startswith("2 of 2 models can be awake at once (weights and engines on the GPU)")
