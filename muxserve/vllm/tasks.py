"""What vLLM can be asked for with a model: text, or one of the things that are pooled from what it computes."""

from __future__ import annotations

from vllm.config import ModelConfig
from vllm.config.model import try_match_architecture_defaults
from vllm.tasks import SupportedTask

# As vLLM's poolers have them: what a whole prompt comes to, and each of its tokens.
_EMBED: tuple[SupportedTask, ...] = ("embed", "token_embed")
_CLASSIFY: tuple[SupportedTask, ...] = ("classify", "token_classify")
_CLASSIFY_TOKENS: tuple[SupportedTask, ...] = ("token_classify",)


def tasks_of(config: ModelConfig) -> tuple[SupportedTask, ...]:
    """What a model with that configuration is offered for.

    vLLM asks the loaded model's pooler, which a front end does not have. So this follows what vLLM makes of a model
    that has none of its own (`convert_type`), and the names of those that have; an engine compares it with the pooler.
    """
    if config.runner_type != "pooling":
        return ("generate",)
    name = config.architecture
    if config.convert_type == "none":
        if "ForTokenClassification" in name or name.endswith("RewardModel"):
            return _CLASSIFY_TOKENS
        found = try_match_architecture_defaults(name, runner_type="pooling")
        return _CLASSIFY if found is not None and found[1][1] == "classify" else _EMBED
    return _CLASSIFY if config.convert_type == "classify" else _EMBED
