"""The language model inside a multi-modal checkpoint: its configuration and its weights.

On the shared pool some are served as text only (`LANGUAGE_MODELS`): what computes images is neither loaded nor
counted. Others see images there (`SEEING`): all of them is loaded, and requests hold their pages for the language
model's tokens. With a cache of its own any of them may be served whole.
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


_QWEN3_5: dict[str, object] = {
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_num_key_heads": 16,
}
_QWEN3_5_DENSE = LanguageModel(
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    {
        **_QWEN3_5,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
)
_QWEN3_5_MOE = LanguageModel(
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    {
        **_QWEN3_5,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
)
# By the `model_type` of the whole. Qwen3.5 is here by its text's own types, too: vLLM's module has it beside the whole.
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
    "llama4": LanguageModel("Llama4ForCausalLM", "llama4_text"),
    "mistral3": LanguageModel("MistralForCausalLM", "mistral"),
    "qwen2_5_vl": LanguageModel("Qwen2ForCausalLM", "qwen2"),
    "qwen3_vl": LanguageModel("Qwen3ForCausalLM", "qwen3"),
    "qwen3_5": _QWEN3_5_DENSE,
    "qwen3_5_text": _QWEN3_5_DENSE,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
}
# Those that are served with images.
SEEING = {
    "idefics3": LanguageModel(
        "LlamaForCausalLM",
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
        },
    ),
}
# What the tensors of the language model are called by itself, by how their names begin; None: it is not of it.
TENSORS: dict[str, str | None] = {
    "model.vision_tower.": None,
    "vision_tower.": None,
    "vision_model.": None,
    "model.multi_modal_projector.": None,
    "multi_modal_projector.": None,
    "model.visual.": None,
    "visual.": None,
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    # Layers that propose several tokens.
    "mtp.": None,
}
# Keys of the whole model, where the language model does not have them itself.
_SHARED = ("dtype", "torch_dtype", "quantization_config", "compression_config")
# Where a multi-modal config.json has its language model.
_ENCODERS = ("vision_config", "audio_config", "vit_config", "audio_encoder_config")
_TEXTS = ("text_config", "llm_config", "language_config", "thinker_config")
# Positions of images: for text, all of their parts are the same, as in a language model without them.
_IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")


def language_model(config: Mapping[str, object]) -> dict[str, object] | None:
    """The configuration of the language model of a multi-modal checkpoint with the configuration `config`; None if the
    checkpoint is of another kind, or of none that is known."""
    known = LANGUAGE_MODELS.get(str(config.get("model_type")))
    return None if known is None else _inner(config, known)


def seeing(config: Mapping[str, object]) -> dict[str, object] | None:
    """The configuration of the language model, under the name of the whole, of a checkpoint with the configuration
    `config` that is served with images; None if it is of another kind."""
    known = SEEING.get(str(config.get("model_type")))
    if known is None:
        return None
    tied = {"tie_word_embeddings": config["tie_word_embeddings"]} if "tie_word_embeddings" in config else {}
    named = {"architectures": config["architectures"]} if "architectures" in config else {}
    return {**_inner(config, known), **tied, **named}


def has_encoder(config: Mapping[str, object]) -> bool:
    """Whether a checkpoint with the configuration `config` has more than a language model."""
    return any(isinstance(config.get(key), Mapping) for key in _ENCODERS)


def text_inside(config: Mapping[str, object]) -> dict[str, object] | None:
    """The configuration of the language model of any other multi-modal checkpoint, by the name of the whole; None if
    `config` is of none, or of an encoder-decoder."""
    inner = next((each for key in _TEXTS if isinstance(each := config.get(key), Mapping) and each), None)
    if inner is None and has_encoder(config):
        # Older ones have the fields of both beside each other.
        inner = {key: value for key, value in config.items() if key not in _ENCODERS}
    if inner is None or config.get("is_encoder_decoder"):
        return None
    shared = {key: config[key] for key in (*_SHARED, "tie_word_embeddings") if key in config and key not in inner}
    named = {"architectures": config["architectures"]} if "architectures" in config else {}
    return {**inner, **shared, **named}


def _inner(config: Mapping[str, object], known: LanguageModel) -> dict[str, object]:
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
