"""The language model inside a multi-modal checkpoint, which is what is served of it: its configuration and its weights.

Images, audio and video are refused, so what computes them is neither loaded nor counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LanguageModel:
    """The architecture and the `model_type` that the language model has by itself, and what Transformers takes for the
    fields that a config.json may leave out."""

    architecture: str
    model_type: str
    defaults: Mapping[str, object] = field(default_factory=dict)


# By the `model_type` of the whole.
LANGUAGE_MODELS = {
    "gemma3": LanguageModel(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "mistral3": LanguageModel("MistralForCausalLM", "mistral"),
    "qwen2_5_vl": LanguageModel("Qwen2ForCausalLM", "qwen2"),
    "qwen3_vl": LanguageModel("Qwen3ForCausalLM", "qwen3"),
}
# What the tensors of the language model are called by itself, by how their names begin; None: it is not of it.
TENSORS: dict[str, str | None] = {
    "model.vision_tower.": None,
    "vision_tower.": None,
    "model.multi_modal_projector.": None,
    "multi_modal_projector.": None,
    "model.visual.": None,
    "visual.": None,
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# Of the whole, where the language model does not say it itself.
_SHARED = ("dtype", "torch_dtype", "quantization_config", "compression_config")
# Positions of images: for text, all of their parts are the same, as in a language model without them.
_IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")


def language_model(config: Mapping[str, object]) -> dict[str, object] | None:
    """The configuration of the language model of a multi-modal checkpoint with the configuration `config`; None if the
    checkpoint is of another kind, or of none that is known."""
    known = LANGUAGE_MODELS.get(str(config.get("model_type")))
    if known is None:
        return None
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):  # older ones have the fields of both beside each other
        inner = {key: value for key, value in config.items() if not key.startswith("vision_")}
    text = {**known.defaults, **inner}
    text |= {key: config[key] for key in _SHARED if key in config and text.get(key) is None}
    for key in ("rope_scaling", "rope_parameters"):
        rope = text.get(key)
        if isinstance(rope, Mapping):
            plain = {name: value for name, value in rope.items() if name not in _IMAGE_POSITIONS}
            text[key] = {name: "default" if value == "mrope" else value for name, value in plain.items()}
    return {**text, "architectures": [known.architecture], "model_type": known.model_type}


def is_of_language_model(tensor: str) -> bool:
    """Whether the tensor of that name in a multi-modal checkpoint belongs to its language model."""
    return next((new for prefix, new in TENSORS.items() if tensor.startswith(prefix)), tensor) is not None
