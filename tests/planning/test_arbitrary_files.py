"""Whatever stands in a fleet file or a config.json, it is served or refused in words: no other exception."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.config import FleetError, parse_fleet
from muxserve.config.checkpoint_files import CheckpointError, check_directory, tensors_of
from muxserve.config.loader import fleet_schema
from muxserve.planning.demand.demands import demands_of
from tests.support.checkpoint_files import write_checkpoint, write_safetensors
from tests.support.thoroughness import examples

HUGE = [
    10**9,
    10**30,
    10**400,
    -(10**400),
    2**63,
    -1,
    0,
    1,
    1e308,
    float("inf"),
    float("nan"),
    True,
    None,
    "",
    "x" * 500,
]
LEAVES = st.one_of(st.integers(1, 64), st.sampled_from(HUGE), st.integers(), st.floats(), st.text(max_size=5))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
READ = [
    *QWEN, "intermediate_size", "sliding_window", "layer_types", "rope_scaling", "rope_parameters", "text_config",
    "quantization_config", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_experts",
    "num_experts_per_tok", "linear_num_key_heads", "mamba_d_state", "hybrid_override_pattern", "tie_word_embeddings",
    "block_configs", "attn_type_list", "max_window_layers", "original_max_position_embeddings", "n_shared_experts",
]  # fmt: skip
TYPES = [
    "qwen3",
    "deepseek_v2",
    "qwen3_next",
    "nemotron_h",
    "granitemoehybrid",
    "gemma3",
    "idefics3",
    "gpt_oss",
    "bert",
]


@settings(max_examples=examples(500))
@given(
    st.dictionaries(st.sampled_from(READ), VALUES, max_size=4),
    st.sampled_from(TYPES),
    st.dictionaries(st.sampled_from(["factor", "rope_type", "type", "original_max_position_embeddings"]), VALUES),
)
def test_any_config(tmp_path_factory: Any, changes: dict[str, Any], kind: str, rope: dict[str, Any]) -> None:
    directory = tmp_path_factory.getbasetemp() / "any-config"
    write_checkpoint(directory, {**QWEN, "model_type": kind, "rope_scaling": rope or None, **changes})
    with contextlib.suppress(FleetError):
        fleet = parse_fleet(f"models: [{{name: a, path: {directory}}}]", "fleet.yaml", Path("/"), {})
        (demand,) = demands_of(fleet, Path("/"))
        assert demand.architecture.weight_bytes(demand.dtype) >= 0
        assert demand.architecture.kv_bytes_per_token(demand.dtype) >= 0


def keys_of(schema: dict[str, Any], prefix: tuple[str, ...], definitions: dict[str, Any]) -> list[tuple[str, ...]]:
    """All keys of a fleet file."""
    found = []
    for name, of in schema.get("properties", {}).items():
        found.append((*prefix, name))
        references = [each["$ref"] for each in (of, *of.get("anyOf", ()), of.get("items", {})) if "$ref" in each]
        for reference in references:
            inner = definitions[reference.rpartition("/")[2]]
            found += keys_of(inner, (*prefix, name, *(("0",) if "items" in of else ())), definitions)
    return found


SCHEMA = fleet_schema()
KEYS = keys_of(SCHEMA, (), SCHEMA["$defs"])


@settings(max_examples=examples(1000))
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4), st.booleans())
def test_any_fleet_file(changes: dict[tuple[str, ...], Any], serving: bool) -> None:
    data: dict[str, Any] = {"models": [{"name": "a", "hub": "org/a"}]}
    for path, value in changes.items():
        at: Any = data
        for part in path[:-1]:
            if isinstance(at, list):
                at = at[0] if at else {}
            elif isinstance(at, dict):
                at = at.setdefault(part, {})
        if isinstance(at, dict):
            at[path[-1]] = value
    try:
        text = json.dumps(data)
    except ValueError:  # no JSON of numbers of so many digits
        return
    with contextlib.suppress(FleetError):
        parse_fleet(text, "fleet.yaml", Path("/"), {}, serving=serving)


@settings(max_examples=examples(500))
@given(st.binary(max_size=60), st.integers(0, 200), st.integers(0, 300))
def test_any_bytes_in_weights(tmp_path_factory: Any, noise: bytes, where: int, length: int) -> None:
    directory = write_checkpoint(tmp_path_factory.getbasetemp() / "any-bytes")
    file = directory / "model.safetensors"
    write_safetensors(file, {"a": ("F32", [4, 4], 64), "b": ("BF16", [2], 4)})
    data = bytearray(file.read_bytes())
    data[where : where + len(noise)] = noise
    file.write_bytes(bytes(data[:length]))
    for look in (lambda: tensors_of(file), lambda: check_directory(directory, {})):
        with contextlib.suppress(CheckpointError):
            look()
