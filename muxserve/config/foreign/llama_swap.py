"""llama-swap's file: commands that start engines, of which as many run as have room."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from muxserve.config.foreign.command_line import NoVllmError, read_command
from muxserve.config.foreign.reading import Reading, Reasons
from muxserve.config.problems import KeyPath

_LISTED = "clients see all names that a model has"
_LOGS = "`muxserve deploy --log-level` and `--log-dir` say it"
_ONE_PROCESS = "MuxServe starts the engines itself, and watches them"
_TTL = "with `memory` a model sleeps when another one needs its memory, not after a time"
_MEMORY = "with `memory`, memory decides which models are awake together; `keep: always` of a model keeps it so"
REASONS: Reasons = {
    ("healthCheckTimeout",): "a model that cannot be started is degraded, and its requests are told so",
    ("logLevel",): _LOGS,
    ("logTimeFormat",): _LOGS,
    ("logToStdout",): _LOGS,
    ("startPort",): _ONE_PROCESS,
    ("globalTTL",): _TTL,
    ("unloadTimeout",): "a request is never cut off for another model",
    ("includeAliasesInList",): _LISTED,
    ("models", "*", "name"): "/v1/models has no names for display",
    ("models", "*", "description"): "/v1/models has no descriptions",
    ("models", "*", "env"): "one environment serves all: export it before `muxserve deploy`, or see `cluster.gpu_ids`",
    ("models", "*", "proxy"): _ONE_PROCESS,
    ("models", "*", "cmdStop"): _ONE_PROCESS,
    ("models", "*", "checkEndpoint"): _ONE_PROCESS,
    ("models", "*", "unloadTimeout"): "a request is never cut off for another model",
    ("models", "*", "ttl"): _TTL,
    ("models", "*", "unlisted"): _LISTED,
    ("models", "*", "useModelName"): "engines have no names of their own",
    ("models", "*", "filters"): "requests are served as they come",
    ("models", "*", "concurrencyLimit"): "0 is no limit",
    ("groups", "*", "swap"): _MEMORY,
    ("groups", "*", "exclusive"): _MEMORY,
    ("groups", "*", "members"): _MEMORY,
    ("groups", "*", "persistent"): _MEMORY,
    ("matrix",): _MEMORY,
    ("routing", "router", "use"): _MEMORY,
    ("routing", "router", "settings", "matrix"): _MEMORY,
    ("routing", "router", "settings", "groups", "*", "swap"): _MEMORY,
    ("routing", "router", "settings", "groups", "*", "exclusive"): _MEMORY,
    ("routing", "router", "settings", "groups", "*", "members"): _MEMORY,
    ("routing", "router", "settings", "groups", "*", "persistent"): _MEMORY,
    ("routing", "scheduler"): "requests have priorities, not models: `priorities`",
    ("hooks",): "a first request wakes a model; `keep: always` keeps it awake",
    ("peers",): "MuxServe serves models of its own machines",
}
_FILLED = "filled in where commands name them"
_ENV = re.compile(r"\$\{env\.(\w+)\}")
_MACRO = re.compile(r"\$\{([\w-]+)\}")


def read_llama_swap(reading: Reading, environ: Mapping[str, str]) -> dict[str, Any]:
    """The fleet of a llama-swap file; each of its keys is said to be taken or not."""
    data = reading.data
    macros, gpus = _mapping(data.get("macros")), 0
    if macros:
        reading.take(("macros",), _FILLED)
    for name, model in data["models"].items():
        at: KeyPath = ("models", str(name))
        if not isinstance(model, dict) or not isinstance(model.get("cmd"), str):
            reading.leave(at, "it has no command")
            continue
        known = {**macros, **_mapping(model.get("macros")), "MODEL_ID": str(name)}
        if "macros" in model:
            reading.take((*at, "macros"), _FILLED)
        gpus = max(gpus, _model(reading, at, str(name), model, known, environ))
    for path, group in _groups(data):
        if group.get("persistent") is True:
            for member in group.get("members") or ():
                if member in reading.by_name:
                    reading.by_name[member]["keep"] = "always"
            reading.take((*path, "persistent"), "keep: always of its members")
    keys = data.get("apiKeys")
    fleet: dict[str, Any] = {"memory": "auto"}
    if gpus:
        fleet["cluster"] = {"gpus": gpus}
    if isinstance(keys, list) and keys:
        fleet["gateway"] = {"api_keys": [_ENV.sub(r"env:\1", str(key)) for key in keys]}
        reading.take(("apiKeys",), "gateway.api_keys")
    return fleet


def _model(
    reading: Reading,
    at: KeyPath,
    name: str,
    model: dict[str, Any],
    macros: Mapping[str, Any],
    environ: Mapping[str, str],
) -> int:
    """Read one model; returns how many GPUs it needs."""
    where = (*at, "cmd")

    def say(part: str, taken: bool, words: str) -> None:
        (reading.take if taken else reading.leave)(where, words, part)

    try:
        command = _filled(model["cmd"], macros, environ)
        served = read_command(command, say)
    except NoVllmError as error:
        reading.leave(at, str(error))
        return 0
    aliases = [str(alias) for alias in model.get("aliases") or ()]
    entry = reading.add(name, served.model)
    reading.call(entry, name, *aliases)
    if aliases:
        reading.take((*at, "aliases"), "aliases")
    limit = model.get("concurrencyLimit")
    if isinstance(limit, int) and limit > 0:
        entry["limits"] = {"max_concurrency": limit}
        reading.take((*at, "concurrencyLimit"), f"limits.max_concurrency: {limit}; more requests wait")
    return served.gpus


def _filled(text: str, macros: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """A command with macros and variables filled in. A variable that is a whole word stays one.

    Raises:
        NoVllmError: a variable is not set.
    """
    for _ in macros:  # which may name others
        text = _MACRO.sub(partial(_macro, macros), text)
    text = re.sub(r"(?<!\S)\$\{env\.(\w+)\}(?!\S)", r"env:\1", text)
    if missing := [name for name in _ENV.findall(text) if name not in environ]:
        raise NoVllmError(f"the environment variable {missing[0]} is not set; export it, and import again")
    return _ENV.sub(lambda match: environ[match[1]], text)


def _macro(macros: Mapping[str, Any], match: re.Match[str]) -> str:
    value = macros.get(match[1])
    return match[0] if value is None else str(value)


def _groups(data: Mapping[str, Any]) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Groups stood at the top in earlier versions."""
    for path in (("groups",), ("routing", "router", "settings", "groups")):
        found: Any = data
        for key in path:
            found = _mapping(found).get(key)
        for name, group in _mapping(found).items():
            if isinstance(group, dict):
                yield (*path, str(name)), group


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
