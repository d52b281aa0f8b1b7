"""What a fleet file asks for, and what its models are.

- `demands`: the demand of each model, and the cluster
- `checkpoints`, `hub_reach`: a model's architecture, from a checkpoint or the hub
- `known_models`: architectures by the names that people know
- `private`: which models have a KV cache of vLLM's own
"""
