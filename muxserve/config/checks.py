"""What types cannot say: names given once, directories that exist, keys that are set, options that vLLM has.

They look at the raw data, so that they also speak when other parts of the file have the wrong type.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from muxserve.config import phases, replicas
from muxserve.config.problems import Problem, closest
from muxserve.config.replica_schema import ApiKey
from muxserve.config.schema import Fleet
from muxserve.config.source import Source
from muxserve.vllm.args import RESERVED

_ENV = "env:"
# What vLLM's loader takes for weights.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
# What it does not, or not this version of it, and what to do then.
_FOREIGN_WEIGHTS = {
    "*.gguf": "GGUF files, which this vLLM cannot load; give the safetensors checkpoint that they were made from",
    "*.pth": "PyTorch's original *.pth files; convert them to safetensors (Transformers' conversion scripts do)",
    "*.onnx": "ONNX files; give the safetensors checkpoint that they were made from",
    "*.msgpack": "Flax weights; convert them to safetensors (Transformers' `from_flax=True`)",
    "*.h5": "TensorFlow weights; convert them to safetensors (Transformers' `from_tf=True`)",
}
# Formats of `engine_args.load_format` that this version of vLLM has no loader for.
_NO_LOADERS = ("gguf",)
# Where vLLM declares its options.
_VLLM_OPTIONS = {
    "engine/arg_utils.py": ("EngineArgs", "AsyncEngineArgs"),
    "entrypoints/launchers/cli_args.py": ("BaseFrontendArgs", "FrontendArgs"),
}
# Options of vLLM that have a name of their own in a fleet file.
_OWN_NAMES = {
    "model": "path",
    "served_model_name": "name",
    "revision": "revision",
    "dtype": "dtype",
    "max_model_len": "max_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "enable_prefix_caching": "prefix_caching",
    "pipeline_parallel_size": "stages",
}


def check(source: Source, base: Path, environ: Mapping[str, str], serving: bool = True) -> list[Problem]:
    """Every such mistake in `source`; without `serving`, weights and the gateway's keys need not be there."""
    return [
        *_cluster(source, serving),
        *_models(source, base, serving),
        *replicas.check(source),
        *phases.check(source),
        *(_api_keys(source, environ) if serving else ()),
    ]


def resolve(fleet: Fleet, base: Path, environ: Mapping[str, str]) -> Fleet:
    """`fleet` with absolute model paths and the values of `env:NAME` keys.

    A variable may hold several keys, separated by commas.
    """
    models = [
        model.model_copy(update={"path": str(_directory(base, model.path))}) if model.path else model
        for model in fleet.models
    ]
    # The first mention of a key counts; that two of them differ in priority has been refused.
    keys = list({key.key: key for key in _resolved_keys(fleet.gateway.api_keys, environ)}.values())
    gateway = fleet.gateway.model_copy(update={"api_keys": keys})
    return fleet.model_copy(update={"models": models, "gateway": gateway})


def _resolved_keys(keys: list[ApiKey], environ: Mapping[str, str]) -> Iterator[ApiKey]:
    for key in keys:
        for value in _values(key.key, environ):
            yield key.model_copy(update={"key": value})


def _values(key: str, environ: Mapping[str, str]) -> list[str]:
    """The keys that an entry of the file stands for."""
    if not key.startswith(_ENV):
        return [key]
    return [part.strip() for part in environ.get(key[len(_ENV) :], "").split(",") if part.strip()]


def _directory(base: Path, path: str) -> Path:
    return (base / Path(path).expanduser()).absolute()


def _cluster(source: Source, serving: bool) -> Iterator[Problem]:
    cluster = source.data.get("cluster")
    if not isinstance(cluster, dict):
        return
    if cluster.get("nodes") and cluster.get("gpus"):
        yield source.problem(("cluster", "nodes"), "give either `gpus` (equal machines) or `nodes`, not both")
    gpus, ids, ranks = cluster.get("gpus"), cluster.get("gpu_ids"), cluster.get("ranks")
    if gpus and cluster.get("gpu_type") is None and not serving:
        yield source.problem(("cluster", "gpus"), "needs `gpu_type`, e.g. A100-80GB")
    if isinstance(ids, list) and ids and type(gpus) is int and gpus != len(ids):
        message = f"names {len(ids)}, but `gpus` says {gpus}; leave that out, or make it match"
        yield source.problem(("cluster", "gpu_ids"), message)
    if type(ranks) is int and ranks > 1 and (gpus or ids or cluster.get("nodes")):
        message = "is for CPU; with GPUs every model of a unit is split over all of the unit's GPUs"
        yield source.problem(("cluster", "ranks"), message)
    if cluster.get("sm_sharing") == "green_contexts" and cluster.get("mps") in ("off", False):
        message = "green contexts of different processes compute at the same time under MPS only; leave `mps` out"
        yield source.problem(("cluster", "mps"), message)


def _models(source: Source, base: Path, serving: bool) -> Iterator[Problem]:
    models = source.data.get("models")
    if not isinstance(models, list):
        return
    first: dict[str, int] = {}
    for index, model in enumerate(models):
        if not isinstance(model, dict):
            continue
        at = ("models", index)
        name = model.get("name")
        if isinstance(name, str):
            if name in first:
                line = source.line(("models", first[name], "name"))
                yield source.problem((*at, "name"), f"{name!r} is already the name of the model on line {line}")
            first.setdefault(name, index)
        yield from _origin(source, at, model, base, serving)
        yield from _engine_args(source, at, model)
        seqs, tokens = model.get("max_num_seqs", 64), model.get("max_num_batched_tokens", 2048)
        if type(seqs) is int and type(tokens) is int and 1 <= tokens < seqs:
            key = "max_num_batched_tokens" if "max_num_batched_tokens" in model else "max_num_seqs"
            yield source.problem(
                (*at, key),
                f"one step must have room for a token of each sequence, but {tokens} tokens < {seqs} sequences",
            )


def _origin(
    source: Source, at: tuple[str | int, ...], model: dict[str, Any], base: Path, serving: bool
) -> Iterator[Problem]:
    path, hub = model.get("path"), model.get("hub")
    if path is None and hub is None and model.get("architecture") is None:
        yield source.problem(at, "needs `path` (a checkpoint directory) or `hub` (a Hugging Face hub id)")
    elif path is None and hub is None and serving:
        yield source.problem(
            (*at, "architecture"),
            "is enough to plan, not to serve; add `path` (a checkpoint directory) or `hub` (a Hugging Face hub id)",
        )
    args = model.get("engine_args")
    load_format = args.get("load_format") if isinstance(args, dict) else None
    if load_format in _NO_LOADERS:
        message = f"this vLLM cannot load {load_format}; remove it, and give a checkpoint in safetensors"
        yield source.problem((*at, "engine_args", "load_format"), message)
    if isinstance(hub, str) and (":" in hub or hub.lower().endswith(".gguf")):
        message = f"{hub} names a GGUF file, which this vLLM cannot load; give a repository with safetensors"
        yield source.problem((*at, "hub"), message)
    if path is not None and hub is not None:
        yield source.problem((*at, "hub"), "give either `path` or `hub`, not both")
    if "revision" in model and hub is None:
        yield source.problem((*at, "revision"), "is only for a model given by `hub`")
    if not isinstance(path, str) or not path:
        return
    directory = _directory(base, path)
    where = (*at, "path")
    if not directory.exists():
        like_hub_id = re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) and not directory.parent.is_dir()
        hint = f"; if it is a hub id, write `hub: {path}`" if like_hub_id else ""
        yield source.problem(where, f"{directory} does not exist{hint}")
    elif not directory.is_dir():
        foreign = next((words for pattern, words in _FOREIGN_WEIGHTS.items() if directory.match(pattern)), None)
        hint = f", one of {foreign}" if foreign else "; give the directory that holds config.json"
        yield source.problem(where, f"{directory} is a file{hint}")
    elif serving and not _has(directory, _WEIGHTS) and load_format is None and (foreign := _foreign(directory)):
        yield source.problem(where, f"{directory} has no weights that can be served, only {foreign}")
    elif not (directory / "config.json").is_file():
        yield source.problem(where, f"{directory} has no config.json; is it a Hugging Face checkpoint?")
    elif serving and load_format != "dummy" and not _has(directory, _WEIGHTS):
        yield source.problem(where, f"{directory} has no weights (*.safetensors)")


def _has(directory: Path, patterns: tuple[str, ...]) -> bool:
    return any(any(directory.glob(pattern)) for pattern in patterns)


def _foreign(directory: Path) -> str | None:
    """What weights the directory has that cannot be loaded."""
    return next((words for pattern, words in _FOREIGN_WEIGHTS.items() if _has(directory, (pattern,))), None)


def _engine_args(source: Source, at: tuple[str | int, ...], model: dict[str, Any]) -> Iterator[Problem]:
    args = model.get("engine_args")
    if not isinstance(args, dict):
        return
    known = vllm_options()
    for key in args:
        where = (*at, "engine_args", str(key))
        if not isinstance(key, str):
            continue
        if key in _OWN_NAMES:
            yield source.problem(where, f"is set by `{_OWN_NAMES[key]}` of the model; move it there")
        elif key in RESERVED:
            yield source.problem(where, "is decided by MuxServe and cannot be passed through; remove it")
        elif known and key not in known:
            # A list of all 250 options would help nobody.
            near = closest(key, known)
            yield source.problem(where, "vLLM has no such option" + (f'; did you mean "{near}"?' if near else ""))


@functools.cache
def vllm_options() -> frozenset[str]:
    """Names of vLLM's options, of the engine and of the OpenAI server; empty when vLLM is not installed.

    They are read from its source, because importing vLLM takes seconds.
    """
    try:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            return frozenset()
        root = Path(spec.submodule_search_locations[0])
        trees = [ast.parse((root / name).read_bytes()) for name in _VLLM_OPTIONS]
    except (OSError, SyntaxError, ImportError, ValueError):
        return frozenset()
    classes = {name for names in _VLLM_OPTIONS.values() for name in names}
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


def _api_keys(source: Source, environ: Mapping[str, str]) -> Iterator[Problem]:
    priorities: dict[str, tuple[str | None, int | None]] = {}
    for path, key, priority in replicas.api_keys(source):
        if not isinstance(key, str):
            continue
        if key.startswith(_ENV):
            name = key[len(_ENV) :]
            if not _values(key, environ):
                yield source.problem(path, f"the environment variable {name} is not set; export it, or remove the key")
        elif not (key.isascii() and key.isprintable() and key == key.strip()):
            yield source.problem(path, "a key must be printable ASCII without spaces around it")
        for value in _values(key, environ):
            first = priorities.setdefault(value, (priority, source.line(path)))
            if first[0] != priority:
                yield source.problem(path, f"this key has another priority on line {first[1]}; keep one of the two")
