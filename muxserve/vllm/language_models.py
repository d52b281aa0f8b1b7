"""Lets vLLM serve the language model of a multi-modal checkpoint as the text model that it is by itself.

vLLM's own classes of such checkpoints import the image processors, which need torchvision, also where no image may
come; and they would load and count what computes images.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from muxserve.costs.language_models import LANGUAGE_MODELS, TENSORS, language_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PREFIX = "TextOnly"


class TextOnly:
    """`hf_overrides` of vLLM for a multi-modal checkpoint: its configuration becomes that of its language model, whose
    class is one that loads nothing else.

    Args:
        overrides: the model's own `hf_overrides`, which are for the language model.
    """

    def __init__(self, overrides: Mapping[str, object]) -> None:
        self._overrides = dict(overrides)

    def __call__(self, config: PretrainedConfig) -> PretrainedConfig:
        """The language model's configuration; `config` itself where it is not a multi-modal checkpoint's, as the empty
        one that vLLM asks with first."""
        found = language_model(config.to_dict())
        if found is None:
            return config
        from transformers import AutoConfig

        register(config.model_type)
        known = LANGUAGE_MODELS[config.model_type]
        values = {**found, **self._overrides, "architectures": [_PREFIX + known.architecture]}
        return AutoConfig.for_model(**values)


def register(model_type: object) -> bool:
    """Whether checkpoints of `model_type` are multi-modal ones whose text is served; then vLLM knows the class of their
    language model, and has looked at it here."""
    if model_type not in LANGUAGE_MODELS:
        return False
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.model_executor.models.utils import WeightsMapper

    architecture = LANGUAGE_MODELS[str(model_type)].architecture
    name = _PREFIX + architecture
    if name in ModelRegistry.models:
        return True
    make_importable()
    by_itself: Any = ModelRegistry.models[architecture].load_model_cls()
    mapper = WeightsMapper(orig_to_new_prefix=TENSORS)

    def load_weights(self: Any, weights: Iterable[tuple[str, Any]]) -> set[str]:
        return by_itself.load_weights(self, mapper.apply(weights))

    # The mapper also renames what adapters and configurations of quantised weights call the parts.
    of_itself = getattr(by_itself, "hf_to_vllm_mapper", WeightsMapper())
    own = {"load_weights": load_weights, "hf_to_vllm_mapper": mapper | of_itself}
    ModelRegistry.register_model(name, type(name, (by_itself,), own))
    if architecture in MODELS_CONFIG_MAP:
        MODELS_CONFIG_MAP[name] = MODELS_CONFIG_MAP[architecture]
    return True


def register_classes(config: Mapping[str, Any]) -> None:
    """Let vLLM look in this process at the classes that a config.json names; by itself it starts another one.

    Raises:
        Exception: whatever their modules do when they are imported.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.registry import _LazyRegisteredModel, _RegisteredModel

    for architecture in config["architectures"]:
        known = ModelRegistry.models.get(architecture)
        if isinstance(known, _LazyRegisteredModel):
            ModelRegistry.models[architecture] = _RegisteredModel.from_model_cls(known.load_model_cls())


def make_importable() -> None:
    """From here on vLLM's modules of Qwen's models can be imported without torchvision.

    They import a function that computes sizes of images from a module of Transformers, which begins with importing
    torchvision. What text needs uses neither, and torchvision has no build that fits a CPU torch.
    """
    from transformers.utils.import_utils import is_torchvision_available

    if is_torchvision_available():  # which Transformers remembers, so that it never takes the stand-in for it
        return
    parts = (
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    )
    modules = {name: ModuleType(name) for name in parts}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    sys.modules.update(modules)
    try:
        # Transformers keeps it; nothing else shall find the stand-in.
        importlib.import_module("transformers.models.qwen2_vl.image_processing_qwen2_vl")
    finally:
        for name in parts:
            del sys.modules[name]
