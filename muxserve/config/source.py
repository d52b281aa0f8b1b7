"""YAML with places: plain data, and the line on which each key and value stands."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from muxserve.config.problems import FleetError, KeyPath, Problem

_MAX_FILE_BYTES = 4 << 20
_MAX_DEPTH = 64
_MAX_NODES = 20_000
_MAX_REPEATED = 100_000  # aliases can make a small file a huge one
# Written in C where PyYAML was built so; it neither recurses nor keeps what it has read.
_Events: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class SourcePlace(NamedTuple):
    """Where a key or value stands: its file, the 1-based line, and its key path in that file."""

    file: str
    line: int
    path: KeyPath


@dataclass
class Source:
    """Parsed YAML. `places` has the place of each key path (of the key, for what stands in a mapping): in `file`, or in
    a file that it includes."""

    file: str
    data: Any = None
    places: dict[KeyPath, SourcePlace] = field(default_factory=dict)

    def place(self, path: KeyPath) -> SourcePlace | None:
        """The place of `path`, on the line of its nearest parent that is in a file."""
        for end in range(len(path), -1, -1):
            if found := self.places.get(path[:end]):
                return found._replace(path=(*found.path, *path[end:]))
        return None

    def problem(self, path: KeyPath, message: str, beside: bool = False) -> Problem:
        """A problem at `path`; `beside` as in `Problem`."""
        place = self.place(path)
        found = Problem(message, *place) if place else Problem(message, self.file, None, path)
        return replace(found, beside=beside)

    def where(self, path: KeyPath) -> str:
        """File and line of `path`."""
        place = self.place(path)
        return f"{place.file}:{place.line}" if place else self.file

    def line_from(self, path: KeyPath, other: KeyPath) -> str:
        """Where `path` stands, for a sentence about `other`: "line 5", with its file where that is another one."""
        place, own = self.place(path), self.place(other)
        same = place and own and place.file == own.file
        return f"line {place.line}" if place and same else self.where(path)


def is_extension(key: object) -> bool:
    """Whether a key at the top is the user's own, as in Compose files: a place for what YAML anchors repeat."""
    return isinstance(key, str) and key.startswith("x-")


def read_text(path: str | os.PathLike[str], kind: str) -> str:
    """The text of a file that a user wrote, called `kind` in what is said about it.

    Raises:
        FleetError: it cannot be read, is too large or no text.
    """
    file = Path(path)
    try:
        if file.is_dir():
            raise FleetError([Problem(f"is a directory; give the {kind} itself", str(path))])
        data = file.read_bytes()
    except FileNotFoundError:
        raise FleetError([Problem("there is no such file", str(path))]) from None
    except OSError as error:
        raise FleetError([Problem(f"cannot be read: {error.strerror}", str(path))]) from None
    if len(data) > _MAX_FILE_BYTES:
        raise FleetError([Problem(f"is too large for a {kind} (over 4 MiB)", str(path))])
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise FleetError([Problem("is not UTF-8 text", str(path), line)]) from None


def parse_yaml(text: str, file: str) -> Source:
    """Read one YAML document.

    Raises:
        FleetError: not YAML, an empty file, a key given twice, more than one document, or far too much.
    """
    source = Source(file)
    _check_size(text, source)
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                raise FleetError([Problem("the file is empty; it needs at least `models:`", file, 1)])
            problems: list[Problem] = []
            _walk(node, (), source, problems)
            if problems:
                raise FleetError(problems)
            source.data = loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise FleetError([Problem(f"not valid YAML: {what}", file, mark.line + 1 if mark else None)]) from None
    except RecursionError:
        raise FleetError([Problem("nested too deeply", file)]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise FleetError([Problem(f"not valid YAML: {error}", file)]) from None
    return source


def _check_size(text: str, source: Source) -> None:
    """Whether a file is so small that it can be read at once. What is no YAML is not looked at further.

    Raises:
        FleetError: it has too many entries, or they are nested too deeply.
    """
    nodes = depth = 0
    try:
        for event in yaml.parse(text, Loader=_Events):
            nodes += isinstance(event, yaml.NodeEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH or nodes > _MAX_NODES:
                line = event.start_mark.line + 1 if event.start_mark is not None else 1
                what = "is nested too deeply" if depth > _MAX_DEPTH else f"has more than {_MAX_NODES:,} keys and values"
                raise FleetError([Problem(f"the file {what}", source.file, line)])
    except (yaml.YAMLError, ValueError):
        return


def _walk(node: yaml.Node, path: KeyPath, source: Source, problems: list[Problem]) -> None:
    """Note the lines of `node` and all below it, and the keys given twice."""
    if node.start_mark is not None:
        source.places.setdefault(path, SourcePlace(source.file, node.start_mark.line + 1, path))
    if len(path) > _MAX_DEPTH or len(source.places) > _MAX_REPEATED:
        if not problems or "nested" not in problems[-1].message:
            problems.append(source.problem(path[:_MAX_DEPTH], "nested too deeply, or repeated too often"))
        return
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*path, index), source, problems)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value)
            line = key.start_mark.line + 1
            where = (*path, name)
            if name in seen and name != "<<":
                message = f"given twice (first on line {seen[name]}); keep one"
                problems.append(Problem(message, source.file, line, where))
            seen.setdefault(name, line)
            source.places.setdefault(where, SourcePlace(source.file, line, where))
            _walk(value, where, source, problems)
