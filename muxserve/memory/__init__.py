"""Python side of the memory manager: its client, its starter, the loops that fold block tables; and memory of a process
that moves behind a file."""

from muxserve.memory._native import Hibernation, fold_decode, fold_prefill, fold_slots
from muxserve.memory.errors import MemoryManagerError, MemoryManagerGone

__all__ = ["Hibernation", "MemoryManagerError", "MemoryManagerGone", "fold_decode", "fold_prefill", "fold_slots"]
