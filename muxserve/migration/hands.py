"""Does the tasks. In the worker's thread."""

from __future__ import annotations

import logging

from muxserve.memory import MemoryManagerError, MemoryManagerGone
from muxserve.migration.home import Home
from muxserve.migration.neighbours import Neighbours
from muxserve.migration.tasks import CopyOver, Failed, Gather, Join, Leave, Outcome, Task, Tidy, Write

log = logging.getLogger(__name__)


class Hands:
    """Carries out tasks one after another; nothing is raised."""

    def __init__(self, home: Home, neighbours: Neighbours) -> None:
        self._home = home
        self._neighbours = neighbours

    def do(self, task: Task) -> Outcome:
        """Carry out one task."""
        try:
            return self._do(task)
        except (MemoryManagerGone, MemoryManagerError, IndexError, ValueError) as error:
            return Failed(str(error))
        except Exception as error:
            log.exception("%s failed", type(task).__name__)
            return Failed(f"{type(error).__name__}: {error}")

    def _do(self, task: Task) -> Outcome:
        match task:
            case CopyOver():
                source = self._home.pages(task.model)
                with self._neighbours.writing(task.move, task.model) as destination:
                    for ours, theirs in zip(source, destination, strict=True):
                        ours.copy_to(task.source, theirs, task.destination)
            case Gather():
                return [pages.gather(task.source) for pages in self._home.pages(task.model)]
            case Write():
                with self._home.writing(task.model, task.life) as pages:
                    pages[task.rank].scatter(task.data, task.blocks)
            case Join():
                return self._neighbours.join(task)
            case Leave():
                self._neighbours.leave(task.move)
            case Tidy():
                self._neighbours.tidy()
        return None
