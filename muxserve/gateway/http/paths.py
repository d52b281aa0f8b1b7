"""The paths for POST that models serve. They are vLLM's own; a model has those of its task."""

from __future__ import annotations

# Served under the model's limits.
GENERATE = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages"}
)
# Answered with vectors, also under the model's limits: an embedding model has `/v1/embeddings`, a classifier
# `/classify`, and what can compare two texts has the routes for scores and rankings.
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
# Served at once: they need no engine.
COMPUTE = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        "/v1/completions/render",
        "/v1/chat/completions/render",
    }
)
POSTS = GENERATE | POOLING | COMPUTE
