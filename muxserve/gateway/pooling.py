"""The routes of models that answer with vectors: embeddings, classes, scores, rankings.

They are vLLM's own. A model has those of its task: an embedding model has `/v1/embeddings`, a classifier `/classify`,
and what can compare two texts has the routes for scores and rankings.
"""

from __future__ import annotations

# Served under the model's limits, as generation is.
POOLING = frozenset(
    {
        "/v1/embeddings",
        "/v2/embed",
        "/classify",
        "/pooling",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
    }
)
