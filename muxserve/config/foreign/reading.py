"""Another program's configuration file, of which each key is either taken into the fleet file or said not to be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from muxserve.config.problems import KeyPath, format_path
from muxserve.config.source import Source
from muxserve.config.values import plain_name

# By key path, `*` for any key or position.
Reasons = Mapping[tuple[str, ...], str]
_UNKNOWN = "MuxServe has no such setting"


class KeyNote(NamedTuple):
    """What became of one key: the key of the fleet file that has it, or why none has."""

    line: int
    key: str
    taken: bool
    words: str


class Reading:
    """The file, and what has been said of its keys. `models` are those of the fleet, as far as it is built;
    `by_name` has them by the names that the file has for them.

    Args:
        reasons: why keys are not taken, of those that the format is known to have.
    """

    def __init__(self, source: Source, reasons: Reasons) -> None:
        self._source = source
        self._reasons = reasons
        self._said: set[KeyPath] = set()
        self._notes: list[KeyNote] = []
        self.models: list[dict[str, Any]] = []
        self.by_name: dict[str, dict[str, Any]] = {}

    @property
    def data(self) -> dict[str, Any]:
        """The file's data."""
        data: dict[str, Any] = self._source.data
        return data

    def take(self, path: KeyPath, where: str, part: str = "") -> None:
        """The key at `path`, or `part` of its text, is `where` in the fleet file."""
        self._note(path, part, True, where)

    def leave(self, path: KeyPath, why: str, part: str = "") -> None:
        """The key at `path`, or `part` of its text, is not taken."""
        self._note(path, part, False, why)

    def _note(self, path: KeyPath, part: str, taken: bool, words: str) -> None:
        self._said.add(path)
        place = self._source.place(path)
        key = f"{format_path(path)} {part}".rstrip()
        self._notes.append(KeyNote(place.line if place else 1, key, taken, words))

    def notes(self) -> list[KeyNote]:
        """What became of every key, in the order of the file."""
        above = {path[:end] for path in self._said for end in range(len(path))}
        for path, why in self._unsaid(self.data, (), above):
            self.leave(path, why)
        return sorted(self._notes, key=lambda note: note.line)

    def _unsaid(self, data: object, at: KeyPath, above: set[KeyPath]) -> Iterator[tuple[KeyPath, str]]:
        """The uppermost keys of which nothing was said yet, and the reasons why they are not taken."""
        if at in self._said:
            return
        why = next((words for pattern, words in self._reasons.items() if _matches(pattern, at)), None)
        longer = (pattern for pattern in self._reasons if len(pattern) > len(at))
        deeper = at in above or any(_matches(pattern[: len(at)], at) for pattern in longer)
        if why is None and deeper and isinstance(data, (dict, list)):
            children = data.items() if isinstance(data, dict) else enumerate(data)
            for key, value in children:
                yield from self._unsaid(value, (*at, key if isinstance(data, list) else str(key)), above)
        else:
            yield at, why or _UNKNOWN

    def add(self, asked: str, model: dict[str, Any]) -> dict[str, Any]:
        """A model more; under the name that clients call it by, or one like it."""
        name = plain_name(asked) or "model"
        taken = {each["name"] for each in self.models}
        free = (each for each in (name, *(f"{name[:60]}-{n}" for n in range(2, len(taken) + 3))) if each not in taken)
        entry = {"name": next(free), **model}
        self.models.append(entry)
        return entry

    def call(self, model: dict[str, Any], *names: str) -> None:
        """Clients call a model by these names, too."""
        aliases = dict.fromkeys([*model.get("aliases", ()), *names])
        aliases.pop(model["name"], None)
        if aliases:
            model["aliases"] = list(aliases)
        self.by_name |= dict.fromkeys(names, model)


def _matches(pattern: tuple[str, ...], path: KeyPath) -> bool:
    return len(pattern) == len(path) and all(part in ("*", str(key)) for part, key in zip(pattern, path, strict=True))


def checkpoint(model: str) -> dict[str, str] | None:
    """Where a model's checkpoint is, of the name that vLLM is given: a directory, or a hub id; None: in neither."""
    if model.startswith(("/", "./", "../", "~", "env:")):
        return {"path": model}
    return {"hub": model} if re.fullmatch(r"[\w.-]+/[\w.-]+", model) else None
