"""The runner of the CUDA engine: whole requests on a CPU with FlashAttention in plain torch, and seeds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from muxserve.cluster.machine import this_machine
from muxserve.engine.cuda.runner import PooledGPUModelRunner
from tests.engine_cuda.serve_on_cpu import OTHERS, STATEFUL


def test_tokens_are_those_of_stock_vllm(served: Path) -> None:
    """Also after a restart of the memory manager, on weights that another process holds, and one step ahead."""
    expected = json.loads((served / "stock.json").read_text())
    for weights in ("ours", "held", "ahead"):
        answers = json.loads((served / f"{weights}.json").read_text())
        for run in ("first", "again", "after"):
            assert answers[run] == expected, (weights, run)
        assert answers["known_after_restart"] == 0
        assert answers["uploads"] > 0
    tensors = json.loads((served / "held-tensors.json").read_text())
    assert tensors["param"] > 20
    assert tensors["moved"] > 0


@pytest.mark.parametrize("kind", OTHERS)
def test_so_are_those_of_other_kinds(served: Path, kind: str) -> None:
    """Sinks, latents and states; prompts that begin alike go on behind a snapshot of the states."""
    expected = json.loads((served / f"stock-{kind}.json").read_text())
    for weights in (kind, f"held-{kind}"):
        answers = json.loads((served / f"{weights}.json").read_text())
        for run in ("first", "again", "after"):
            assert answers[run] == expected, (weights, run)
        assert bool(answers["snapshots"]) == (kind in STATEFUL)


def test_embeddings_are_those_of_stock_vllm(served: Path) -> None:
    expected = json.loads((served / "stock-vectors.json").read_text())
    vectors = json.loads((served / "vectors.json").read_text())
    assert np.allclose(vectors, expected, atol=1e-5)


@pytest.mark.skipif(not this_machine().avx512, reason="vLLM's kernels for int4 on CPU need AVX-512")
def test_weights_that_vllm_packs_are_packed_once_and_mapped(served: Path) -> None:
    """What its kernels keep beside parameters is made in each engine; the tokens are those of weights it has loaded."""
    expected = json.loads((served / "int4.json").read_text())
    answers = json.loads((served / "held-int4.json").read_text())
    assert answers == expected
    assert expected["first"] != json.loads((served / "ours.json").read_text())["first"]


class FakeGenerator:
    """A CUDA generator, as far as its offset goes."""

    def __init__(self, offset: int = 0) -> None:
        self.seed, self.offset = 0, offset

    def manual_seed(self, seed: int) -> None:
        self.seed, self.offset = seed, 0

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def runner_without_a_model(per_token: int | None) -> Any:
    runner: Any = PooledGPUModelRunner.__new__(PooledGPUModelRunner)
    runner.device = torch.device("cpu")
    runner._offset_per_token = per_token
    runner.model_config = SimpleNamespace(get_vocab_size=lambda: 1000)
    return runner


def test_a_request_s_generator_is_as_after_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Generator", lambda device: FakeGenerator())
    generator = runner_without_a_model(8)._generator_after(SimpleNamespace(seed=42), 5)
    assert (generator.seed, generator.offset) == (42, 40)


@pytest.mark.parametrize("per_token", [4, 8])
def test_a_discarded_token_leaves_the_generator_as_it_was(per_token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def stock(self: Any) -> None:
        for index in np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]:
            generator = self.input_batch.generators.get(int(index))
            if generator is not None:
                generator.set_offset(generator.get_offset() - 4)

    monkeypatch.setattr(GPUModelRunner, "_bookkeeping_sync", stock)
    runner = runner_without_a_model(per_token)
    # Each has drawn once more in this step; the first two were prompt chunks.
    generators = {0: FakeGenerator(3 * per_token), 2: FakeGenerator(7 * per_token)}
    runner.input_batch = SimpleNamespace(num_reqs=3, generators=generators)
    runner.discard_request_mask = SimpleNamespace(np=np.array([True, True, False]))
    runner._bookkeeping_sync()
    assert generators[0].offset == 2 * per_token
    assert generators[2].offset == 7 * per_token
