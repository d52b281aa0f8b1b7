"""What stock vLLM pools of the texts of `test_pooling`: `python -m tests.e2e.pooling_reference OUT_DIR MODEL...`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.engine.stock import write_each
from tests.support.tiny_checkpoint import Kind, tiny_checkpoint

# By name in the fleet. The first three keep KV while they compute, the others do not.
KINDS: dict[str, Kind] = {
    "embedder": "qwen3",
    "tokens": "qwen3",
    "judge": "qwen3-classifier",
    "encoder": "bert",
    "reranker": "bert-reranker",
}
# These would generate text if they were not asked for something else.
OPTIONS: dict[str, dict[str, Any]] = {
    "embedder": {"runner": "pooling"},
    "tokens": {"runner": "pooling", "pooler_config": {"task": "token_embed"}},
}
# Short, of several blocks, and longer than a step where prompts are computed in chunks.
TEXTS = ["a", "The cat sat on the mat.", "Where does the river end? " * 8, "all work and no play " * 15]
QUERY = "Where does the river end?"
DOCUMENTS = ["In the sea.", "It ends in the sea, as rivers do.", "Nobody knows."]
CHUNK, MAX_LEN = 128, 512


def checkpoint(model: str) -> Path:
    """Where the model of that name is."""
    return tiny_checkpoint(KINDS[model])


def answers(path: Path) -> dict[str, Any]:
    """Each text by itself, as nothing but its own tokens decides what comes of it. `path` is a model's name."""
    from vllm import LLM

    model = path.name
    llm = LLM(
        str(checkpoint(model)),
        **{"runner": "pooling", **OPTIONS.get(model, {})},
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=MAX_LEN,
        kv_cache_memory_bytes=64 << 20,
    )
    task = llm.pooling_task
    pooled = [llm.encode([text], pooling_task=task, use_tqdm=False)[0].outputs.data.tolist() for text in TEXTS]
    if model == "judge":  # it has no one score
        return {"data": pooled}
    scores = [llm.score([QUERY], [each], use_tqdm=False)[0].outputs.score for each in DOCUMENTS]
    return {"data": pooled, "score": scores}


if __name__ == "__main__":
    write_each(answers, Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]])
