"""From a fleet file to a unit's spec."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from muxserve.config import Fleet, FleetError, Model, parse_fleet
from muxserve.costs.architecture import StoredWeights
from muxserve.costs.work import layer_work
from muxserve.memory.server import manager_config
from muxserve.planning.demand import checkpoints, images
from muxserve.planning.demand.checkpoints import CheckpointError, architecture_of, fetch, stored_weights
from muxserve.planning.demand.demands import demands_of
from muxserve.planning.specs.unit_plan import ResolvedUnit, resolve_unit
from muxserve.planning.specs.unit_specs import gateway_of, unit_spec_of
from muxserve.scheduling.state import ModelState, PoolState
from muxserve.scheduling.types import PoolProfile
from muxserve.spec import SimulatedSpec, load, save
from muxserve.spec.unit import EnginePhase
from muxserve.unit.request_table import pages_for
from muxserve.unit.state import model_profile
from muxserve.vllm.args import engine_args, frontend_args
from muxserve.vllm.multi_modal import ServedWhole
from placement import Machine
from placement.memory import sequence_bytes
from tests.support.checkpoint_files import write_checkpoint, write_files, write_safetensors
from tests.support.tiny_checkpoint import tiny_checkpoint

MACHINE = Machine(cores=4, memory_bytes=32 << 30, shared_memory_bytes=16 << 30)
CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}


class FakeHub:
    """Two repositories in a directory; `org/broken` cannot be had."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.asked: list[str] = []

    def config(self, repo: str, revision: str | None) -> Path:
        self.asked.append(f"config {repo} {revision}")
        if repo == "org/broken":
            raise CheckpointError("cannot get org/broken from the hub")
        file = self.base / repo.replace("/", "-") / "config.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(CONFIG))
        return file

    def snapshot(self, repo: str, revision: str | None) -> Path:
        self.asked.append(f"snapshot {repo} {revision}")
        directory = self.config(repo, revision).parent
        if repo != "org/gguf":
            write_files(directory)
        return directory


CONFIGS = Path(__file__).parents[2] / "configs/models"


def fleet(text: str) -> Fleet:
    return parse_fleet(text, "fleet.yaml", Path("/"), {})


def resolved(
    directory: Path,
    config: dict[str, object],
    options: str = "",
    beside: str = "",
    top: str = "",
    machine: Machine = MACHINE,
) -> ResolvedUnit:
    """The unit of a model with that configuration, and of the models beside it."""
    write_checkpoint(directory, config)
    text = f"{top}models: [{{name: a, path: {directory}{options}}}{beside}]\n"
    return resolve_unit(fleet(text), machine, FakeHub(directory))


def model_of(path: Path, machine: Machine = MACHINE, options: str = "") -> ResolvedUnit:
    """The unit of that checkpoint."""
    return resolve_unit(fleet(f"models: [{{name: a, path: {path}{options}}}]\n"), machine)


def test_everything_of_the_file_reaches_the_spec(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path)
    text = """\
policy: free
kv_pool: {size: 64MiB}
gateway: {host: 0.0.0.0, port: 9000, api_keys: [k], max_body: 1MiB, drain_seconds: 7}
models:
  - name: a
    hub: org/a
    revision: v1
    rate: 3
    slo: {ttft_ms: 100, tpot_ms: 10}
    dtype: float32
    max_len: 256
    max_num_seqs: 8
    max_num_batched_tokens: 128
    prefix_caching: false
    threads: 2
    limits: {max_concurrency: 5, max_queue: 6}
    engine_args: {trust_remote_code: false}
  - {name: b, hub: org/b}
"""
    parsed = fleet(text)
    plan = resolve_unit(parsed, MACHINE, hub)
    assert [entry for entry in hub.asked if entry.startswith("snapshot")] == []
    told: list[str] = []
    local = fetch(parsed, told.append, hub)
    assert told == ["fetching org/a", "fetching org/b"]
    assert "snapshot org/a v1" in hub.asked
    unit_spec = unit_spec_of(plan.with_fleet(local), str(tmp_path))
    assert unit_spec.policy == "free"
    assert unit_spec.cores == 4
    gateway = gateway_of(plan.fleet, port=9001)
    assert (gateway.host, gateway.port, gateway.api_keys) == ("0.0.0.0", 9001, ["k"])
    assert (gateway.http.max_body_bytes, gateway.drain_seconds) == (1 << 20, 7.0)
    a, b = unit_spec.models
    assert a.path == str(tmp_path / "org-a")
    assert (a.layers, a.kv_heads, a.head_dim, a.dtype, b.dtype) == (2, 2, 128, "float32", "bfloat16")
    assert (a.rate, a.slo_ttft_ms, a.slo_tpot_ms, a.max_len, b.max_len) == (3.0, 100.0, 10.0, 256, 512)
    assert (a.max_num_seqs, a.max_num_batched_tokens, a.prefix_caching) == (8, 128, False)
    assert (a.threads, a.prefill_share, a.decode_share) == (2, 0.5, 0.5)
    assert (a.max_concurrency, a.max_queue, a.engine_args) == (5, 6, {"trust_remote_code": False})
    assert {pool.name for pool in unit_spec.pools} == {a.pool, b.pool}
    assert a.pool != b.pool  # another dtype
    for model in unit_spec.models:
        pool = unit_spec.pool(model.pool)
        assert model.floor_pages <= model.quota_pages <= pool.num_pages - 1
        item = 4 if model.dtype == "float32" else 2
        assert pool.page_bytes == 2 * model.block_tokens * model.head_dim * item
    save(unit_spec, tmp_path / "unit.json")
    assert load(tmp_path / "unit.json") == unit_spec


def test_what_the_hub_does_not_have_is_told_with_its_line(tmp_path: Path) -> None:
    parsed = fleet("models:\n  - {name: a, hub: org/a}\n  - name: b\n    hub: org/broken\n")
    with pytest.raises(FleetError) as caught:
        resolve_unit(parsed, MACHINE, FakeHub(tmp_path))
    assert [str(problem) for problem in caught.value.problems] == [
        "fleet.yaml:4: models[1].hub: cannot get org/broken from the hub"
    ]


def test_overrides_of_the_config_count(tmp_path: Path) -> None:
    parsed = fleet(
        "models: [{name: a, hub: org/a, max_len: 4096, engine_args: {hf_overrides: {max_position_embeddings: 4096}}}]"
    )
    assert resolve_unit(parsed, MACHINE, FakeHub(tmp_path)).unit.models[0].max_len == 4096


def test_a_checkpoint_without_a_chat_template_is_told(tmp_path: Path) -> None:
    def notes(more: str = "") -> list[str]:
        parsed = fleet(f"models: [{{name: a, hub: org/a{more}}}]")
        hub = FakeHub(tmp_path)
        plan = resolve_unit(parsed, MACHINE, hub).with_paths(fetch(parsed, lambda _: None, hub))
        return [note for note in plan.notes if "chat template" in note]

    tokenizer = tmp_path / "org-a/tokenizer_config.json"
    (note,) = notes()
    assert note.startswith("a has no chat template: completions work, chat is refused")
    assert not notes(", engine_args: {chat_template: /x.jinja}")
    tokenizer.write_text('{"eos_token": "<|end|>"}')
    assert notes()
    tokenizer.write_text('{"chat_template": "{{ messages }}"}')
    assert not notes()
    tokenizer.unlink()
    (tmp_path / "org-a/chat_template.jinja").write_text("{{ messages }}")
    assert not notes()


def test_a_repository_without_weights_that_can_be_loaded_is_refused(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path)
    with pytest.raises(FleetError, match=r"models\[0\].hub: org/gguf has no weights \(\*.safetensors\)"):
        fetch(fleet("models: [{name: a, hub: org/gguf}]\n"), lambda _: None, hub)


@pytest.mark.parametrize("name", ["atlas-int8", "atlas-int4"])
def test_quantised_models_are_served_in_sixteen_bits(name: str) -> None:
    (served,) = model_of(CONFIGS / name).demands
    assert served.dtype == "bfloat16"
    words = r"models\[0\].dtype: weights quantised by compressed-tensors W.* computed in 16 bits on a CPU"
    with pytest.raises(FleetError, match=words):
        model_of(CONFIGS / name, options=", dtype: float32")


def test_experts_in_mxfp4_are_refused_on_a_cpu_that_cannot_compute_them() -> None:
    path = tiny_checkpoint("gpt_oss-mxfp4", layers=2, heads=4, kv_heads=2, head_dim=64)
    model_of(path)
    with pytest.raises(FleetError, match=r"models\[0\].path: vLLM computes experts in MXFP4 only on CPUs with AMX"):
        model_of(path, replace(MACHINE, amx=False))


def test_weights_in_four_bits_are_refused_on_a_cpu_that_cannot_compute_them() -> None:
    narrow = replace(MACHINE, avx512=False, amx=False)
    model_of(CONFIGS / "atlas-int8", narrow)
    words = r"models\[0\].path: vLLM computes weights quantised by compressed-tensors W4A16 only on CPUs with AVX-512"
    with pytest.raises(FleetError, match=words):
        model_of(CONFIGS / "atlas-int4", narrow)


def test_layers_with_a_window_reach_the_memory_manager(tmp_path: Path) -> None:
    """Unless no sequence is longer than the window."""
    windows = {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"]}
    for max_len, layers in ((512, [0]), (100, [])):
        made = resolved(tmp_path, {**CONFIG, **windows}, f", max_len: {max_len}", top="kv_pool: {size: 4MiB}\n")
        unit_spec = unit_spec_of(made, "/run/x")
        (model,), (config,) = unit_spec.models, manager_config(unit_spec).models
        assert list(config.windowed_layers) == layers
        whole = unit_spec.pools[0].num_pages // model.pages_per_block
        if not layers:
            assert model.num_blocks <= whole + 1
        else:
            # A token sees the 99 before it.
            assert config.window_blocks == -(-99 // model.block_tokens)
            assert model.num_blocks >= 2 * (whole - 1)


def test_experts_that_no_kernel_on_cpu_chooses_are_refused(tmp_path: Path) -> None:
    experts = {"scoring_func": "sigmoid", "num_local_experts": 8, "num_experts_per_tok": 2}
    with pytest.raises(FleetError, match=r"models\[0\].path: .* needs experts that are chosen by a sigmoid"):
        resolved(tmp_path, {**CONFIG, **experts, "attn_type_list": [1, 1]})


FP8_CACHE = ", engine_args: {kv_cache_dtype: fp8}"


def test_an_fp8_cache_has_pages_of_a_quarter_of_float32(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path)
    models = "{name: a, hub: org/a, dtype: float32}, {name: b, hub: org/b, dtype: float32, engine_args: {K: fp8}}"
    text = f"kv_pool: {{size: 64MiB}}\nmodels: [{models.replace('K', 'kv_cache_dtype')}]\n"
    made = resolve_unit(fleet(text), MACHINE, hub)
    plan = made.unit
    a, b = plan.models
    full, small = (next(pool for pool in plan.pools if pool.name == model.pool) for model in (a, b))
    # Types do not share a pool: what is a number in one may be no number in the other.
    assert full is not small
    assert full.page_bytes / a.table.block_tokens == 4 * small.page_bytes / b.table.block_tokens
    assert made.demands[1].dtype == "float32"
    plain, cached = demands_of(fleet(text), tmp_path, hub)
    assert sequence_bytes(plain, 1) == 4 * sequence_bytes(cached, 1)
    work, less = (layer_work(each.architecture, 1, "float32") for each in (plain, cached))
    assert work.kv_bytes_per_token == 4 * less.kv_bytes_per_token
    assert work.dense_bytes == less.dense_bytes


def test_an_fp8_cache_is_refused_for_heads_that_the_kernel_lacks(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"models\[0\].engine_args: kv_cache_dtype: FP8 needs a head size .* not 80"):
        resolved(tmp_path, {**CONFIG, "head_dim": 80}, FP8_CACHE)


def test_an_fp8_cache_is_refused_on_a_cpu_that_cannot_compute_it() -> None:
    model_of(CONFIGS / "arithmetic", options=FP8_CACHE)
    words = r"models\[0\].engine_args: kv_cache_dtype: FP8 needs a CPU with AVX-512 or AMX.*; leave it out, or serve"
    with pytest.raises(FleetError, match=words):
        model_of(CONFIGS / "arithmetic", replace(MACHINE, avx512=False), FP8_CACHE)


def test_a_step_ahead_is_refused_on_a_cpu() -> None:
    words = r"models\[0\].engine_args: async_scheduling: on a CPU it costs about what it hides.*; leave it out"
    with pytest.raises(FleetError, match=words):
        model_of(CONFIGS / "arithmetic", options=", engine_args: {async_scheduling: true}")
    model_of(CONFIGS / "arithmetic", options=", engine_args: {async_scheduling: false}")


SPECULATION = ", engine_args: {speculative_config: {method: ngram, num_speculative_tokens: 2}}"
ONE, STAGES = ", engines: one", ", engines: one, stages: 2"
ROLLING = ", dispatch: rolling, slo: {ttft_ms: 100, tpot_ms: 10}"
LATENT: dict[str, object] = {
    **CONFIG,
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}


class TestLatentAttention:
    def test_a_page_holds_the_latents_of_a_block_and_is_shared(self, tmp_path: Path) -> None:
        unit = resolved(tmp_path, LATENT, beside=", {name: b, hub: org/b}")
        (pool,) = unit.unit.pools
        latent, by_head = unit.unit.models
        assert pool.page_bytes == latent.table.block_tokens * 576 * 2
        assert unit_spec_of(unit.with_fleet(fetch(unit.fleet, print, FakeHub(tmp_path))), "/x").models[0].prefix_caching
        assert by_head.table.block_tokens > latent.table.block_tokens

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (FP8_CACHE, "keeps its cache in the model's dtype"),
            (STAGES, "models with latent attention are served in one stage"),
        ],
    )
    def test_what_it_cannot_have_is_refused(self, tmp_path: Path, options: str, words: str) -> None:
        with pytest.raises(FleetError, match=words):
            resolved(tmp_path, LATENT, options)

    def test_a_latent_that_the_kernel_lacks_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FleetError, match=r"its latent of 256 \+ 64 numbers is not the one .* \(512 \+ 64\)"):
            resolved(tmp_path, {**LATENT, "kv_lora_rank": 256})


STATEFUL: dict[str, object] = {
    **CONFIG,
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention"] * 2,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
}


class TestStates:
    def test_the_states_of_a_sequence_are_counted_in_blocks(self, tmp_path: Path) -> None:
        unit = resolved(tmp_path, STATEFUL, ", max_len: 512", beside=", {name: b, hub: org/b}")
        (pool,) = unit.unit.pools
        plan, beside = unit.unit.models
        states = 2 * (3 * (1024 + 2 * 64) * 2 + 1024 * 64 * 4)
        block = 2 * 2 * pool.page_bytes
        assert (plan.table.state_blocks, beside.table.state_blocks) == (-(-states // block), 0)
        assert plan.floor_pages == (plan.table.state_blocks + -(-512 // plan.table.block_tokens)) * 4
        # The other model may find float32 in a page of its own.
        assert plan.table.zeroed
        assert beside.table.zeroed
        model = unit_spec_of(unit.with_fleet(fetch(unit.fleet, print, FakeHub(tmp_path))), "/x").models[0]
        assert (model.layers, model.state_blocks, model.zeroed) == (2, plan.table.state_blocks, True)
        assert not model.prefix_caching
        profile = model_profile(model)
        assert profile.kv.state_blocks == plan.table.state_blocks
        state = ModelState(0, profile, PoolState(PoolProfile("pool0", 100), 100, 100))
        assert pages_for(state, 512) == plan.floor_pages

    @pytest.mark.parametrize(("options", "on"), [("", False), (", prefix_caching: true", True)])
    def test_prefixes_are_cached_where_that_is_asked_for(self, tmp_path: Path, options: str, on: bool) -> None:
        spec = unit_spec_of(resolved(tmp_path, STATEFUL, options), "/x")
        assert spec.models[0].prefix_caching is on
        # vLLM's configuration is made without it.
        assert not frontend_args(spec.models[0])["enable_prefix_caching"]

    def test_pages_that_engines_cannot_map_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FleetError, match="pages of 10240 bytes, and engines can map multiples of 4096 only"):
            resolved(tmp_path, {**STATEFUL, "head_dim": 80})

    @pytest.mark.parametrize("size", [1 << 14, 1 << 16])
    def test_engines_can_map_the_pages_where_those_of_the_machine_are_larger(self, tmp_path: Path, size: int) -> None:
        machine = replace(MACHINE, page_bytes=size)
        (pool,) = resolved(tmp_path, {**STATEFUL, "head_dim": 64}, machine=machine).unit.pools
        assert pool.page_bytes % size == 0
        with pytest.raises(FleetError, match=f"engines can map multiples of {size} only"):
            resolved(tmp_path, {**STATEFUL, "head_dim": 96}, machine=machine)

    def test_in_float32_nothing_needs_zeroing(self, tmp_path: Path) -> None:
        unit = resolved(tmp_path, STATEFUL, ", dtype: float32", beside=", {name: b, hub: org/b}")
        assert not any(model.table.zeroed for model in unit.unit.models)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (FP8_CACHE, "models that keep states have a cache in the model's dtype"),
            (", adapters: {}", "LoRA adapters are not served with models with states"),
            (STAGES, "models with states are served in one stage"),
            (SPECULATION, "no speculative_config: with states speculation was not tried"),
        ],
    )
    def test_what_it_cannot_have_is_refused(self, tmp_path: Path, options: str, words: str) -> None:
        with pytest.raises(FleetError, match=words):
            resolved(tmp_path, STATEFUL, options)


@pytest.mark.parametrize("config", [LATENT, STATEFUL], ids=["latents", "states"])
@pytest.mark.parametrize(("options", "rolls"), [(ONE, False), (ROLLING, True)], ids=["one", "rolling"])
def test_one_engine_keeps_latents_and_states(
    tmp_path: Path, config: dict[str, object], options: str, rolls: bool
) -> None:
    (model,) = unit_spec_of(resolved(tmp_path, config, options), "/x").models
    assert (model.shape, model.kv, model.rolling, model.engines) == ("one", "pool", rolls, ("both",))
    assert model.latent or model.state_blocks


class TestSpeculation:
    @pytest.mark.parametrize(
        ("options", "top", "words"),
        [
            (", adapters: {}", "", "no speculative_config: with adapters speculation was not tried"),
            ("", "cluster: {ranks: 2}\n", "speculation is for engines of one rank, not of 2"),
        ],
    )
    def test_what_it_cannot_have_is_refused(self, tmp_path: Path, options: str, top: str, words: str) -> None:
        with pytest.raises(FleetError, match=words):
            resolved(tmp_path, CONFIG, options + SPECULATION, top=top)

    @pytest.mark.parametrize(("engines", "phase"), [("split", "decode"), ("one", "both")])
    def test_engines_hear_of_it_and_the_front_end_does_not(
        self, tmp_path: Path, engines: str, phase: EnginePhase
    ) -> None:
        unit = unit_spec_of(resolved(tmp_path, CONFIG, f"{SPECULATION}, engines: {engines}"), "/x")
        given = {"method": "ngram", "num_speculative_tokens": 2}
        assert engine_args(unit, "a", phase)["speculative_config"] == given
        assert "speculative_config" not in frontend_args(unit.models[0])
        pretended = msgspec.structs.replace(unit, simulated=SimulatedSpec("CPU"))
        assert "speculative_config" not in engine_args(pretended, "a", phase)


class TestAdapters:
    def test_their_room_counts_with_the_weights(self, tmp_path: Path) -> None:
        (without,), (with_room,) = (resolved(tmp_path, CONFIG, each).architectures for each in ("", ", adapters: {}"))
        assert (with_room.adapter_slots, with_room.adapter_rank) == (2, 16)
        assert with_room.weight_bytes("bfloat16") - without.weight_bytes("bfloat16") == with_room.adapter_bytes(
            "bfloat16"
        )

    @pytest.mark.parametrize(
        ("options", "top", "words"),
        [
            (", adapters: {}", "cluster: {ranks: 2}\n", "LoRA adapters are served by engines of one rank, not of 2"),
            (", adapters: {}, engine_args: {runner: pooling}", "", "this one answers with vectors"),
        ],
    )
    def test_what_it_cannot_have_is_refused(self, tmp_path: Path, options: str, top: str, words: str) -> None:
        with pytest.raises(FleetError, match=rf"adapters: .*{words}"):
            resolved(tmp_path, CONFIG, options, top=top)


class TestImages:
    def resolve(self, directory: Path, options: str = "") -> ResolvedUnit:
        text = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")}
        whole = {"architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "text_config": text}
        return resolved(directory, {**whole, "vision_config": {"hidden_size": 32}}, options)

    def test_the_encoder_counts_with_the_weights_and_engines_know_of_it(self, tmp_path: Path) -> None:
        unit = self.resolve(tmp_path)
        (model,) = unit_spec_of(unit, "/x").models
        assert (model.sees_images, model.text_only, model.prefix_caching) == (True, False, True)
        tensors = {"model.text_model.x": ("BF16", [8, 2], 32), "model.vision_model.x": ("BF16", [64, 64], 8192)}
        write_safetensors(tmp_path / "model.safetensors", tensors)
        found = architecture_of(Model(name="a", path=str(tmp_path)), FakeHub(tmp_path))
        assert found.stored == StoredWeights(16 + 64 * 64, 0)

    def test_one_engine_sees_them(self, tmp_path: Path) -> None:
        (model,) = unit_spec_of(self.resolve(tmp_path, ONE), "/x").models
        assert (model.shape, model.kv, model.sees_images) == ("one", "pool", True)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (", adapters: {}", "LoRA adapters are not served with models with images"),
            (STAGES, "engines of one rank, not of 2"),
            (", engine_args: {runner: pooling}", "models that see images generate text only here"),
        ],
    )
    def test_what_it_cannot_have_is_refused(self, tmp_path: Path, options: str, words: str) -> None:
        with pytest.raises(FleetError, match=words):
            self.resolve(tmp_path, options)


class TestServedWhole:
    """Multi-modal models with a cache of their own, by what vLLM says of them on this machine."""

    PRIVATE = ", kv: private"
    NEEDS = "vLLM needs the module torchvision, which is not installed here"

    def resolve(
        self,
        directory: Path,
        patch: pytest.MonkeyPatch,
        says: ServedWhole,
        kind: str = "mistral3",
        options: str = PRIVATE,
        top: str = "",
    ) -> ResolvedUnit:
        for module in (checkpoints, images):
            patch.setattr(module, "served_here", lambda model, path: says)
        name = {"mistral3": "Mistral3", "aria": "Aria"}[kind]
        whole = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind, "text_config": CONFIG}
        tensors = {"language_model.lm_head.weight": ("BF16", [8, 2], 32), "vision_tower.x": ("BF16", [64, 64], 8192)}
        write_checkpoint(directory, {**whole, "vision_config": {"hidden_size": 32}})
        write_safetensors(directory / "model.safetensors", tensors)
        text = f"{top}models: [{{name: a, path: {directory}{options}}}]\n"
        return resolve_unit(fleet(text), MACHINE, FakeHub(directory))

    @pytest.mark.parametrize("kind", ["mistral3", "aria"])
    def test_with_images_all_of_it_is_loaded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        unit = self.resolve(tmp_path, monkeypatch, ServedWhole(images=True), kind)
        (model,), (demand,) = unit_spec_of(unit, "/x").models, unit.demands
        assert (model.kv, model.sees_images, model.text_only) == ("private", True, False)
        assert "language_model_only" not in model.engine_args
        assert demand.architecture.stored == StoredWeights(16 + 64 * 64, 0)
        assert not [note for note in unit.notes if "served as text" in note]

    def test_where_vllm_lacks_what_images_need_its_text_is_served(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        unit = self.resolve(tmp_path, monkeypatch, ServedWhole(False, self.NEEDS, text=False))
        (model,), (demand,) = unit_spec_of(unit, "/x").models, unit.demands
        assert (model.kv, model.sees_images, model.text_only) == ("private", False, True)
        assert demand.architecture.stored == StoredWeights(16, 0)
        assert f"a is served as text, without images: {self.NEEDS}" in unit.notes

    def test_of_other_kinds_the_whole_for_text(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        unit = self.resolve(tmp_path, monkeypatch, ServedWhole(False, self.NEEDS), "aria", options="")
        (model,) = unit_spec_of(unit, "/x").models
        assert (model.kv, model.sees_images, model.text_only) == ("private", False, False)
        assert model.engine_args["language_model_only"] is True
        with pytest.raises(FleetError, match=rf"cannot be served: .* is multi-modal, and {self.NEEDS}"):
            self.resolve(tmp_path, monkeypatch, ServedWhole(False, self.NEEDS, text=False), "aria")

    def test_who_asks_for_text_gets_text(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        options = f"{self.PRIVATE}, engine_args: {{language_model_only: true}}"
        unit = self.resolve(tmp_path, monkeypatch, ServedWhole(images=True), options=options)
        (model,) = unit_spec_of(unit, "/x").models
        assert (model.sees_images, model.text_only) == (False, True)

    def test_on_the_pool_it_stays_text_and_says_how_to_have_images(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        unit = self.resolve(tmp_path, monkeypatch, ServedWhole(images=True), options="")
        (model,) = unit_spec_of(unit, "/x").models
        assert (model.kv, model.sees_images, model.text_only) == ("pool", False, True)
        assert [note for note in unit.notes if "with `kv: private` it takes images, too" in note]

    def test_several_ranks_see_images_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        unit = self.resolve(tmp_path, monkeypatch, ServedWhole(images=True), top="cluster: {ranks: 2}\n")
        assert unit_spec_of(unit, "/x").models[0].sees_images


class TestStoredWeights:
    def test_of_a_multi_modal_checkpoint_the_language_model_counts(self, tmp_path: Path) -> None:
        whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": CONFIG}
        write_checkpoint(tmp_path, {**whole, "vision_config": {"hidden_size": 32}})
        tensors = {"language_model.lm_head.weight": ("BF16", [8, 2], 32), "vision_tower.x": ("BF16", [64, 64], 8192)}
        write_safetensors(tmp_path / "model.safetensors", tensors)
        found = architecture_of(Model(name="a", path=str(tmp_path)), FakeHub(tmp_path))
        assert (found.text_only, found.stored) == (True, StoredWeights(16, 0))
        (served,) = unit_spec_of(model_of(tmp_path), "/x").models
        assert served.text_only

    def test_what_is_quantised_keeps_its_size(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        estimate = architecture_of(Model(name="a", path=str(tmp_path)), FakeHub(tmp_path))
        assert estimate.stored is None
        write_safetensors(tmp_path / "model.safetensors", {"e": ("BF16", [8, 4], 64), "w": ("I32", [8], 32)})
        found = architecture_of(Model(name="a", path=str(tmp_path)), FakeHub(tmp_path))
        assert found.weight_bytes("bfloat16") == 64 + 32
        assert found.weight_bytes("float32") == 128 + 32

    def test_the_files_that_the_index_names(self, tmp_path: Path) -> None:
        for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
            write_safetensors(tmp_path / name, {name: ("F32", [10], 40)})
        assert stored_weights(tmp_path) == StoredWeights(20, 0)
        names = {"a": "model-1.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        assert stored_weights(tmp_path) == StoredWeights(10, 0)
        (tmp_path / "model-1.safetensors").unlink()
        assert stored_weights(tmp_path) is None

    @pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1", b"\2" + bytes(7) + b"[]"])
    def test_files_that_are_no_weights_leave_the_estimate(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "model.safetensors").write_bytes(content)
        assert stored_weights(tmp_path) is None

    def test_of_a_quickstart_model_they_are_what_its_file_has(self) -> None:
        path = CONFIGS / "atlas"
        stored = stored_weights(path)
        assert stored is not None
        assert stored.packed_bytes == 0
        # In bfloat16, behind a header.
        assert (path / "model.safetensors").stat().st_size - 5000 < 2 * stored.elements < 3_126_952


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"model_type": "qwenn3"}, "", "has model_type: 'qwenn3', which this vLLM ("),
        ({"architectures": ["Qwen3ForCausalLN"]}, "", 'does not know; did you mean "Qwen3ForCausalLM"?'),
        ({"quantization_config": {"quant_method": "magic"}}, "", "has quant_method: 'magic', which this vLLM ("),
        ({"rope_scaling": {"rope_type": "yarm", "factor": 2.0}}, "", 'does not know; did you mean "yarn"?'),
        ({}, "{hf_overrides: {model_type: qwenn3}}", "has model_type: 'qwenn3'"),
        ({"num_hidden_layers": 0}, "", "has num_hidden_layers: 0; it must be a whole number from 1 to 4,096"),
        # Its own code may know it.
        ({"model_type": "qwenn3", "auto_map": {"AutoConfig": "x"}}, "{trust_remote_code: true}", ""),
    ],
)
def test_what_vllm_does_not_know_is_refused(
    change: dict[str, object], options: str, words: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, {**CONFIG, **change})
    more = f", engine_args: {options}" if options else ""
    try:
        demands_of(fleet(f"models:\n  - {{name: a, path: {tmp_path}{more}}}\n"), tmp_path)
        said = ""
    except FleetError as error:
        said = str(error)
    assert (words in said) if words else not said
    assert said.startswith("fleet.yaml:2: models[0].path: cannot be served: ") or not words
