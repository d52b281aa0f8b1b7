"""What can be wrong with a workload; every message says what, where and what would be right."""

from __future__ import annotations

import os


class WorkloadError(ValueError):
    """A workload that cannot be made, read or mapped."""


class TraceError(WorkloadError):
    """A file that cannot be read or written; the message names it and the line (or the record of a JSON array)."""

    def __init__(self, path: str | os.PathLike[str], line: int, problem: str, unit: str = "line") -> None:
        super().__init__(f"{os.fspath(path)}, {unit} {line}: {problem}")
        self.path = os.fspath(path)
        self.line = line
        self.problem = problem
        self.unit = unit
