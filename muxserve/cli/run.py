"""`muxserve run`: serve models by their names alone."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from muxserve.cli.deploy import serve
from muxserve.cli.output import command_line, errors, escape, print_error
from muxserve.cli.settings import DeploySettings, RunSettings
from muxserve.cluster.machine import vllm_without_cuda
from muxserve.config import FleetError, parse_fleet
from muxserve.config.problems import Problem, format_path
from muxserve.gpu import nvml
from muxserve.net.exit_codes import ExitCode

_HUB = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_NAME_LENGTH = 64


class NoModelError(ValueError):
    """A word that is neither a directory nor a name of the hub; the message says what to do."""


def run(settings: RunSettings) -> int:
    """Serve models until Ctrl-C; returns the exit code when that has ended."""
    try:
        declared = models_of(settings.models)
    except NoModelError as error:
        print_error(str(error))
        return ExitCode.WRONG
    fleet: dict[str, object] = {"models": declared}
    if gpus := _default_gpus() if settings.gpus is None else settings.gpus:
        fleet = {"cluster": {"gpus": gpus}, **fleet}
    if settings.port is not None:
        fleet = {"gateway": {"port": settings.port}, **fleet}
    head = f"# Written by `{command_line()}`; docs/fleet-file.md explains every key.\n"
    text = head + yaml.safe_dump(fleet, sort_keys=False)
    with tempfile.TemporaryDirectory(prefix="muxserve-run-") as directory:
        file = settings.write or Path(directory) / "fleet.yaml"
        try:
            with file.open("x") as new:
                new.write(text)
        except OSError as error:
            print_error(f"--write: {file} cannot be written: {error.strerror}; nothing was started")
            return ExitCode.WRONG
        if settings.write is not None:
            errors.print(f"- the fleet file is written: `muxserve deploy {escape(str(file))}` serves the same")
        try:
            return serve(parse_fleet(text, str(file), Path.cwd()), DeploySettings(fleet=file, host=settings.host))
        except FleetError as error:
            for problem in error.problems:
                print_error(_words(problem, settings.models))
            write = "" if settings.write else "; `--write FILE` writes the fleet file, in which every key can be set"
            errors.print(f"nothing was started{write}")
            return ExitCode.WRONG


def models_of(words: Sequence[str]) -> list[dict[str, object]]:
    """The models of a fleet file, each from a directory with a checkpoint or a name of the hub. It is named after the
    last part of that; the whole name of the hub is its alias.

    Raises:
        NoModelError: a word is neither, or stands twice.
    """
    found = [_source(word) for word in words]
    lasts = [Path(value).name for _, value in found]
    models: list[dict[str, object]] = []
    for (key, value), last in zip(found, lasts, strict=True):
        parts = Path(value).parts[-2:] if lasts.count(last) > 1 else (last,)
        name = re.sub(r"[^A-Za-z0-9._-]", "-", "-".join(parts)).lstrip("._-")[:_NAME_LENGTH] or "model"
        if any(model["name"] == name for model in models):
            raise NoModelError(f"{value} stands twice, or has the name of another one ({name}); give each model once")
        aliases = {"aliases": [value]} if key == "hub" and value != name else {}
        models.append({"name": name, key: value, **aliases})
    return models


def _source(word: str) -> tuple[str, str]:
    """The key of a fleet file for that word, and its value."""
    path = Path(word).expanduser()
    if path.is_dir():
        return "path", str(path.resolve())
    if path.exists():
        raise NoModelError(f"{word} is a file; give the directory of a checkpoint, or `muxserve deploy` a fleet file")
    if _HUB.fullmatch(word):
        return "hub", word
    raise NoModelError(
        f"{word}: there is no such directory, and a name of the Hugging Face hub is organisation/name, such as "
        "Qwen/Qwen3-0.6B"
    )


def _default_gpus() -> int:
    """One where this vLLM can use it; the fleet runs on the CPU otherwise."""
    return int(bool(nvml.machine().gpus) and not vllm_without_cuda())


def _words(problem: Problem, asked: Sequence[str]) -> str:
    """A mistake by what its user wrote, which is not a file."""
    match problem.path:
        case ("models", int(index), "hub" | "path" | "name"):
            return f"{asked[index]}: {problem.message}"
        case ("models", int(index), *rest):
            return f"{asked[index]}: {format_path(tuple(rest))}: {problem.message}"
        case ():
            return problem.message
    return f"{format_path(problem.path)}: {problem.message}"
