"""The controller's line to the global scheduler."""

from __future__ import annotations

from collections.abc import Callable

from muxserve import wire
from muxserve.cluster.line import Line

IDENTITY = b"controller"


class SchedulerLink(Line):
    """Known there as `controller`.

    Args:
        on_message: called with each message from it.
    """

    def __init__(self, address: str, on_message: Callable[[wire.Message], None]) -> None:
        super().__init__(address, IDENTITY, "global scheduler", on_message)
