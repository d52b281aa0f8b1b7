"""Weights with 8 and with 4 bits, and a KV cache in FP8: the tokens are those of stock vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cases import questions
from tests.engine.checks import same_as_stock
from tests.engine.conftest import SPLIT, read
from tests.engine.harness import AVX512, INT4, MODELS, QUANTISED, Engines, deployed_model, engines
from tests.support.thoroughness import cases

# When thorough one of them compiled, too: that takes half a minute of a core.
COMPILED = "atlas-int8-compiled"
CHANGES: dict[str, dict[str, Any]] = {
    **{name: {} for name in QUANTISED},
    COMPILED: {"engine_args": {"enforce_eager": False}},
}
SERVED = cases(CHANGES, QUANTISED)


def checkpoint(model: str) -> str:
    return model.removesuffix("-compiled")


@pytest.fixture(scope="module")
def weights() -> Iterator[Engines]:
    # Chunks of 128 tokens, so that the long prompts take several steps.
    models = [
        deployed_model(model, QUANTISED[checkpoint(model)], max_num_batched_tokens=128, **changes)
        for model, changes in CHANGES.items()
        if model in SERVED and (AVX512 or model != INT4)
    ]
    with engines(models) as running:
        yield running


@pytest.mark.thorough
@pytest.mark.serves("Llama", "quantised")
@pytest.mark.parametrize("model", SERVED)
def test_quantised_weights(weights: Engines, quantised: Path, model: str) -> None:
    if model == INT4 and not AVX512:
        pytest.skip("vLLM's kernels for int4 on CPU need AVX-512")
    same_as_stock(weights, model, read(quantised, checkpoint(model)), questions(model.partition("-")[0]))


@pytest.mark.thorough
@pytest.mark.serves("Llama", "FP8 KV cache")
@pytest.mark.skipif(not AVX512, reason="vLLM's FP8 cache on CPU needs AVX-512")
def test_a_cache_in_fp8(quantised: Path) -> None:
    changes: dict[str, Any] = {"max_num_batched_tokens": 128, "engine_args": {"kv_cache_dtype": "fp8"}}
    with engines([deployed_model(SPLIT, MODELS[SPLIT], **changes)]) as running:
        page = running.unit_spec.pools[0].page_bytes
        assert page == 2 * 64 * 64  # a quarter of float32
        same_as_stock(running, SPLIT, read(quantised, f"{SPLIT}-fp8"), questions(SPLIT))
