"""The command that starts an engine, as llama-swap's file has it: which program it is, and vLLM's options of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import yaml

from muxserve.config.foreign.reading import checkpoint
from muxserve.vllm.args import RESERVED
from muxserve.vllm.known import options

Say = Callable[[str, bool, str], None]

_API_SERVER = "vllm.entrypoints.openai.api_server"
_DTYPES = {"half": "float16", "float": "float32"}
_SHORT = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}
_SUFFIXES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Options that have a key of their own, of which the value is a whole number.
_COUNTS = {
    "max_model_len": "max_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "pipeline_parallel_size": "stages",
}
_DECIDED = {
    "tensor_parallel_size": "each model is split over all GPUs of its unit; it counts for `cluster.gpus`",
    "gpu_memory_utilization": "memory is planned for all models together: `cluster.gpu_memory`",
    "host": "one gateway listens for all models: `gateway.host`",
    "port": "one gateway listens for all models: `gateway.port`",
    "api_key": "one gateway asks for keys: `gateway.api_keys`",
    "enable_lora": "`adapters` says it",
    "device": "`cluster` says it",
}
# What llama.cpp's and Ollama's programs serve.
GGUF = "a GGUF file, which vLLM cannot load here; give `hub:` the repository with the safetensors that it was made from"


class NoVllmError(Exception):
    """The command starts no vLLM server; the message says what it starts."""


class Served(NamedTuple):
    """The keys of a model, and the GPUs that its engine had; 0: it was on a CPU."""

    model: dict[str, Any]
    gpus: int


def read_command(command: str, say: Say) -> Served:
    """The model that a command serves.

    Args:
        say: called for each of its options, with whether it is taken and where, or why not.

    Raises:
        NoVllmError: it serves no model with vLLM.
    """
    words = _words(command)
    arguments = _arguments(words)
    asked = {_key(name): values for name, values in arguments}
    model = asked.get("model", asked.get("", []))
    if not model:
        raise NoVllmError("the command names no model")
    place = checkpoint(_on_host(model[0], words))
    if place is None:
        raise NoVllmError(f"{model[0]} is neither a directory nor a hub id such as org/name")
    result: dict[str, Any] = dict(place)
    say("--model" if "model" in asked else model[0], True, f"{next(iter(place))}: {next(iter(place.values()))}")
    for name, values in arguments:
        if _key(name) not in ("model", ""):
            _option(result, name, values, say)
    on_cpu = asked.get("device") == ["cpu"] or any("cpu" in PurePosixPath(word).name for word in words[: _start(words)])
    sizes = [
        _number(asked[key][0]) or 1 for key in ("tensor_parallel_size", "pipeline_parallel_size") if asked.get(key)
    ]
    gpus = 1
    for size in sizes:
        gpus *= size
    return Served(result, 0 if on_cpu else gpus)


def _words(command: str) -> list[str]:
    lines = (line for line in command.splitlines() if not line.lstrip().startswith("#"))
    try:
        words = shlex.split("\n".join(lines).replace("\\\n", " "))
    except ValueError as error:
        raise NoVllmError(f"the command cannot be read: {error}") from None
    for shell in ("-c", "-lc"):
        if shell in words[1:2] and PurePosixPath(words[0]).name in ("bash", "sh", "zsh") and len(words) > 2:
            return _words(words[2])
    return words


def _start(words: Sequence[str]) -> int:
    """Where the options of vLLM's server begin.

    Raises:
        NoVllmError: it is another program.
    """
    for index, word in enumerate(words):
        if word == _API_SERVER or (word == "serve" and index and PurePosixPath(words[index - 1]).name == "vllm"):
            return index + 1
        # An image whose entry point is the server.
        if index and re.search(r"(^|/)vllm-(openai|cpu)[\w.-]*(:[\w.-]+)?$", word):
            return index + 1
    if any(word.endswith(".gguf") or "llama-server" in word or "llama.cpp" in word for word in words):
        raise NoVllmError(GGUF)
    program = PurePosixPath(words[0]).name if words else "nothing"
    raise NoVllmError(f"the command starts {program}, and MuxServe starts vLLM's engines only")


def _arguments(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Options with their values; what stands before the first one is called by an empty name."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for word in words[_start(words) :]:
        if re.match(r"--?[A-Za-z]", word):
            name, given, value = word.partition("=")
            found.append((name, [value] if given else []))
        else:
            found[-1][1].append(word)
    return found


def _key(name: str) -> str:
    plain = name.lstrip("-").replace("-", "_")
    return _SHORT.get(plain, plain)


def _on_host(model: str, words: Sequence[str]) -> str:
    """The path outside the container of what the command names in it."""
    for option, mounted in pairwise(words):
        host, _, inside = mounted.partition(":")
        inside = inside.split(":")[0]
        if option in ("-v", "--volume") and inside and model.startswith(inside.rstrip("/") + "/"):
            return host.rstrip("/") + model.removeprefix(inside.rstrip("/"))
    return model


def _option(model: dict[str, Any], name: str, values: list[str], say: Say) -> None:
    key = _key(name)
    value = values[0] if values else ""
    if key in _COUNTS and (number := _number(value)) is not None:
        model[_COUNTS[key]] = number
        say(name, True, f"{_COUNTS[key]}: {number}")
    elif key == "dtype" and value:
        model["dtype"] = _DTYPES.get(value, value)
        say(name, True, f"dtype: {model['dtype']}")
    elif key in ("enable_prefix_caching", "no_enable_prefix_caching"):
        model["prefix_caching"] = not key.startswith("no_") and value.lower() != "false"
        say(name, True, f"prefix_caching: {str(model['prefix_caching']).lower()}")
    elif key == "revision" and "hub" in model:
        model["revision"] = value
        say(name, True, f"revision: {value}")
    elif key == "served_model_name" and values:
        model["aliases"] = values
        say(name, True, f"aliases: {', '.join(values)}")
    elif key == "lora_modules" and (adapters := dict(_adapters(values))):
        model["adapters"] = adapters
        say(name, True, f"adapters: {', '.join(adapters)}")
    elif key in _DECIDED:
        say(name, False, _DECIDED[key])
    else:
        _passed_through(model, name, key, values, say)


def _passed_through(model: dict[str, Any], name: str, key: str, values: list[str], say: Say) -> None:
    known, value = options(), True if not values else _parsed(values)
    if key not in known and key.startswith("no_") and key.removeprefix("no_") in known:
        key, value = key.removeprefix("no_"), False
    if key in RESERVED:
        say(name, False, "MuxServe decides it")
    elif key not in known:
        say(name, False, "this vLLM has no such option")
    else:
        model.setdefault("engine_args", {})[key] = value
        say(name, True, f"engine_args.{key}")


def _parsed(values: list[str]) -> object:
    def one(text: str) -> object:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text

    return one(values[0]) if len(values) == 1 else [one(value) for value in values]


def _adapters(values: list[str]) -> Iterator[tuple[str, str]]:
    for value in values:
        name, given, path = value.partition("=")
        if given and checkpoint(path) == {"path": path}:
            yield name, path


def _number(text: str) -> int | None:
    match = re.fullmatch(r"(\d+)([kKmMgG]?)", text)
    return int(match[1]) * _SUFFIXES.get(match[2], 1) if match else None
