"""One fleet of several files, and what its models have in common: `include` and `model_defaults`.

Both are resolved in the plain data, before anything is checked, so that a key has one meaning wherever it stands. Each
key keeps the place that it was written at.
"""

from __future__ import annotations

import copy
import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from muxserve.config.problems import FleetError, KeyPath, Problem, shown
from muxserve.config.source import Source, is_extension, parse_yaml, read_text
from muxserve.config.variables import ENV, anchor, key_files, unset

INCLUDE, DEFAULTS = "include", "model_defaults"
_KIND = "fleet file"
_MOST_FILES = 1000


def parse_whole(text: str, file: str, base: Path, environ: Mapping[str, str], local: bool = True) -> Source:
    """The fleet file `text` with the files that it includes; paths in it are relative to `base`.

    Mappings of several files are merged key by key, and `models` is one list of all. Anything else stands in one file.
    Relative paths of an included file are made absolute. Only a `local` text may include files.

    Raises:
        FleetError: one of the files cannot be read, is no YAML, is included twice, or repeats what another one says.
    """
    return _Files(environ, local).whole(text, file, base)


class FleetFiles(NamedTuple):
    """The files that make a fleet: the fleet file, those that it includes, and those with keys; and the patterns that
    included files were looked up by."""

    read: Sequence[Path]
    patterns: Sequence[str] = ()


def files_of(file: Path, environ: Mapping[str, str]) -> FleetFiles:
    """The files of a fleet, as far as they can be read now."""
    files, keys = _Files(environ, local=True), list[Path]()
    try:
        source = files.whole(read_text(file, _KIND), str(file), file.parent)
        keys += key_files(source.data, file.parent)
    except FleetError:
        pass  # whoever reads the file to serve it says so
    return FleetFiles(list(dict.fromkeys([file, *files.read, *keys])), files.patterns)


class _Files:
    """The files that were read, each with the place that includes it; those that are being read."""

    def __init__(self, environ: Mapping[str, str], local: bool) -> None:
        self._environ = environ
        self._local = local
        self._chain: list[Path] = []
        self.places: dict[Path, str] = {}
        self.read: list[Path] = []
        self.patterns: list[str] = []

    def whole(self, text: str, file: str, base: Path) -> Source:
        source = parse_yaml(text, file)
        self._chain.append((base / Path(file).name).resolve())
        problems = list(self._include(source, base)) if isinstance(source.data, dict) else []
        if problems:
            raise FleetError(problems)
        return source

    def _include(self, source: Source, base: Path) -> Iterator[Problem]:
        """Merge into `source` what it includes."""
        given = source.data.get(INCLUDE)
        names = [given] if isinstance(given, str) else given
        if given is None:
            return
        if not isinstance(names, list) or not all(map(_is_path, names)):
            yield source.problem((INCLUDE,), f"must be a file or a list of files, not {shown(given)}")
            return
        if not self._local:
            yield source.problem((INCLUDE,), "a file from elsewhere cannot include files; write all in one")
            return
        for number, name in enumerate(names):
            at: KeyPath = (INCLUDE, number) if isinstance(given, list) else (INCLUDE,)
            yield from self._add(source, base, at, name)

    def _add(self, source: Source, base: Path, at: KeyPath, name: str) -> Iterator[Problem]:
        if name.startswith(ENV):
            variable = name.removeprefix(ENV)
            name = self._environ.get(variable, "")
            if not name:
                yield source.problem(at, unset(variable))
                return
        name = os.path.expanduser(name)
        if not glob.has_magic(name):
            found = [name]
        else:
            found = sorted(glob.glob(name, root_dir=base))
            if not found:
                yield source.problem(at, f"{shown(name)} matches no file")
            self.patterns.append(os.path.join(glob.escape(str(base)), name))
        for each in found:
            # Shown as the command was given the first file.
            yield from self._merge(source, at, Path(source.file).parent / each, base / each)

    def _merge(self, source: Source, at: KeyPath, shown_as: Path, path: Path) -> Iterator[Problem]:
        real = path.resolve()
        if real in self._chain:
            yield source.problem(at, f"is a circle: {shown_as} includes this file; remove one of the two")
            return
        if real in self.places:
            yield source.problem(at, f"{shown_as} is included at {self.places[real]} already")
            return
        if len(self.places) == _MOST_FILES:
            yield source.problem(at, f"more than {_MOST_FILES:,} files are included")
            return
        self.places[real] = source.where(at)
        self.read.append(path)
        try:
            text = read_text(path, _KIND)
        except FleetError as error:
            yield source.problem(at, f"{shown_as}: {error.problems[0].message}")
            return
        try:
            other = parse_yaml(text, str(shown_as))
        except FleetError as error:
            yield from error.problems
            return
        if not isinstance(other.data, dict):
            yield other.problem((), "must be a mapping, as a fleet file is")
            return
        self._chain.append(real)
        yield from self._include(other, path.parent)
        self._chain.pop()
        anchor(other.data, path.parent.absolute())
        yield from _merged(source, other)


def _is_path(name: object) -> bool:
    return isinstance(name, str) and bool(name) and "\0" not in name


def _merged(into: Source, other: Source) -> Iterator[Problem]:
    """Put what `other` says into `into`; what both say is a mistake."""
    own, models = into.data.get("models"), other.data.get("models")
    offset = len(own) if isinstance(own, list) else 0
    if isinstance(models, list) and (own is None or isinstance(own, list)):
        into.data["models"] = [*(own or ()), *models]
    elif models is not None:
        yield other.problem(("models",), "must be a list, here and where it is included")
    rest = {key: value for key, value in other.data.items() if key not in ("models", INCLUDE) and not is_extension(key)}
    yield from _merge_mappings(into, into.data, other, rest, ())
    for path, place in other.places.items():
        if path[:1] == ("models",) and len(path) > 1 and isinstance(path[1], int):
            path = ("models", path[1] + offset, *path[2:])
        into.places.setdefault(path, place)


def _merge_mappings(
    into: Source, own: dict[Any, Any], other: Source, given: Mapping[Any, Any], at: KeyPath
) -> Iterator[Problem]:
    for key, value in given.items():
        path = (*at, str(key))
        if key not in own:
            own[key] = value
        elif isinstance(own[key], dict) and isinstance(value, dict):
            yield from _merge_mappings(into, own[key], other, value, path)
        else:
            yield other.problem(path, f"is given at {into.where(path)} already; keep one")


# ---------------------------------------------------------------- what models have in common


def spread_defaults(source: Source, keys: frozenset[str]) -> None:
    """Give every model what `model_defaults` says and it does not say itself; mappings are merged key by key.

    Args:
        keys: those that may stand there; about others the schema speaks.
    """
    given, models = source.data.get(DEFAULTS), source.data.get("models")
    if not isinstance(given, dict) or not isinstance(models, list):
        return
    given = {key: value for key, value in given.items() if key in keys}
    below = [(path[1:], place) for path, place in source.places.items() if len(path) > 1 and path[0] == DEFAULTS]
    places = [(path, place) for path, place in below if path[0] in keys]
    for index, model in enumerate(models):
        if isinstance(model, dict):
            models[index] = _with_defaults(model, given)
            for path, place in places:
                source.places.setdefault(("models", index, *path), place)


def _with_defaults(own: Mapping[Any, Any], defaults: Mapping[Any, Any]) -> dict[Any, Any]:
    result = dict(own)
    for key, value in defaults.items():
        if key not in own:
            result[key] = copy.deepcopy(value)
        elif isinstance(own[key], dict) and isinstance(value, dict):
            result[key] = _with_defaults(own[key], value)
    return result
