"""The installed vLLM is the one that the CUDA engine was written for, as far as its Python sources tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from muxserve.planning.demand.demands import gpu_batch
from muxserve.vllm import cuda_internals, engine_seam, weight_seam
from muxserve.vllm.pin import differences


def test_vllm_s_internals_are_as_expected() -> None:
    assert cuda_internals.problems() == []
    cuda_internals.check_states()


def test_a_difference_is_told_in_words() -> None:
    moved = [("vllm.v1.worker.gpu_worker", "Worker.gone", ()), ("vllm.v1.worker.gpu_worker", "request_memory", ("x",))]
    assert differences(moved) == [
        "vllm.v1.worker.gpu_worker.Worker.gone is gone",
        "vllm.v1.worker.gpu_worker.request_memory no longer has x",
    ]


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_each_version_is_called_in_its_own_way(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """By stand-ins of what differs: the version that is not installed has only its sources."""
    from vllm import outputs

    new = version == "0.33.0"
    for seam in (engine_seam, weight_seam):
        monkeypatch.setattr(seam, "since", lambda first: new)
    monkeypatch.setattr(outputs, "RequestError", lambda code, message: (code, message), raising=False)
    scheduler: Any = SimpleNamespace(grammar_compile_error_reqs={} if new else set())
    engine_seam.fail_for_grammar(scheduler, SimpleNamespace(request_id="r"), "because")  # type: ignore[arg-type]
    assert scheduler.grammar_compile_error_reqs == ({"r": ("validation_error", "because")} if new else {"r"})
    told: list[tuple[object, ...]] = []
    executor: Any = SimpleNamespace(set_kv_cache_layout=lambda *given: told.append(given))
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1))
    weight_seam.publish_layout(executor, "LBNHC", config)
    assert told == [("LBNHC", 1) if new else ("LBNHC",)]


@pytest.mark.parametrize(
    ("name", "gib"), [("NVIDIA L20", 45), ("NVIDIA A100-SXM4-80GB", 80), ("NVIDIA H100 80GB HBM3", 80), ("B200", 179)]
)
def test_steps_hold_what_vllm_s_server_gives_them(monkeypatch: pytest.MonkeyPatch, name: str, gib: int) -> None:
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    platform = SimpleNamespace(
        get_device_total_memory=lambda: gib << 30,
        get_device_name=lambda: name,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    tokens, seqs = arg_utils.EngineArgs.get_batch_defaults(world_size=1)
    served = UsageContext.OPENAI_API_SERVER
    assert gpu_batch(name, gib << 30) == (seqs[served], tokens[served])
