"""What the installed vLLM and Transformers know, read from their sources: importing them takes seconds.

Each is empty where it cannot be read, as where vLLM is not installed; then nothing is refused for it.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from muxserve.vllm.syntax import parse

# Where vLLM declares its options: of engines, and of the OpenAI server.
_OPTIONS = {
    "engine/arg_utils.py": ("EngineArgs", "AsyncEngineArgs"),
    "entrypoints/launchers/cli_args.py": ("BaseFrontendArgs", "FrontendArgs"),  # before 0.33.0
    "entrypoints/common/cli_args.py": ("BaseFrontendArgs", "FrontendArgs"),
}
_REGISTRY = "model_executor/models/registry.py"
_CONFIGS = "transformers_utils/config.py"
_QUANTISATIONS = "model_executor/layers/quantization/__init__.py"
_ROPES = "model_executor/layers/rotary_embedding/__init__.py"
_HF_MODEL_TYPES = ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")
_HF_ARCHITECTURES = "models/auto/modeling_auto.py"
# As checkpoints call what vLLM knows by another name.
_OTHER_QUANTISATIONS = {"auto-round", "auto_round", "intel/auto-round"}
_OTHER_ROPES = {"mrope", "su"}
# Entry points by which other packages add architectures to vLLM. These of its own do not.
_PLUGINS, _OWN_PLUGINS = "vllm.general_plugins", "vllm."


def _tree(package: str, name: str) -> ast.Module | None:
    try:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            return None
        return parse(Path(spec.submodule_search_locations[0]) / name)
    except (OSError, SyntaxError, ImportError, ValueError):
        return None


def _assigned(tree: ast.Module | None, suffix: str) -> Iterator[ast.expr]:
    """What names with that end are given at the top of a module."""
    for node in tree.body if tree is not None else ():
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id.endswith(suffix) and isinstance(value, ast.expr):
            yield value


def _texts(nodes: Iterable[ast.AST]) -> set[str]:
    return {
        node.value
        for tree in nodes
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def _keys(value: ast.expr) -> Iterator[str]:
    """The keys of a dictionary that is written as `{...}`, or as `f(name=..., **{...})`."""
    if isinstance(value, ast.Dict):
        yield from (key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
    elif isinstance(value, ast.Call):
        for keyword in value.keywords:
            yield from [keyword.arg] if keyword.arg is not None else _keys(keyword.value)


@functools.cache
def options() -> frozenset[str]:
    """Names of vLLM's options, of the engine and of the OpenAI server."""
    trees = [tree for name in _OPTIONS if (tree := _tree("vllm", name)) is not None]
    classes = {name for names in _OPTIONS.values() for name in names}
    return frozenset(
        statement.target.id
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and not statement.target.id.startswith("_")
    )


@functools.cache
def architectures() -> frozenset[str]:
    """Names that config.json's `architectures` may have: vLLM's own classes, and those of Transformers, for which vLLM
    has a back end; nothing where a plugin of vLLM may add others."""
    plugins = importlib.metadata.entry_points(group=_PLUGINS)
    own = {key for value in _assigned(_tree("vllm", _REGISTRY), "_MODELS") for key in _keys(value)}
    if not own or any(not plugin.value.startswith(_OWN_PLUGINS) for plugin in plugins):
        return frozenset()
    of_transformers = _texts(_assigned(_tree("transformers", _HF_ARCHITECTURES), "_MAPPING_NAMES"))
    return frozenset(own | {name for name in of_transformers if name[:1].isupper()})


@functools.cache
def model_types() -> frozenset[str]:
    """Values that config.json's `model_type` may have."""
    of_transformers = [_tree("transformers", name) for name in _HF_MODEL_TYPES]
    if None in of_transformers:
        return frozenset()
    config = _tree("vllm", _CONFIGS)
    # Transformers extends its table when it is imported.
    own = {
        key
        for suffix in ("_CONFIG_REGISTRY", "_CONFIGS")
        for value in _assigned(config, suffix)
        for key in _keys(value)
    }
    return frozenset(_texts(tree for tree in of_transformers if tree is not None) | own)


@functools.cache
def quantisations() -> frozenset[str]:
    """Values that `quant_method` may have."""
    found = _texts(_assigned(_tree("vllm", _QUANTISATIONS), "QuantizationMethods"))
    return frozenset(found | _OTHER_QUANTISATIONS if found else ())


@functools.cache
def rope_types() -> frozenset[str]:
    """Values that `rope_type` may have."""
    tree = _tree("vllm", _ROPES)
    compared = [
        node
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and node.left.id == "scaling_type"
    ]
    return frozenset(_texts(compared) | _OTHER_ROPES if compared else ())


def unknown(config: Mapping[str, object]) -> tuple[str, str, frozenset[str]] | None:
    """What a config.json names that vLLM does not know: the key, the name, and what is known. None: nothing."""
    for key, names, known in (
        ("model_type", [config.get("model_type")], model_types()),
        ("quant_method", [_quantisation(config)], quantisations()),
        ("rope_type", _ropes(config), rope_types()),
    ):
        for name in names:
            if known and isinstance(name, str) and name not in known:
                return key, name, known
    given, known = config.get("architectures"), architectures()
    named = [name for name in given if isinstance(name, str)] if isinstance(given, list) else []
    if known and named and not known.intersection(named):
        return "architectures", named[0], known
    return None


def _quantisation(config: Mapping[str, object]) -> object:
    given = config.get("quantization_config")
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    return method.lower() if isinstance(method, str) else None


def _ropes(config: Mapping[str, object]) -> Iterator[object]:
    """The types of rotary embeddings, of all layers or by kind of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        given = config.get(key)
        if isinstance(given, Mapping):
            for rope in (given, *(inner for inner in given.values() if isinstance(inner, Mapping))):
                yield rope.get("rope_type", rope.get("type"))
