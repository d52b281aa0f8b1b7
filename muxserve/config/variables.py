"""Variables of the environment in a fleet file: `env:NAME`, wherever a secret or a path stands.

Those of secrets are looked up with their values (`checks.resolve`): what is secret stands in no error. Paths are filled
in here. `${NAME}`, as shells have it, would be taken as it stands: a key that anybody can guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from muxserve.config.problems import KeyPath, Problem
from muxserve.config.source import Source

ENV, FILE = "env:", "file:"
_SHELL = re.compile(r"\$\{(\w*)")
# By key, `*` for each entry of a list or mapping.
_SECRETS = (
    ("gateway", "api_keys"),
    ("gateway", "api_keys", "*"),
    ("gateway", "api_keys", "*", "key"),
    ("tenants", "*", "keys", "*"),
    ("models", "*", "fallback", "key"),
    ("model_defaults", "fallback", "key"),
)
# Relative to the file that they stand in.
_RELATIVE = (
    ("models", "*", "path"),
    ("models", "*", "architecture"),
    ("models", "*", "adapters", "*"),
    ("gateway", "usage_file"),
    ("gateway", "tls", "cert"),
    ("gateway", "tls", "key"),
    ("gateway", "responses"),
    ("gateway", "batches"),
)
# Options of vLLM: any of them may be a path or a secret.
_PATHS = (
    *_RELATIVE,
    ("models", "*", "engine_args", "*"),
    ("models", "*", "engine_args", "speculative_config", "model"),
)
# No paths, where these may stand.
_WORDS = ("on", "off")


def unset(name: str) -> str:
    """What is said of a variable that is not set, where a path may stand."""
    return f"the environment variable {name} is not set; export it, or write its value here"


def fill_in(source: Source, environ: Mapping[str, str], local: bool) -> Iterator[Problem]:
    """Put the values of variables where paths name them; every mistake in that.

    Args:
        local: whether the file is of whoever may read `environ`; otherwise no path may name a variable, whose value an
            error might show.
    """
    for pattern in (*_SECRETS, *_PATHS):
        for _, _, value, path in _found(source.data, pattern):
            if shell := _SHELL.search(value):
                message = f"`${{{shell[1]}}}` would be taken as it stands; write `{ENV}{shell[1] or 'NAME'}` instead"
                yield source.problem(path, message)
    for pattern in _PATHS:
        for container, key, value, path in _found(source.data, pattern):
            if not value.startswith(ENV):
                continue
            name = value.removeprefix(ENV)
            if not local:
                yield source.problem(path, "names a variable, which a file from elsewhere may do for keys only")
            elif not environ.get(name):
                yield source.problem(path, unset(name))
            else:
                container[key] = environ[name]


def _found(data: Any, pattern: tuple[str, ...], at: KeyPath = ()) -> Iterator[tuple[Any, Any, str, KeyPath]]:
    """The texts at such places: what they are in, under which key, and their path."""
    first, rest = pattern[0], pattern[1:]
    if isinstance(data, dict):
        keys: list[Any] = list(data) if first == "*" else [first] if first in data else []
    elif isinstance(data, list) and first == "*":
        keys = list(range(len(data)))
    else:
        return
    for key in keys:
        path = (*at, key if isinstance(data, list) else str(key))
        if rest:
            yield from _found(data[key], rest, path)
        elif isinstance(data[key], str):
            yield data, key, data[key], path


def anchor(data: Any, directory: Path) -> None:
    """Make relative paths in the data of a file absolute, which stands in `directory`."""
    for pattern in _RELATIVE:
        for container, key, value, _ in _found(data, pattern):
            path = directory / Path(value).expanduser()
            # An architecture may be a name instead, such as Qwen/Qwen3-32B.
            if value not in _WORDS and not value.startswith(ENV) and (key != "architecture" or path.exists()):
                container[key] = str(path)
    for pattern in _SECRETS:
        for container, key, value, _ in _found(data, pattern):
            if value.startswith(FILE):
                container[key] = f"{FILE}{directory / Path(value.removeprefix(FILE)).expanduser()}"


def key_files(data: Any, directory: Path) -> Iterator[Path]:
    """The files that hold keys, of a fleet file in `directory`."""
    for pattern in _SECRETS:
        for _, _, value, _ in _found(data, pattern):
            if value.startswith(FILE):
                yield directory / Path(value.removeprefix(FILE)).expanduser()
