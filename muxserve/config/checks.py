"""What types cannot say: names given once, directories that exist, keys that are set, options that vLLM has.

They look at the raw data, so that they also speak when other parts of the file have the wrong type.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from muxserve.config.adapters import AdapterError, rank_of
from muxserve.config.checkpoint_files import CheckpointError, check_directory, opened
from muxserve.config.problems import KeyPath, Problem, closest, did_you_mean, shown
from muxserve.config.schema import (
    ALL_MODELS,
    BATCHES_DIRECTORY,
    MOST_REPLICAS,
    MOST_SERVED,
    RESPONSES_FILE,
    ApiKey,
    Fleet,
    GatewaySection,
    Model,
)
from muxserve.config.source import Source
from muxserve.config.values import AUTO, switch
from muxserve.config.variables import ENV, FILE
from muxserve.replicas.priorities import DEFAULT_LEVELS, NORMAL
from muxserve.spec.unit import WEIGHT_FILES
from muxserve.vllm.args import NGRAM, NGRAM_NUMBERS, RESERVED, SPECULATION
from muxserve.vllm.known import options

# What types cannot say of replicas, priorities, migration and launchers: bounds and names that go together.
#
# Like `checks`, these look at the raw data.

# Beyond it nothing is compared here: the schema's bounds speak.
_MOST_NUMBER = 1 << 63


def check_replicas(source: Source, serving: bool = True) -> Iterator[Problem]:
    """Every such mistake in `source`."""
    if serving:
        yield from _served_replicas(source)
    models = source.data.get("models")
    for index, model in enumerate(models if isinstance(models, list) else ()):
        if isinstance(model, dict) and isinstance(model.get("replicas"), dict):
            yield from _replicas(source, ("models", index, "replicas"), model["replicas"])
    yield from _priorities(source)
    yield from _memory(source)
    cluster = source.data.get("cluster")
    if isinstance(cluster, dict) and "ray" in cluster and cluster.get("launcher", "local") == "local":
        yield source.problem(("cluster", "ray"), "is for `launcher: ray` only; set that, or leave this out")


def api_keys(source: Source) -> Iterator[tuple[KeyPath, object, str | None]]:
    """The entries of `gateway.api_keys`: place, key, and the priority if it has one."""
    gateway = source.data.get("gateway")
    keys = gateway.get("api_keys") if isinstance(gateway, dict) else None
    if not isinstance(keys, list):
        places: list[tuple[KeyPath, Any]] = [(("gateway", "api_keys"), keys)]
    else:
        places = [(("gateway", "api_keys", index), key) for index, key in enumerate(keys)]
    for path, key in places:
        if isinstance(key, dict):
            priority = key.get("priority")
            yield (*path, "key"), key.get("key"), priority if isinstance(priority, str) else None
        else:
            yield path, key, None


def tenant_keys(source: Source) -> Iterator[tuple[KeyPath, object, str, str | None]]:
    """The entries of `tenants.NAME.keys`: place, key, tenant, and the priority if it has one."""
    tenants = source.data.get("tenants")
    for name, tenant in tenants.items() if isinstance(tenants, dict) else ():
        keys = tenant.get("keys") if isinstance(tenant, dict) else None
        for index, key in enumerate(keys if isinstance(keys, list) else ()):
            priority = tenant.get("priority")
            where = ("tenants", str(name), "keys", index)
            yield where, key, str(name), priority if isinstance(priority, str) else None


def _served_replicas(source: Source) -> Iterator[Problem]:
    """Each is started, or may be. For planning there may be more."""
    models = source.data.get("models")
    for index, model in enumerate(models if isinstance(models, list) else ()):
        given = model.get("replicas") if isinstance(model, dict) else None
        most = given.get("max") if isinstance(given, dict) else given
        if _whole(most) and MOST_SERVED < most <= MOST_REPLICAS:
            where: KeyPath = ("models", index, "replicas", *(("max",) if isinstance(given, dict) else ()))
            yield source.problem(where, f"{most:,} can be planned, but not served; a fleet has at most {MOST_SERVED}")


def _replicas(source: Source, at: KeyPath, given: dict[str, Any]) -> Iterator[Problem]:
    least, most, start = given.get("min", 1), given.get("max"), given.get("start")
    if _whole(least) and _whole(most) and most >= 1 and least > most:
        yield source.problem((*at, "min"), f"{least} are more than max ({most})")
    elif _whole(least) and _whole(most) and _whole(start) and not least <= start <= most:
        yield source.problem((*at, "start"), f"{start} is not between min ({least}) and max ({most})")


def _priorities(source: Source) -> Iterator[Problem]:
    given = source.data.get("priorities")
    if given is not None and not (isinstance(given, dict) and given):
        return
    levels = [str(name) for name in given] if given else [level.name for level in DEFAULT_LEVELS]
    ranks: dict[int, str] = {}
    for name, level in (given or {}).items():
        rank = level.get("rank") if isinstance(level, dict) else None
        if _whole(rank):
            if rank in ranks:
                message = f"{shown(ranks[rank])} has rank {rank}, too; which of them goes first must be clear"
                yield source.problem(("priorities", str(name), "rank"), message)
            ranks.setdefault(rank, str(name))
    if NORMAL not in levels:
        yield source.problem(("priorities",), f"needs `{NORMAL}`, the level of requests that name none")
    for path, _, priority in api_keys(source):
        if priority is not None and priority not in levels:
            where = (*path[:-1], "priority")
            yield source.problem(where, f"there is no priority level {shown(priority)}{did_you_mean(priority, levels)}")
    tenants = source.data.get("tenants")
    for name, tenant in tenants.items() if isinstance(tenants, dict) else ():
        priority = tenant.get("priority") if isinstance(tenant, dict) else None
        if isinstance(priority, str) and priority not in levels:
            message = f"there is no priority level {shown(priority)}{did_you_mean(priority, levels)}"
            yield source.problem(("tenants", str(name), "priority"), message)


def _memory(source: Source) -> Iterator[Problem]:
    """Memory decides over one replica of each model, in one unit of this machine."""
    models = source.data.get("models")
    given = source.data.get("memory")
    for index, model in enumerate(models if isinstance(models, list) else ()):
        if not isinstance(model, dict):
            continue
        if given is None:
            if model.get("keep") == "always":
                yield source.problem(("models", index, "keep"), "is for fleets with `memory`")
            continue
        replicas = model.get("replicas")
        most = replicas.get("max") if isinstance(replicas, dict) else replicas
        if _whole(most) and most > 1:
            message = f"with `memory` a model has one replica at most, not {most}"
            yield source.problem(("models", index, "replicas"), message)
        if model.get("dispatch") == "rolling" or _several_stages(model):
            key = "dispatch" if model.get("dispatch") == "rolling" else "stages"
            message = "such a model has a unit to itself, which `memory` does not decide over"
            yield source.problem(("models", index, key), f"{message}; leave one of the two out")
    cluster = source.data.get("cluster")
    if given is not None and isinstance(cluster, dict):
        if cluster.get("nodes"):
            yield source.problem(("cluster", "nodes"), "`memory` decides over models of one machine only; write `gpus`")
        if cluster.get("launcher") == "ray":
            yield source.problem(("cluster", "launcher"), "`memory` decides over models of this machine only")
        if _whole(cluster.get("ranks")) and cluster["ranks"] > 1:
            yield source.problem(("cluster", "ranks"), "`memory` decides over models of one rank only")


def _whole(value: object) -> TypeGuard[int]:
    return type(value) is int and abs(value) < _MOST_NUMBER


# What types cannot say of the shape of engines: which keys go with which.
#
# Like `checks`, these look at the raw data.

# Keys of models with one engine of both phases.
_OF_ONE = ("stages", "dispatch")


def check_shapes(source: Source) -> Iterator[Problem]:
    """Every such mistake in `source`."""
    models = source.data.get("models")
    for index, model in enumerate(models if isinstance(models, list) else ()):
        if isinstance(model, dict):
            yield from _model(source, ("models", index), model)


def _model(source: Source, at: KeyPath, model: dict[str, Any]) -> Iterator[Problem]:
    engines, rolls = model.get("engines", AUTO), model.get("dispatch") == "rolling"
    if engines == "split":
        for key in _OF_ONE:
            if model.get(key, AUTO) not in (AUTO, 1):
                yield source.problem((*at, key), "is for models with one engine; write `engines: one`, or leave it out")
    if rolls and _several_stages(model):
        message = "must be 1 where prefill rolls over replicas, each of which has one stage; leave one of the two out"
        yield source.problem((*at, "stages"), message)
    if engines != "split":
        yield from _sm_of_one(source, (*at, "sm"), model)
    if rolls:
        yield from _objectives(source, at, model.get("slo"))


def _sm_of_one(source: Source, at: KeyPath, model: Mapping[str, Any]) -> Iterator[Problem]:
    given = model.get("sm")
    if given is not None and _has_own_unit(model):
        yield source.problem(at, "is for models that share GPUs; this one has GPUs to itself; leave it out")
    elif isinstance(given, dict) and "prefill" in given:
        message = "is for `engines: split`; the share of a model's one engine is `sm.decode`"
        yield source.problem((*at, "prefill"), message)


def _several_stages(model: Mapping[str, Any]) -> bool:
    stages = model.get("stages")
    return _whole(stages) and stages > 1


def _has_own_unit(model: Mapping[str, Any]) -> bool:
    return model.get("dispatch") == "rolling" or _several_stages(model)


def _is_private(model: Mapping[str, Any]) -> bool:
    """Whether the file itself gives the model a cache of its own, as stock vLLM has it."""
    return model.get("kv") == "private"


def _objectives(source: Source, at: KeyPath, slo: object) -> Iterator[Problem]:
    """Algorithm 2 of EcoServe holds prefills and decodes against both objectives."""
    given = slo if isinstance(slo, dict) else {}
    missing = [f"slo.{key}" for key in ("ttft_ms", "tpot_ms") if given.get(key) is None]
    if missing:
        where = (*at, "slo") if isinstance(slo, dict) else (*at, "dispatch")
        message = f"`dispatch: rolling` needs {' and '.join(missing)}: prefill rolls on when the next would miss them"
        yield source.problem(where, message)


# Largest file with keys.
_MOST_KEY_BYTES = 1 << 20
# What vLLM's loader does not take for weights, or not this version of it, and what to do then.
_FOREIGN_WEIGHTS = {
    "*.gguf": "GGUF files, which this vLLM cannot load; give the safetensors checkpoint that they were made from",
    "*.pth": "PyTorch's original *.pth files; convert them to safetensors (Transformers' conversion scripts do)",
    "*.onnx": "ONNX files; give the safetensors checkpoint that they were made from",
    "*.msgpack": "Flax weights; convert them to safetensors (Transformers' `from_flax=True`)",
    "*.h5": "TensorFlow weights; convert them to safetensors (Transformers' `from_tf=True`)",
}
# Types of `engine_args.kv_cache_dtype` that the pages of the pool may have, by vLLM's names.
KV_CACHE_TYPES = {"auto": "", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
# Formats of `engine_args` (`load_format`, `quantization`) that this version of vLLM has no loader for.
_NO_LOADERS = ("gguf",)
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

_HUB_ADDRESS = re.compile(r"https?://[^/]+/([\w.-]+/[\w.-]+)/?(?:tree/|resolve/|$)")
_TLS_FILES = ("cert", "key")


def check(source: Source, base: Path, environ: Mapping[str, str], serving: bool = True) -> list[Problem]:
    """Every such mistake in `source`; without `serving`, weights and the gateway's keys need not be there."""
    return [
        *_cluster(source),
        *_models(source, base, serving),
        *check_replicas(source, serving),
        *check_shapes(source),
        *_tenants(source),
        *_shared_names(source),
        *_fallbacks(source),
        *(_secrets(source, base, environ) if serving else ()),
    ]


def resolve(fleet: Fleet, base: Path, environ: Mapping[str, str]) -> Fleet:
    """`fleet` with absolute paths and the values of `env:NAME` and `file:PATH` keys.

    A variable may hold several keys, separated by commas; a file one in each line.
    """
    models = [
        model.model_copy(update={**_absolute(model, base), **_fallback_key(model, base, environ)})
        for model in fleet.models
    ]
    # The first mention of a key counts; that two of them differ in priority has been refused.
    keys = list({key.key: key for key in _resolved_keys(fleet.gateway.api_keys, base, environ)}.values())
    kept, tls = fleet.gateway.responses, fleet.gateway.tls
    gateway = fleet.gateway.model_copy(
        update={
            "api_keys": keys,
            "usage_file": str(_directory(base, fleet.gateway.usage_file)),
            "tls": tls and tls.model_copy(update={key: str(_directory(base, getattr(tls, key))) for key in _TLS_FILES}),
            "responses": kept and str(_directory(base, kept)),
            "batches": fleet.gateway.batches and str(_directory(base, fleet.gateway.batches)),
        }
    )
    tenants = {
        name: tenant.model_copy(update={"keys": [v for key in tenant.keys for v in _values(key, base, environ)]})
        for name, tenant in fleet.tenants.items()
    }
    if fleet.memory is not None:
        models = [_by_memory(model) for model in models]
    return fleet.model_copy(update={"models": models, "gateway": gateway, "tenants": tenants})


def _by_memory(model: Model) -> Model:
    """A model of a fleet in which memory decides who is awake: asleep until somebody asks for it, or never."""
    bounds = {"min": 1, "max": 1, "start": 1} if model.keep == "always" else {"min": 0, "max": 1, "start": 0}
    return model.model_copy(update={"replicas": model.replicas.model_copy(update=bounds)})


def _resolved_keys(keys: list[ApiKey], base: Path, environ: Mapping[str, str]) -> Iterator[ApiKey]:
    for key in keys:
        for value in _values(key.key, base, environ):
            yield key.model_copy(update={"key": value})


def _values(key: str, base: Path, environ: Mapping[str, str]) -> list[str]:
    """The keys that an entry of the file stands for; none if they cannot be read."""
    if key.startswith(ENV):
        parts = environ.get(key[len(ENV) :], "").split(",")
    elif key.startswith(FILE):
        try:
            with opened(_directory(base, key[len(FILE) :])) as file:
                parts = file.read(_MOST_KEY_BYTES).decode().splitlines()
        except (CheckpointError, ValueError):
            parts = []
    else:
        return [key]
    return [part.strip() for part in parts if part.strip()]


def _absolute(model: Model, base: Path) -> dict[str, object]:
    """The paths of a model that it has."""
    found: dict[str, object] = {}
    if model.path:
        found["path"] = str(_directory(base, model.path))
    if model.adapters:
        found["adapters"] = {name: str(_directory(base, path)) for name, path in model.adapters.items()}
    return found


def _fallback_key(model: Model, base: Path, environ: Mapping[str, str]) -> dict[str, object]:
    """The fallback of a model with the key of its endpoint, if that wants one."""
    if model.fallback is None or model.fallback.key is None:
        return {}
    values = _values(model.fallback.key, base, environ)
    return {"fallback": model.fallback.model_copy(update={"key": values[0] if values else None})}


def _directory(base: Path, path: str) -> Path:
    return (base / Path(path).expanduser()).absolute()


def _cluster(source: Source) -> Iterator[Problem]:
    cluster = source.data.get("cluster")
    if not isinstance(cluster, dict):
        return
    if cluster.get("nodes") and cluster.get("gpus"):
        yield source.problem(("cluster", "nodes"), "give either `gpus` (equal machines) or `nodes`, not both")
    gpus, ids, ranks = cluster.get("gpus"), cluster.get("gpu_ids"), cluster.get("ranks")
    if isinstance(ids, list) and ids and _whole(gpus) and gpus != len(ids):
        message = f"names {len(ids)}, but `gpus` says {gpus}; leave that out, or make it match"
        yield source.problem(("cluster", "gpu_ids"), message)
    if _whole(ranks) and ranks > 1 and (gpus or ids or cluster.get("nodes")):
        message = "is for CPU; with GPUs every model of a unit is split over all of the unit's GPUs"
        yield source.problem(("cluster", "ranks"), message)
    if cluster.get("sm_sharing") == "green_contexts" and cluster.get("mps") in ("off", False):
        message = "green contexts of different processes compute at the same time under MPS only; leave `mps` out"
        yield source.problem(("cluster", "mps"), message)


def _models(source: Source, base: Path, serving: bool) -> Iterator[Problem]:
    models = source.data.get("models")
    if not isinstance(models, list):
        return
    first: dict[str, KeyPath] = {}
    for index, model in enumerate(models):
        if not isinstance(model, dict):
            continue
        at = ("models", index)
        aliases = model.get("aliases")
        names: list[tuple[object, KeyPath]] = [(model.get("name"), (*at, "name"))]
        names += [(alias, (*at, "aliases", k)) for k, alias in enumerate(aliases if isinstance(aliases, list) else ())]
        adapters = model.get("adapters")
        names += [(each, (*at, "adapters", str(each))) for each in (adapters if isinstance(adapters, dict) else ())]
        for name, path in names:
            if isinstance(name, str):
                if name in first:
                    line = source.line_from(first[name], path)
                    yield source.problem(path, f"{shown(name)} is already the name of the model on {line}")
                first.setdefault(name, path)
        if serving and isinstance(adapters, dict):
            yield from _adapters(source, (*at, "adapters"), adapters, base)
        yield from _origin(source, at, model, base, serving)
        yield from _engine_args(source, at, model)
        seqs, tokens = model.get("max_num_seqs"), model.get("max_num_batched_tokens")
        if _whole(seqs) and _whole(tokens) and 1 <= tokens < seqs:
            yield source.problem(
                (*at, "max_num_batched_tokens"),
                f"one step must have room for a token of each sequence, but {tokens} tokens < {seqs} sequences",
            )


def _adapters(source: Source, at: KeyPath, adapters: Mapping[object, object], base: Path) -> Iterator[Problem]:
    for name, path in adapters.items():
        if isinstance(path, str) and path:
            try:
                rank_of(_directory(base, path))
            except (AdapterError, ValueError) as error:
                yield source.problem((*at, str(name)), str(error), beside=True)


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
    given = model.get("engine_args")
    args: dict[object, object] = given if isinstance(given, dict) else {}
    load_format = args.get("load_format")
    for key in ("load_format", "quantization"):
        if (asked := args.get(key)) in _NO_LOADERS:
            message = f"this vLLM cannot load {asked}; remove it, and give a checkpoint in safetensors"
            yield source.problem((*at, "engine_args", key), message)
    if isinstance(hub, str) and "://" in hub:
        found = _HUB_ADDRESS.match(hub)
        hint = f"; write `hub: {found[1]}`" if found else ""
        yield source.problem((*at, "hub"), f"must be a hub id such as org/name, not the address {shown(hub)}{hint}")
    elif isinstance(hub, str) and (":" in hub or hub.lower().endswith(".gguf")):
        message = f"{hub} names a GGUF file, which this vLLM cannot load; give a repository with safetensors"
        yield source.problem((*at, "hub"), message)
    if path is not None and hub is not None:
        yield source.problem((*at, "hub"), "give either `path` or `hub`, not both")
    if "revision" in model and hub is None:
        yield source.problem((*at, "revision"), "is only for a model given by `hub`")
    if not isinstance(path, str) or not path:
        return
    where = (*at, "path")
    try:
        directory = _directory(base, path)
        os.stat(directory)
    except FileNotFoundError:
        pass  # the check below reports it
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        yield source.problem(where, f"{shown(path)} cannot be read: {reason}", beside=True)
        return
    if not directory.exists():
        like_hub_id = re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) and not directory.parent.is_dir()
        hint = f"; if it is a hub id, write `hub: {path}`" if like_hub_id else ""
        yield source.problem(where, f"{directory} does not exist{hint}", beside=True)
    elif not directory.is_dir():
        foreign = next((words for pattern, words in _FOREIGN_WEIGHTS.items() if directory.match(pattern)), None)
        hint = f", one of {foreign}" if foreign else "; give the directory that holds config.json"
        yield source.problem(where, f"{directory} is a file{hint}", beside=True)
    elif serving and load_format is None and _foreign(directory) and (lacking := lacks_weights(directory)):
        yield source.problem(where, f"{directory} {lacking}", beside=True)
    elif not (directory / "config.json").is_file():
        yield source.problem(where, f"{directory} has no config.json; is it a Hugging Face checkpoint?", beside=True)
    elif serving and load_format != "dummy" and not _has(directory, WEIGHT_FILES):
        yield source.problem(where, f"{directory} {lacks_weights(directory)}", beside=True)
    elif serving:
        try:
            check_directory(directory, args)
        except CheckpointError as error:
            yield source.problem(where, str(error), beside=True)


def lacks_weights(directory: Path) -> str:
    """What is wrong with a checkpoint's directory that has no weights which vLLM's loader takes; else empty."""
    if _has(directory, WEIGHT_FILES):
        return ""
    foreign = _foreign(directory)
    return f"has no weights that can be served, only {foreign}" if foreign else "has no weights (*.safetensors)"


def _has(directory: Path, patterns: tuple[str, ...]) -> bool:
    return any(any(directory.glob(pattern)) for pattern in patterns)


def _foreign(directory: Path) -> str | None:
    """What weights the directory has that cannot be loaded."""
    return next((words for pattern, words in _FOREIGN_WEIGHTS.items() if _has(directory, (pattern,))), None)


# Tokens of a sequence that may be proposed, and of its end that are looked for. More were not tried.
_MOST_PROPOSED = 16


def _engine_args(source: Source, at: tuple[str | int, ...], model: dict[str, Any]) -> Iterator[Problem]:
    args = model.get("engine_args")
    if not isinstance(args, dict):
        return
    known = options()
    if args.get("kv_cache_dtype", "auto") not in KV_CACHE_TYPES:
        message = f"must be one of {', '.join(KV_CACHE_TYPES)}, not {shown(args['kv_cache_dtype'])}"
        yield source.problem((*at, "engine_args", "kv_cache_dtype"), message)
    ahead = args.get("async_scheduling", False)
    if not isinstance(ahead, bool):
        yield source.problem((*at, "engine_args", "async_scheduling"), f"must be true or false, not {shown(ahead)}")
    elif ahead and _several_stages(model):
        message = "cannot be had with several stages, whose micro-batches are in flight already; remove it"
        yield source.problem((*at, "engine_args", "async_scheduling"), message)
    if "speculative_config" in args:
        yield from _speculation(source, (*at, "engine_args", "speculative_config"), args, model)
    for key in args:
        where = (*at, "engine_args", str(key))
        if not isinstance(key, str):
            continue
        if key in _OWN_NAMES:
            yield source.problem(where, f"is set by `{_OWN_NAMES[key]}` of the model; move it there")
        elif key in ("enable_lora", "lora_modules"):
            yield source.problem(where, "is what `adapters` of the model is for: names and directories; remove it")
        elif key in SPECULATION:
            yield source.problem(
                where, f"is part of `speculative_config: {{method: {NGRAM}, ...}}`; write that instead"
            )
        elif key in RESERVED:
            yield source.problem(where, "is decided by MuxServe and cannot be passed through; remove it")
        elif known and key not in known:
            # A list of all 250 options would help nobody.
            near = closest(key, known)
            yield source.problem(where, "vLLM has no such option" + (f'; did you mean "{near}"?' if near else ""))


def _speculation(
    source: Source, at: tuple[str | int, ...], args: Mapping[str, Any], model: Mapping[str, Any]
) -> Iterator[Problem]:
    given = args["speculative_config"]
    if not isinstance(given, dict):
        yield source.problem(
            at, f"must be a mapping like {{method: {NGRAM}, num_speculative_tokens: 3}}, not {shown(given)}"
        )
        return
    if _is_private(model):
        return  # vLLM says what it knows
    if given.get("method") != NGRAM:
        if model.get("kv") == "pool":
            asked = shown(given["method"]) if "method" in given else "left out"
            message = (
                f"must be {NGRAM} with `kv: pool`, not {asked}: a draft model's or MTP layers' KV has no place there"
            )
            yield source.problem((*at, "method") if "method" in given else at, f"method {message}")
        # Else it gets a cache of its own.
        return
    numbers = {name: given[name] for name in NGRAM_NUMBERS if name in given}
    for name, number in numbers.items():
        if type(number) is not int or not 1 <= number <= _MOST_PROPOSED:
            yield source.problem((*at, name), f"must be a whole number from 1 to {_MOST_PROPOSED}, not {shown(number)}")
            return
    if "num_speculative_tokens" not in given:
        yield source.problem(at, "needs num_speculative_tokens, how many tokens are proposed at most")
    least, most = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    if least is not None and most is not None and least > most:
        yield source.problem((*at, "prompt_lookup_min"), f"must not be above prompt_lookup_max, {most}")
    for name in given:
        if name not in ("method", *NGRAM_NUMBERS):
            known = ", ".join(("method", *NGRAM_NUMBERS))
            yield source.problem((*at, str(name)), f"is not known here; {NGRAM} has {known}")
    if _has_own_unit(model):
        message = (
            "cannot be had with several stages or `dispatch: rolling`, whose steps have one token of each sequence; "
            "remove one of the two"
        )
        yield source.problem(at, message)
    for name in ("async_scheduling", "logits_processors"):
        if args.get(name):
            yield source.problem(at, f"cannot be had together with {name}; remove one of them")


def _model_names(source: Source) -> list[str]:
    models = source.data.get("models")
    names = [m.get("name") for m in models if isinstance(m, dict)] if isinstance(models, list) else []
    return [name for name in names if isinstance(name, str)]


def _shared_names(source: Source) -> Iterator[Problem]:
    """Names of no model, for models that are there, of which one at least has a part."""
    given, known = source.data.get("aliases"), _model_names(source)
    models = source.data.get("models")
    taken = set(known)
    for model in models if isinstance(models, list) else ():
        for key in ("aliases", "adapters"):
            own = model.get(key) if isinstance(model, dict) else None
            taken |= {name for name in (own if isinstance(own, (list, dict)) else ()) if isinstance(name, str)}
    for alias, shares in given.items() if isinstance(given, dict) else ():
        at = ("aliases", str(alias))
        if alias in taken:
            yield source.problem(at, f"a model or an adapter has the name {shown(alias)} already")
        weights = {shares: 1} if isinstance(shares, str) else shares
        if not isinstance(weights, dict):
            continue
        for model in weights:
            if isinstance(model, str) and model not in known:
                message = f"there is no model {shown(model)}{did_you_mean(model, known)}"
                yield source.problem(at if isinstance(shares, str) else (*at, model), message)
        if weights and all(weight == 0 for weight in weights.values()):
            yield source.problem(at, "no model has a part of its requests; one weight must be more than 0")


def _tenants(source: Source) -> Iterator[Problem]:
    tenants, known = source.data.get("tenants"), _model_names(source)
    for tenant, given in tenants.items() if isinstance(tenants, dict) else ():
        allowed = given.get("models") if isinstance(given, dict) else None
        for index, model in enumerate(allowed if isinstance(allowed, list) else ()):
            if isinstance(model, str) and model not in known:
                message = f"there is no model {shown(model)}{did_you_mean(model, known)}"
                yield source.problem(("tenants", str(tenant), "models", index), message)
        budgets = given.get("budgets") if isinstance(given, dict) else None
        for period, budget in budgets.items() if isinstance(budgets, dict) else ():
            for model in budget if isinstance(budget, dict) else ():
                if isinstance(model, str) and model != ALL_MODELS and model not in known:
                    message = f"there is no model {shown(model)}{did_you_mean(model, known)}"
                    yield source.problem(("tenants", str(tenant), "budgets", str(period), model), message)
    if isinstance(tenants, dict) and tenants and not _has_admin(source):
        for tenant, given in tenants.items():
            if isinstance(given, dict) and not given.get("keys"):
                message = "has no keys, and nobody could make some: give it `keys`, or set `gateway.api_keys`"
                yield source.problem(("tenants", str(tenant)), message)


def _has_admin(source: Source) -> bool:
    """Whether somebody has a key that may make others."""
    tenants = source.data.get("tenants")
    named = [each for each in tenants.values() if isinstance(each, dict)] if isinstance(tenants, dict) else []
    return any(key for _, key, _ in api_keys(source)) or any(each.get("admin") and each.get("keys") for each in named)


def _fallbacks(source: Source) -> Iterator[Problem]:
    """What answers in place of a model: one that there is, not the model itself, and with a key only elsewhere."""
    models, known = source.data.get("models"), _model_names(source)
    after: dict[str, str] = {}
    for index, model in enumerate(models if isinstance(models, list) else ()):
        given = model.get("fallback") if isinstance(model, dict) else None
        at: KeyPath = ("models", index, "fallback")
        own = {"model": given} if isinstance(given, str) else given
        if not isinstance(own, dict) or own.get("url"):
            continue
        other = own.get("model")
        where = at if isinstance(given, str) else (*at, "model")
        if own.get("key"):
            yield source.problem((*at, "key"), "is for another endpoint; set `url`, or leave the key out")
        elif other is None:
            yield source.problem(at, "needs the name of a `model`, or the `url` of an OpenAI endpoint")
        elif isinstance(other, str) and other not in known:
            yield source.problem(where, f"there is no model {shown(other)}{did_you_mean(other, known)}")
        elif isinstance(other, str):
            after[str(model.get("name"))] = other
            seen, name = [str(model.get("name"))], other
            while name in after and name not in seen:
                seen.append(name)
                name = after[name]
            if name in seen:
                yield source.problem(
                    where, f"{shown(name)} would fall back to itself; end the chain with another model"
                )


def _secrets(source: Source, base: Path, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Keys that are not there, or are given twice."""
    known: dict[str, tuple[tuple[str, str | None], KeyPath]] = {}
    for path, key, tenant, priority in [
        *((path, key, "", priority) for path, key, priority in api_keys(source)),
        *tenant_keys(source),
    ]:
        if not isinstance(key, str):
            continue
        values = _values(key, base, environ)
        if key.startswith(ENV) and not values:
            name = key[len(ENV) :]
            yield source.problem(path, f"the environment variable {name} is not set; export it, or remove the key")
        elif key.startswith(FILE) and not values:
            file = _directory(base, key[len(FILE) :])
            yield source.problem(path, f"{file} has no key, or cannot be read; write one in each line")
        elif not all(value.isascii() and value.isprintable() and value == value.strip() for value in values):
            yield source.problem(path, "a key must be printable ASCII without spaces around it")
        for value in values:
            (whose, level), first = known.setdefault(value, ((tenant, priority), path))
            line = source.line_from(first, path)
            if whose != tenant:
                yield source.problem(path, f"{line} has this key, too; it can belong to one tenant only")
            elif level != priority:
                yield source.problem(path, f"this key has another priority on {line}; keep one of the two")
    given = source.data.get("gateway")
    gateway = given if isinstance(given, dict) else {}
    if source.data.get("tenants"):
        given = gateway.get("usage_file")
        file = _directory(base, given if isinstance(given, str) else GatewaySection.model_fields["usage_file"].default)
        if not _writable(file):
            where: KeyPath = ("gateway", "usage_file") if isinstance(given, str) else ("tenants",)
            message = f"what tenants used cannot be kept in {file}; set `gateway.usage_file` to a place to write to"
            yield source.problem(where, message)
    yield from _tls(source, base, gateway.get("tls"))
    kept = switch(gateway.get("responses", "off"))
    if isinstance(kept, str) and kept != "off":
        file = _directory(base, RESPONSES_FILE if kept == "on" else kept)
        if not _writable(file):
            message = f"responses cannot be kept in {file}; set `gateway.responses` to a file that can be written"
            yield source.problem(("gateway", "responses"), message)
    kept = switch(gateway.get("batches", "off"))
    if isinstance(kept, str) and kept != "off":
        directory = _directory(base, BATCHES_DIRECTORY if kept == "on" else kept)
        if (directory.exists() and not directory.is_dir()) or not os.access(_nearest(directory), os.W_OK):
            message = f"batches cannot be kept in {directory}; set `gateway.batches` to a directory to write to"
            yield source.problem(("gateway", "batches"), message)
    models = source.data.get("models")
    for index, model in enumerate(models if isinstance(models, list) else ()):
        fallback = model.get("fallback") if isinstance(model, dict) else None
        key = fallback.get("key") if isinstance(fallback, dict) else None
        if isinstance(key, str) and key.startswith((ENV, FILE)) and not _values(key, base, environ):
            message = f"{key} has no key; set the variable, or write the key into the file"
            yield source.problem(("models", index, "fallback", "key"), message)


def _tls(source: Source, base: Path, given: object) -> Iterator[Problem]:
    """Why nobody could make an encrypted connection to the endpoint."""
    if not isinstance(given, dict) or not all(isinstance(given.get(key), str) for key in _TLS_FILES):
        return  # none is wanted, or the schema says what is missing
    files = {key: _directory(base, given[key]) for key in _TLS_FILES}
    unreadable = [key for key, file in files.items() if not os.access(file, os.R_OK) or not file.is_file()]
    for key in unreadable:
        yield source.problem(("gateway", "tls", key), f"{files[key]} is not there, or cannot be read")
    if unreadable:
        return
    where: KeyPath = ("gateway", "tls")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files["cert"], files["key"], lambda: "")
    except ssl.SSLError as error:
        reason = "one of the two files is no PEM file, or the key has a password (openssl pkey -in KEY -out NEW)"
        if error.reason == "KEY_VALUES_MISMATCH":
            reason = "the key is not that of the certificate"
        yield source.problem(where, reason)


def _nearest(directory: Path) -> Path:
    """`directory`, or the one above it where it is to be made."""
    return directory if directory.exists() else directory.parent


def _writable(file: Path) -> bool:
    return os.access(file if file.exists() else file.parent, os.W_OK) and (file.is_file() or not os.path.lexists(file))
