"""Mistakes in a fleet file, said so that the user can mend them: where, what, and what to do instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

KeyPath = tuple[str | int, ...]
MOST_PROBLEMS = 100
_MOST_CHARACTERS = 80


@dataclass(frozen=True)
class Problem:
    """One mistake. `line` is 1-based; None when the mistake has no place in the file. `beside`: it is one of another
    file that this one names, such as a checkpoint, and may be gone although this file stays as it is."""

    message: str
    file: str
    line: int | None = None
    path: KeyPath = ()
    beside: bool = False

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {format_path(self.path)}: {self.message}" if self.path else f"{place}: {self.message}"


class FleetError(Exception):
    """A fleet file that cannot be served; `problems` lists the mistakes, in the order of the file: all of them, or of
    very many the first, and how many more there are."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        unique = dict.fromkeys(problems)
        files = list(dict.fromkeys(problem.file for problem in unique))
        ordered = sorted(unique, key=lambda each: (files.index(each.file), each.line or 0, list(map(str, each.path))))
        self.problems = ordered[:MOST_PROBLEMS]
        if more := len(ordered) - len(self.problems):
            self.problems.append(Problem(f"{more:,} mistakes more", ordered[-1].file))
        super().__init__("\n".join(map(str, self.problems)))

    @property
    def beside(self) -> bool:
        """Whether all mistakes are of files that this one names."""
        return all(problem.beside for problem in self.problems)


def format_path(path: KeyPath) -> str:
    """`("models", 1, "rate")` as `models[1].rate`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shown(value: object) -> str:
    """A value as the user wrote it, cut short if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no numbers of many thousand digits
        return "a number of very many digits"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be; None when nothing is near."""
    if len(word) > _MOST_CHARACTERS:
        return None
    by_plain = {candidate.lower().replace("-", "_"): candidate for candidate in known}
    plain = word.lower().replace("-", "_").replace(" ", "_")
    matches = difflib.get_close_matches(plain, by_plain, n=1, cutoff=0.65)
    return by_plain[matches[0]] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean "x"?`, or the list of what is known when nothing is near."""
    known = list(known)
    near = closest(word, known)
    if near is not None:
        return f'; did you mean "{near}"?'
    return f"; known here: {', '.join(known)}" if known else ""
