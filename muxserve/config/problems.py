"""Mistakes in a fleet file, said so that the user can mend them: where, what, and what to do instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One mistake. `line` is 1-based; None when the mistake has no place in the file."""

    message: str
    file: str
    line: int | None = None
    path: KeyPath = ()

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {format_path(self.path)}: {self.message}" if self.path else f"{place}: {self.message}"


class FleetError(Exception):
    """A fleet file that cannot be served; `problems` lists every mistake, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        unique = dict.fromkeys(problems)
        self.problems = sorted(unique, key=lambda problem: (problem.line or 0, list(map(str, problem.path))))
        super().__init__("\n".join(map(str, self.problems)))


def format_path(path: KeyPath) -> str:
    """`("models", 1, "rate")` as `models[1].rate`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be; None when nothing is near."""
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
