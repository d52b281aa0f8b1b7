"""Does the tasks. In the worker's thread."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable

from muxserve.memory import MemoryManagerError, MemoryManagerGone
from muxserve.migration.local_pool import LocalPool
from muxserve.migration.remote_pools import RemotePools
from muxserve.migration.tasks import CopyOver, Gather, JoinPool, LeavePool, Outcome, Task, TaskFailed, Tidy, Write

log = logging.getLogger(__name__)


class CopyWorker:
    """Does tasks in order. `done_fd` becomes readable when outcomes can be taken with `done`.

    A task may be done at once by the caller's thread, if the other one has nothing to do: handing it over and back can
    take longer than a short task.

    Args:
        nice: how much the thread gives way to others: engines are to be slowed as little as can be.
    """

    def __init__(self, do: Callable[[Task], Outcome], nice: int) -> None:
        self._do = do
        self._nice = nice
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Task, Outcome]] = queue.SimpleQueue()
        self.done_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waiting = 0
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        self._thread.start()

    def start(self, task: Task, at_once: bool = False) -> None:
        """Do this after all that was started before; here and now, if that is possible and wanted."""
        self._waiting += 1
        if at_once and self._waiting == 1:
            self._done.put((task, self._do(task)))
            os.eventfd_write(self.done_fd, 1)
        else:
            self._tasks.put(task)

    def done(self) -> list[tuple[Task, Outcome]]:
        """What was done since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.done_fd)
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        self._waiting -= len(found)
        return found

    def close(self) -> None:
        """End the thread when it has done what it was given."""
        self._tasks.put(None)
        self._thread.join()
        os.close(self.done_fd)

    def _run(self) -> None:
        # On Linux a thread has a niceness of its own. One that may not be had is no reason not to copy.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while (task := self._tasks.get()) is not None:
            self._done.put((task, self._do(task)))
            os.eventfd_write(self.done_fd, 1)


class CopyExecutor:
    """Carries out tasks one after another; nothing is raised."""

    def __init__(self, local: LocalPool, remote: RemotePools) -> None:
        self._local = local
        self._remote = remote

    def do(self, task: Task) -> Outcome:
        """Carry out one task."""
        try:
            return self._do(task)
        except (MemoryManagerGone, MemoryManagerError, IndexError, ValueError) as error:
            return TaskFailed(str(error))
        except Exception as error:
            log.exception("%s failed", type(task).__name__)
            return TaskFailed(f"{type(error).__name__}: {error}")

    def _do(self, task: Task) -> Outcome:
        match task:
            case CopyOver():
                source = self._local.pages(task.model)
                with self._remote.writing(task.move, task.model) as destination:
                    for ours, theirs in zip(source, destination, strict=True):
                        ours.copy_to(task.source, theirs, task.destination, task.part)
            case Gather():
                return [pages.gather(task.source, task.part) for pages in self._local.pages(task.model)]
            case Write():
                with self._local.writing(task.model, task.life) as pages:
                    pages[task.rank].scatter(task.data, task.blocks, task.part)
            case JoinPool():
                return self._remote.join(task)
            case LeavePool():
                self._remote.leave(task.move)
            case Tidy():
                self._remote.tidy()
        return None
