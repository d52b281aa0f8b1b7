"""The installed vLLM is the one that the CUDA engine was written for, as far as its Python sources tell."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from muxserve.planning.demand.demands import gpu_batch
from muxserve.vllm import cuda_internals
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
