"""What simulated engines of pooling models answer: made-up vectors of the shape that vLLM's pooler gives them.

The numbers follow from the tokens of the prompt alone. What vLLM makes of them at the end is vLLM's own: normalisation,
and the classifier's activation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.pooler.activations import PoolerNormalize, resolve_classifier_act_fn
from vllm.pooling_params import PoolingParams
from vllm.tasks import SupportedTask

from muxserve.vllm.tasks import tasks_of

# Labels of reward models, whatever their config.json says.
_LABELS = {"InternLM2ForRewardModel": 1, "Qwen2ForRewardModel": 1, "Qwen2ForProcessRewardModel": 2}
# A weight for each word of the vocabulary instead of an embedding.
_SPARSE = "BertSpladeSparseEmbeddingModel"
# What vLLM pools with them, other than their names promise; engines refuse to serve them.
_OWN_TASKS: dict[str, tuple[SupportedTask, ...]] = {
    "BertForMaskedLM": ("token_classify",),
    **dict.fromkeys(
        ("HF_ColBERT", "ColBERTModernBertModel", "ColBERTJinaRobertaModel", "ColBERTLfm2Model", "JinaForRanking"),
        ("token_embed",),
    ),
}


class MadeUpVectors:
    """Answers for a model with this configuration."""

    def __init__(self, config: ModelConfig) -> None:
        self.tasks = _OWN_TASKS.get(config.architecture, tasks_of(config))
        self._normalise = PoolerNormalize()
        pooler = config.pooler_config
        assert pooler is not None, "it answers with vectors"
        self._mean, self._sigma = pooler.logit_mean or 0.0, pooler.logit_sigma or 1.0
        self._of_steps = pooler.tok_pooling_type == "STEP"
        self._sparse = config.architecture == _SPARSE
        self._vocabulary: int = config.get_vocab_size()
        self._embedding: int = config.embedding_size
        if "token_classify" in self.tasks:
            self._labels: int = _LABELS.get(config.architecture) or config.hf_config.num_labels
            self._activate = resolve_classifier_act_fn(config, static_num_labels=False)

    def answer(self, params: PoolingParams, prompt: Sequence[int]) -> torch.Tensor:
        """What is pooled of a prompt of these tokens: `[width]`, or `[tokens, width]` where `params` asks for something
        of each token. In float32."""
        task = params.task
        assert task in self.tasks, f"vLLM has been told of {self.tasks}"
        of_tokens = task.startswith("token_")
        rows = len(prompt) if of_tokens else 1
        if task.endswith("embed"):
            sparse = self._sparse and not of_tokens
            found = _numbers(prompt, rows, self._vocabulary if sparse else self._embedding)
            found = torch.log1p(torch.relu(found)) if sparse else self._embeddings(params, found)
        else:
            found = (_numbers(prompt, rows, self._labels) - self._mean) / self._sigma
            if of_tokens and self._of_steps:
                found = _of_steps(params, prompt, found)
            found = self._activate(found) if params.use_activation else found
        return found if of_tokens else found[0]

    def _embeddings(self, params: PoolingParams, found: torch.Tensor) -> torch.Tensor:
        found = found[:, : params.dimensions]
        return self._normalise(found) if params.use_activation else found


def _of_steps(params: PoolingParams, prompt: Sequence[int], found: torch.Tensor) -> torch.Tensor:
    """What a model that rewards steps answers: rows of tokens that end a step, columns that are asked for."""
    if params.returned_token_ids:
        found = found[:, params.returned_token_ids]
    if params.step_tag_id is not None:
        found = found[[place for place, token in enumerate(prompt) if token == params.step_tag_id]]
    return found


def _numbers(prompt: Sequence[int], rows: int, width: int) -> torch.Tensor:
    """`[rows, width]` numbers about zero, each row another one, that follow from the prompt's tokens."""
    digest = hashlib.blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=8).digest()
    drawn = np.random.default_rng(int.from_bytes(digest, "little")).standard_normal(rows + width - 1, dtype=np.float32)
    # A row is the one before, shifted by one number: drawing all of them would take longer than many a step.
    return torch.from_numpy(np.lib.stride_tricks.sliding_window_view(drawn, width).copy())
