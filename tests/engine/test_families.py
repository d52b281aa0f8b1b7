"""One model of each of today's families on one pool, and the texts of multi-modal ones: real engines; the test plays
unit scheduler and gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.engine.cases import CASES, GROWN, NOISE
from tests.engine.checks import same_as_stock
from tests.engine.harness import (
    FAMILIES,
    MULTI_MODAL,
    MXFP4,
    STATEFUL,
    Engines,
    deployed_model,
    engines,
    on_this_processor,
)
from tests.support.tiny_checkpoint import LANGUAGE_MODEL_OF

# But the one whose language model keeps states, which is served beside others of these.
TEXTS = {kind: make for kind, make in MULTI_MODAL.items() if LANGUAGE_MODEL_OF[kind] not in STATEFUL}
ASKED = {case: CASES[case] for case in NOISE if case not in GROWN}
SERVED = [
    pytest.param("qwen2", marks=pytest.mark.serves("Qwen2", "served", "prefix cache")),
    pytest.param("qwen3_moe", marks=pytest.mark.serves("Qwen3Moe", "served", "prefix cache")),
    pytest.param("granite", marks=pytest.mark.serves("Granite", "served", "prefix cache")),
    pytest.param("phi3", marks=pytest.mark.serves("Phi3", "served", "prefix cache")),
    pytest.param("nemotron", marks=pytest.mark.serves("Nemotron", "served", "prefix cache")),
    pytest.param("olmo3", marks=pytest.mark.serves("Olmo3", "served", "prefix cache")),
    pytest.param("glm4_moe", marks=pytest.mark.serves("Glm4Moe", "served", "prefix cache")),
    pytest.param("gemma3-mm", marks=pytest.mark.serves("Gemma3 (text of multi-modal)", "served", "prefix cache")),
    pytest.param("mistral3", marks=pytest.mark.serves("Mistral3 (text of multi-modal)", "served", "prefix cache")),
    pytest.param("qwen2_5_vl", marks=pytest.mark.serves("Qwen2_5_VL (text of multi-modal)", "served", "prefix cache")),
    pytest.param("qwen3_vl", marks=pytest.mark.serves("Qwen3VL (text of multi-modal)", "served", "prefix cache")),
]


@pytest.fixture(scope="module")
def families() -> Iterator[Engines]:
    # Chunks of 128 tokens, so that the long prompts take several steps.
    made = {kind: make() for kind, make in (FAMILIES | TEXTS).items() if kind != MXFP4}
    models = [deployed_model(kind, path, max_num_batched_tokens=128, quota_pages=600) for kind, path in made.items()]
    with engines(models) as running:
        yield running


@pytest.mark.parametrize("kind", [kind for kind in SERVED if kind.values[0] in FAMILIES | TEXTS])
def test_tokens_are_those_of_stock_vllm(families: Engines, stock_families: dict[str, Any], kind: str) -> None:
    """A multi-modal model has the tokens of its language model alone, which is all that stock vLLM can load without
    torchvision."""
    same_as_stock(families, kind, stock_families[LANGUAGE_MODEL_OF.get(kind, kind)], ASKED)


@pytest.mark.serves("GptOss", "served", "quantised", "prefix cache")
def test_experts_in_mxfp4(stock_families: dict[str, Any]) -> None:
    if MXFP4 not in on_this_processor():
        pytest.skip("vLLM's experts in MXFP4 on CPU need AMX")
    with engines([deployed_model(MXFP4, FAMILIES[MXFP4](), max_num_batched_tokens=128)]) as running:
        same_as_stock(running, MXFP4, stock_families[MXFP4], ASKED)


@pytest.mark.parametrize("kind", TEXTS)
def test_text_is_what_transformers_makes_of_the_whole(stock_families: dict[str, Any], kind: str) -> None:
    model = AutoModelForImageTextToText.from_pretrained(TEXTS[kind]())
    model.generation_config.eos_token_id = None
    asked = stock_families[LANGUAGE_MODEL_OF[kind]]["greedy"]
    prompt = torch.tensor([asked["prompt"]])
    with torch.inference_mode():
        made = model.generate(prompt, max_new_tokens=24, do_sample=False)
    assert made[0, prompt.shape[1] :].tolist() == asked["tokens"][:24]
