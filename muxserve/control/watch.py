"""Whether a fleet file, or a file that belongs to it, has changed."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path

from muxserve.config.include import FleetFiles, files_of

_Mark = tuple[object, ...]


class FileWatch:
    """The files of a fleet as they were when the fleet was made of them last.

    Files are looked at, and not waited for: a ConfigMap of Kubernetes is replaced by renaming a link above its files,
    which is no event of theirs, and network file systems send none at all. A file counts as changed when it has another
    inode, size or time, and has kept them for two looks: an editor may write it in parts.

    Args:
        file: the fleet file.
        environ: variables that may name included files.
    """

    def __init__(self, file: Path, environ: Mapping[str, str]) -> None:
        self._file = file
        self._environ = environ
        self._files = FleetFiles([file])
        self._seen: _Mark = ()
        self._applied = self._look()

    def changed(self) -> bool:
        """Whether there is something to apply that was not there before; then it counts as applied. Blocks for a few
        system calls."""
        before, now = self._seen, self._look()
        if now != before or now == self._applied:
            return False
        self._applied = now
        return True

    def _look(self) -> _Mark:
        marks = _marks(self._files)
        if marks != self._seen:
            self._files = files_of(self._file, self._environ)
            marks = _marks(self._files)
        self._seen = marks
        return marks


def _marks(files: FleetFiles) -> _Mark:
    return (*map(_mark, files.read), *(tuple(sorted(glob.glob(pattern))) for pattern in files.patterns))


def _mark(file: Path) -> _Mark:
    try:
        found = os.stat(file)
    except (OSError, ValueError) as error:
        return file, str(error)
    return file, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
