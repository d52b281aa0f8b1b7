"""Experts that config.json divides into no groups: for vLLM's router on CPUs they have to be one group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Groups that there are, and groups that a token may choose among. Transformers writes null for a model without groups,
# and vLLM's models hand that on to a router that wants numbers. The best experts of the best of one group are the best.
_KEYS = ("n_group", "topk_group")


class OneGroup:
    """`hf_overrides` of vLLM for a mixture of experts whose groups are null.

    Args:
        overrides: the model's own `hf_overrides`.
    """

    def __init__(self, overrides: Mapping[str, object]) -> None:
        self._overrides = dict(overrides)

    def __call__(self, config: PretrainedConfig) -> PretrainedConfig:
        """`config` with numbers of groups."""
        config.update(self._overrides)
        config.update({key: 1 for key in _KEYS if getattr(config, key, 1) is None})
        return config
