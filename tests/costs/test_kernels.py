"""Costs from measured kernels: what is ours on top of any tables, and what the published tables say.

Those that ask the tables need them beside the environment, where `make unit` installs them:

    pip install --no-deps --target build/plan -r requirements/plan.txt
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from muxserve.costs.architecture import ModelArchitecture, read_architecture
from muxserve.costs.calibration import GPU, graphs_of
from muxserve.costs.devices import DEVICES
from muxserve.costs.kernels import SYSTEMS, KernelCosts, KernelModel, KernelSteps, StepPoints, package_version
from muxserve.costs.latency import CostError, EngineShape
from muxserve.costs.roofline import Roofline, RooflineCosts
from muxserve.costs.stages import costs_of_stages
from tests.costs.models import MIXTRAL, SEVEN_B, llama

BESIDE = Path(__file__).resolve().parents[2] / "build/plan"
H100 = EngineShape("H100-80GB", graphs="full")
EIGHT_B = llama(kv_heads=8, intermediate=14336, vocab=128256, max_len=131072, dtype="bfloat16")
HOST = GPU.host_step + GPU.host_sequence


def linear_and_attention(prompts: int, tokens: int) -> float:
    """1 us a token and 1 ns a pair, but nothing for pairs of the shortest prompts."""
    pairs = prompts * tokens * (tokens + 1) // 2 if tokens > 16 else 0
    return 2e-3 + 1e-6 * prompts * tokens + 1e-9 * pairs


STEPS = KernelSteps(linear_and_attention, lambda batch, context: 3e-3 + 1e-5 * batch + 2e-9 * batch * context)


def costs(shape: EngineShape = H100, architecture: ModelArchitecture = SEVEN_B) -> KernelCosts:
    return KernelCosts(architecture, shape, StepPoints(STEPS), GPU)


class TestOnTop:
    @pytest.mark.parametrize("tokens", [64, 512, 8192])
    def test_a_prompt_alone_takes_what_its_kernels_take_and_the_host(self, tokens: int) -> None:
        found = costs(replace(H100, graphs="full")).prefill(tokens, tokens * (tokens + 1) // 2, 1)
        floor = GPU.launch_seconds("full", SEVEN_B.layers, False)[0]
        assert found == pytest.approx(max(floor, linear_and_attention(1, tokens)) + HOST, rel=1e-3)

    def test_pairs_beyond_the_longest_prompt_cost_as_before(self) -> None:
        many = 1 << 40
        assert costs().prefill(1, 2 * many, 1) - costs().prefill(1, many, 1) == pytest.approx(1e-9 * many, rel=1e-3)

    @pytest.mark.parametrize(("batch", "context"), [(1, 1), (8, 8 * 300), (64, 64 * 5000), (256, 256 * 200_000)])
    def test_decode_is_affine_between_contexts(self, batch: int, context: int) -> None:
        piece = costs().decode(batch, context)
        kernels = STEPS.decode(batch, context // batch)
        assert piece.seconds(context) == pytest.approx(kernels + GPU.host_step + batch * GPU.host_sequence)
        assert context <= piece.until

    def test_a_share_of_the_device_slows_kernels_and_not_the_host(self) -> None:
        half = replace(H100, share=0.5)
        ideal, whole = (Roofline().engine(SEVEN_B, each) for each in (half, H100))
        slower = ideal.linear(4096, 1) / whole.linear(4096, 1)
        pairs = 4096 * 4097 // 2
        expected = slower * 6.096e-3 + 1e-9 * pairs / GPU.compute_share(0.5) + HOST
        assert costs(half).prefill(4096, pairs, 1) == pytest.approx(expected, rel=0.01)
        slope = costs(half).decode(8, 8 * 5000).per_token
        assert slope == pytest.approx(2e-9 / GPU.bandwidth_share(0.5))

    def test_loads_are_the_work_of_the_roofline_in_the_seconds_of_the_kernels(self) -> None:
        work = Roofline().engine(SEVEN_B, H100).decode_work(32, 32 * 500)
        load = costs().decode_load(32, 32 * 500)
        seconds = costs().decode(32, 32 * 500).seconds(32 * 500)
        assert load == (min(1.0, work.memory / seconds), min(1.0, work.compute / seconds))
        assert 0 < costs().prefill_load(512, 512 * 513 // 2, 1).compute <= 1

    def test_a_stage_has_its_part_of_the_kernels_and_all_of_the_host(self) -> None:
        part = costs().of_stage(replace(SEVEN_B, layers=8))
        assert part.prefill(8192, 0, 1) - HOST == pytest.approx((costs().prefill(8192, 0, 1) - HOST) / 4)


class TestUnknown:
    """Nothing here depends on whether tables are installed."""

    def test_a_device_without_tables_is_told_and_left_to_the_roofline(self) -> None:
        where = EngineShape("L20")
        with pytest.raises(CostError, match="there are no kernel tables of L20-48GB; the roofline"):
            KernelModel().engine(SEVEN_B, where)
        beyond = KernelModel(beyond=Roofline())
        assert isinstance(beyond.engine(SEVEN_B, where), RooflineCosts)
        assert beyond.why_not(SEVEN_B, where) == "there are no kernel tables of L20-48GB"

    @pytest.mark.skipif(bool(package_version()), reason="the tables are installed")
    def test_without_tables_the_message_says_what_to_install(self) -> None:
        assert "pip install 'muxserve[plan]'" in KernelModel().why_not(SEVEN_B, H100)

    def test_every_system_is_a_device(self) -> None:
        assert set(SYSTEMS) <= set(DEVICES)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> KernelModel:
    if not package_version():
        monkeypatch.syspath_prepend(str(BESIDE))
    if not package_version():
        pytest.skip("needs aiconfigurator-core: pip install --no-deps --target build/plan -r requirements/plan.txt")
    return KernelModel()


def architecture_of(name: str) -> ModelArchitecture:
    """The architecture of a config.json in the package."""
    import aiconfigurator_core

    folder = Path(aiconfigurator_core.__file__).parent / "model_configs"
    config = json.loads((folder / f"{name.replace('/', '--')}_config.json").read_text())
    return replace(read_architecture(config), config=json.dumps(config))


class TestTables:
    def test_steps_are_those_of_the_package(self, tables: KernelModel) -> None:
        from aiconfigurator_core.sdk.engine import EngineHandle

        theirs = EngineHandle.compile("meta-llama/Meta-Llama-3.1-8B", "h100_sxm", "vllm", kvcache_quant_mode="bfloat16")
        ours = tables.engine(architecture_of("meta-llama/Meta-Llama-3.1-8B"), H100)
        for tokens in (64, 1024, 4096, 8192):
            seconds = ours.prefill(tokens, tokens * (tokens + 1) // 2, 1) - HOST
            assert seconds == pytest.approx(theirs.predict_prefill_latency(1, tokens) / 1e3, rel=0.01)
        for batch, context in ((1, 1024), (64, 1024), (256, 4096)):
            step = ours.decode(batch, batch * context).seconds(batch * context)
            device = step - GPU.host_step - batch * GPU.host_sequence
            assert device == pytest.approx(theirs.predict_decode_latency(batch, context) / 1e3, rel=0.01)

    def test_a_model_is_known_by_its_shape_under_any_name(self, tables: KernelModel) -> None:
        named = tables.engine(architecture_of("meta-llama/Meta-Llama-3.1-8B"), H100)
        unnamed = tables.engine(replace(EIGHT_B, name="MistralForCausalLM"), H100)
        assert unnamed.prefill(2048, 2048 * 1024, 1) == pytest.approx(named.prefill(2048, 2048 * 1024, 1), rel=1e-3)
        assert tables.why_not(replace(MIXTRAL, vocab=32000), EngineShape("H200", tp=2)) == ""

    @pytest.mark.parametrize(
        ("architecture", "shape", "why"),
        [
            (replace(EIGHT_B, window=4096, windowed_layers=16), H100, "no models like LlamaForCausalLM"),
            (EIGHT_B, replace(H100, dtype="float32"), "no float32"),
            (replace(EIGHT_B, mlp_matrices=2), H100, "no models like"),
        ],
    )
    def test_what_the_tables_lack_is_said(
        self, tables: KernelModel, architecture: ModelArchitecture, shape: EngineShape, why: str
    ) -> None:
        assert why in tables.why_not(architecture, shape)

    def test_tables_of_kernels_that_nobody_serves_with_do_not_count(self, tables: KernelModel) -> None:
        """The tables of block-wise FP8 on Blackwell do not count (docs/costs.md)."""
        blocks = architecture_of("Qwen/Qwen3-32B-FP8")
        assert "times what the roofline says of Qwen3ForCausalLM" in tables.why_not(blocks, EngineShape("B200"))
        assert (
            tables.why_not(blocks, H100) == tables.why_not(architecture_of("Qwen/Qwen3-32B"), EngineShape("B200")) == ""
        )

    def test_stages_share_what_the_whole_model_takes(self, tables: KernelModel) -> None:
        stages = costs_of_stages((16, 16), tables, EIGHT_B, replace(H100, graphs=graphs_of({})))
        whole = tables.engine(EIGHT_B, H100)
        halves = sum(stage.prefill(8192, 8192 * 4096, 1) - HOST for stage in stages)
        assert halves == pytest.approx(whole.prefill(8192, 8192 * 4096, 1) - HOST)

    @pytest.mark.slow
    def test_whole_runs_of_others_are_predicted_as_well_as_the_page_says(self, tables: KernelModel) -> None:
        """docs/costs.md; the cells are the package's, and nothing was fitted to them."""
        from benchmarks.costs_runs import runs

        models = {backend: KernelModel(backend=backend) for backend in ("vllm", "sglang", "trtllm")}
        errors = []
        for run in runs():
            hopper = run.device.startswith(("H100", "H200"))
            if hopper and run.fits and run.was_served and not models[run.backend].why_not(run.architecture, run.shape):
                errors.append(run.predicted_tpot(models[run.backend]) / run.tpot - 1)
        assert len(errors) > 1000
        assert median(abs(each) for each in errors) < 0.12
        assert abs(sum(errors) / len(errors)) < 0.05
