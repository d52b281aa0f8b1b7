"""Made-up vectors: shaped and scaled like those that vLLM pools, and the same for the same prompt."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ModelConfig
from vllm.pooling_params import PoolingParams

from muxserve.engine.simulated_vectors import MadeUpVectors
from tests.support.tiny_checkpoint import Kind, tiny_checkpoint

HEADS, HEAD_DIM = 4, 64
HIDDEN = HEADS * HEAD_DIM
PROMPT = [*range(20, 60)]


@cache
def vectors(kind: Kind) -> tuple[ModelConfig, MadeUpVectors]:
    config = ModelConfig(str(tiny_checkpoint(kind)), runner="pooling", dtype="float32", enforce_eager=True)
    return config, MadeUpVectors(config)


def asked(kind: Kind, task: Any, prompt: list[int] = PROMPT, **more: Any) -> torch.Tensor:
    config, made = vectors(kind)
    params = PoolingParams(task=task, **more)
    params.verify(config)
    return made.answer(params, prompt)


@pytest.mark.parametrize("kind", ["qwen3", "bert"])
def test_embeddings_are_normalised_and_follow_from_the_prompt(kind: Kind) -> None:
    one = asked(kind, "embed")
    assert (one.shape, one.dtype) == ((HIDDEN,), torch.float32)
    assert one.norm() == pytest.approx(1.0, abs=1e-5)
    assert torch.equal(one, asked(kind, "embed"))
    assert not torch.equal(one, asked(kind, "embed", [*PROMPT, 1]))
    assert asked(kind, "embed", use_activation=False).norm() > 2.0
    of_tokens = asked(kind, "token_embed")
    assert of_tokens.shape == (len(PROMPT), HIDDEN)
    assert torch.allclose(of_tokens.norm(dim=1), torch.ones(len(PROMPT)), atol=1e-5)
    assert len({float(row[0]) for row in of_tokens}) == len(PROMPT)


def test_shorter_embeddings_are_normalised_too() -> None:
    _, made = vectors("qwen3")
    short = made.answer(PoolingParams(task="embed", dimensions=16, use_activation=True), PROMPT)
    assert short.shape == (16,)
    assert short.norm() == pytest.approx(1.0, abs=1e-5)


def test_classes_are_probabilities_unless_logits_are_asked_for() -> None:
    classes = asked("qwen3-classifier", "classify")
    assert classes.shape == (3,)
    assert float(classes.sum()) == pytest.approx(1.0, abs=1e-5)
    logits = asked("qwen3-classifier", "classify", use_activation=False)
    assert torch.allclose(torch.softmax(logits, dim=-1), classes)
    of_tokens = asked("qwen3-classifier", "token_classify")
    assert of_tokens.shape == (len(PROMPT), 3)


def test_a_reranker_has_one_score() -> None:
    score, logit = asked("bert-reranker", "classify"), asked("bert-reranker", "classify", use_activation=False)
    assert score.shape == (1,)
    assert torch.allclose(torch.sigmoid(logit), score)


def config_of(architecture: str, **more: Any) -> Any:
    """What is asked of the configuration of a model whose checkpoint would not be tiny."""
    return SimpleNamespace(
        runner_type="pooling",
        convert_type="none",
        architecture=architecture,
        hf_config=SimpleNamespace(num_labels=2, problem_type=""),
        pooler_config=SimpleNamespace(tok_pooling_type="ALL", logit_mean=None, logit_sigma=None, **more),
        embedding_size=HIDDEN,
        get_vocab_size=lambda: 1000,
    )


def test_rewards_of_steps() -> None:
    config = config_of("Qwen2ForProcessRewardModel")
    config.pooler_config.tok_pooling_type = "STEP"
    made = MadeUpVectors(config)
    assert made.tasks == ("token_classify",)
    params = PoolingParams(task="token_classify", use_activation=True, step_tag_id=7)
    assert made.answer(params, [1, 7, 2, 7]).shape == (2, 2)
    params.returned_token_ids = [1]
    assert made.answer(params, [1, 7, 2, 7]).shape == (2, 1)
    one = MadeUpVectors(config_of("Qwen2ForRewardModel"))
    assert one.answer(PoolingParams(task="token_classify", use_activation=True), PROMPT).shape == (len(PROMPT), 1)


def test_scores_are_calibrated() -> None:
    config = config_of("BertForSequenceClassification")
    plain = MadeUpVectors(config)
    config.pooler_config.logit_mean, config.pooler_config.logit_sigma = 1.0, 2.0
    params = PoolingParams(task="classify", use_activation=False)
    assert torch.allclose(MadeUpVectors(config).answer(params, PROMPT), (plain.answer(params, PROMPT) - 1.0) / 2.0)


def test_a_weight_for_each_word() -> None:
    made = MadeUpVectors(config_of("BertSpladeSparseEmbeddingModel"))
    sparse = made.answer(PoolingParams(task="embed", use_activation=True), PROMPT)
    assert sparse.shape == (1000,)
    assert float(sparse.min()) == 0.0


def test_what_vllm_would_not_pool_is_not_offered() -> None:
    """The engine refuses the model, as one that computes would."""
    assert MadeUpVectors(config_of("HF_ColBERT")).tasks == ("token_embed",)
