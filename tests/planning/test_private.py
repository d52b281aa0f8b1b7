"""Models whose KV lies in a cache of vLLM's own: which have one, how large it is, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.cli.output import quota_words
from muxserve.cluster.machine import this_machine
from muxserve.config import FleetError, parse_fleet
from muxserve.gpu.nvml import Gpu, GpuMachine
from muxserve.planning.demand.demands import demands_of
from muxserve.planning.specs.fleet_planner import FleetPlanner
from muxserve.planning.specs.unit_plan import ResolvedUnit
from muxserve.planning.specs.unit_specs import planned_unit
from muxserve.spec import ModelSpec
from muxserve.unit.state import model_profile
from placement import Machine
from tests.support.checkpoint_files import write_checkpoint

MACHINE = Machine(4, 16 << 30, 8 << 30)
NONE = GpuMachine(why_none="the NVIDIA driver is not installed")
H200 = GpuMachine((Gpu(0, "GPU-0", "NVIDIA H200", 143771 << 20, 500 << 20),))
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
CHUNKED = {**LLAMA, "attention_chunk_size": 1024}
# K and V of a token in all layers.
TOKEN = 4 * 4 * 64 * 2 * 2


def unit(
    tmp_path: Path,
    own: str = "",
    config: dict[str, Any] = CHUNKED,
    gpus: GpuMachine = NONE,
    head: str = "kv_pool: {size: 512MiB}",
) -> ResolvedUnit:
    """A unit of a model on the pool, and one with that config.json and those keys."""
    for name, each in (("pooled", LLAMA), ("other", config)):
        write_checkpoint(tmp_path / name, each)
    text = f"{head}\nmodels:\n- {{name: pooled, path: pooled}}\n- name: other\n  path: other\n{own}"
    (found,) = FleetPlanner(parse_fleet(text, "fleet.yaml", tmp_path, {}), MACHINE, lambda: gpus).at_start(None)
    return found


def spec_of(found: ResolvedUnit, name: str = "other") -> ModelSpec:
    return planned_unit(found, "/run").unit_spec.model(name)


def test_auto_is_private_where_the_pool_cannot_hold_the_cache(tmp_path: Path) -> None:
    found = unit(tmp_path)
    other, pooled = spec_of(found), spec_of(found, "pooled")
    assert (other.kv, other.engines, other.kv_heads, other.pages_per_block) == ("private", ("both",), 0, 0)
    assert (pooled.kv, pooled.shape, pooled.kv_bytes) == ("pool", "one", 0)
    # Both are asked for alike: each has half of what there is.
    assert other.kv_bytes == found.unit.pool_bytes == 256 << 20
    profile = model_profile(other)
    assert profile.engines.both
    assert not profile.kv.pages_per_block
    assert quota_words(other) == "256 MiB, private"
    (why,) = [note for note in found.notes if "of its own (kv: private)" in note]
    assert why.endswith("it uses chunked attention (attention_chunk_size)")
    (lost,) = [note for note in found.notes if "does without" in note]
    assert "not lent" in lost
    assert "computed again after a death" in lost


def test_any_model_may_have_one(tmp_path: Path) -> None:
    assert spec_of(unit(tmp_path, config=LLAMA)).kv == "pool"
    other = spec_of(unit(tmp_path, "  kv: private\n", LLAMA))
    assert (other.kv, other.kv_bytes) == ("private", 256 << 20)
    drafts = "  engine_args: {speculative_config: {method: draft_model, model: x, num_speculative_tokens: 2}}\n"
    assert spec_of(unit(tmp_path, drafts, LLAMA)).kv == "private"


def test_the_pool_is_refused_where_it_cannot_hold_the_cache(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"kv: the pool cannot hold what LlamaForCausalLM keeps: it uses chunked"):
        unit(tmp_path, "  kv: pool\n")


def test_the_longest_sequence_fits_twice(tmp_path: Path) -> None:
    assert spec_of(unit(tmp_path)).max_len == 4096
    small = unit(tmp_path, head="kv_pool: {size: 32MiB}")
    other = spec_of(small)
    assert other.max_len < 4096
    assert other.max_len * TOKEN * 2 < other.kv_bytes
    assert small.demands[1].cache_bytes(other.max_len + 32) * 2 > other.kv_bytes
    with pytest.raises(FleetError, match="cannot hold one sequence of every model"):
        unit(tmp_path, "  max_len: 4096\n", head="kv_pool: {size: 16MiB}")


def test_an_automatic_size_has_room_for_some_sequences(tmp_path: Path) -> None:
    other = spec_of(unit(tmp_path, head="policy: adbs"))
    assert other.kv_bytes >= 4 * other.max_len * TOKEN


def test_a_unit_may_have_private_caches_only(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", CHUNKED)
    text = "kv_pool: {size: 512MiB}\nmodels:\n- {name: other, path: other}\n"
    fleet = parse_fleet(text, "fleet.yaml", tmp_path, {})
    for gpus in (NONE, H200):
        (found,) = FleetPlanner(fleet, MACHINE, lambda gpus=gpus: gpus).at_start(None)  # type: ignore[misc]
        assert spec_of(found).kv_bytes == 512 << 20
        # A memory manager has a pool at least.
        assert [pool.num_pages for pool in found.unit.pools] == [2]


def test_on_gpus_it_is_taken_from_what_the_pool_would_have(tmp_path: Path) -> None:
    found = unit(tmp_path, gpus=H200, head="cluster: {gpus: 1}")
    other = spec_of(found)
    assert other.kv_bytes + found.unit.pool_bytes <= found.unit.kv_bytes
    assert other.kv_bytes > 40 << 30


def test_what_is_never_private_keeps_no_kv(tmp_path: Path) -> None:
    encoder = {**LLAMA, "architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 512}
    other = spec_of(unit(tmp_path, config=encoder))
    assert (other.kv, other.engines) == ("pool", ("prefill",))
    with pytest.raises(FleetError, match=r"models\[1\].kv: other keeps no KV, in the pool or elsewhere; leave kv out"):
        unit(tmp_path, "  kv: private\n", encoder)


def test_the_type_of_a_cache_with_scales(tmp_path: Path) -> None:
    """The checkpoint says that its cache has 8 bits."""
    quantised = {**LLAMA, "quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}}
    found = unit(tmp_path, config=quantised)
    assert found.demands[1].bytes_per_token == TOKEN // 2
    assert json.dumps(found.demands[1].private).count("scales")


def test_a_plan_of_this_machine_is_what_is_deployed_without_one(tmp_path: Path) -> None:
    for name in ("pooled", "other"):
        write_checkpoint(tmp_path / name, LLAMA)
    file, plan = tmp_path / "fleet.yaml", tmp_path / "plan.yaml"
    file.write_text(
        "kv_pool: {size: 512MiB}\nmodels:\n- {name: pooled, path: pooled, engines: split}\n"
        "- {name: other, path: other, kv: private}\n"
    )
    made = CliRunner().invoke(app, ["plan", str(file), "--simulate", "0", "-o", str(plan)])
    assert made.exit_code == 0, made.output
    planner = FleetPlanner(parse_fleet(file.read_text(), "fleet.yaml", tmp_path, {}), this_machine(), lambda: NONE)
    (planned,), (found,) = planner.at_start(plan), planner.at_start()
    assert [spec_of(planned, name).shape for name in ("pooled", "other")] == ["split", "one"]
    for one, other in zip(planned.unit.models, found.unit.models, strict=True):
        assert one.cache_bytes == pytest.approx(other.cache_bytes, rel=0.01)
    assert planned.unit.pool_bytes == pytest.approx(found.unit.pool_bytes, rel=0.01)


def test_on_gpus_a_plan_gives_it_one_engine(tmp_path: Path) -> None:
    text = "cluster: {gpus: 1, gpu_type: A100-80GB}\nmodels: [{name: a, architecture: llama-3.1-8b, kv: private}]\n"
    (demand,) = demands_of(parse_fleet(text, "fleet.yaml", tmp_path, {}, serving=False), tmp_path)
    assert demand.shape == "one"


def test_what_answers_with_vectors_has_an_engine_that_prefills(tmp_path: Path) -> None:
    vectors = "  engine_args: {runner: pooling}\n"
    found = unit(tmp_path, f"{vectors}  kv: private\n", LLAMA)
    spec = spec_of(found)
    assert spec.engines == ("prefill",)
    assert not model_profile(spec).engines.both
    for kv in ("pool", "private"):
        with pytest.raises(FleetError, match=r"fleet.yaml:\d+: models\[1\].engines: the model answers with vectors"):
            unit(tmp_path, f"{vectors}  kv: {kv}\n  engines: one\n", LLAMA)


def test_a_unit_of_private_caches_alone_is_planned(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", LLAMA)
    file = tmp_path / "fleet.yaml"
    file.write_text("kv_pool: {size: 512MiB}\nmodels: [{name: a, path: a, kv: private}]\n")
    made = CliRunner().invoke(app, ["plan", str(file), "--simulate", "0", "--json"])
    assert made.exit_code == 0, made.output
    (unit,) = json.loads(made.stdout)["units"]
    assert unit["memory"]["pool"] == pytest.approx(512 << 20, rel=0.01)
