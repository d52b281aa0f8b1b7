"""Python side of the memory manager: its client, its starter, and the loops that fold block tables."""

from muxserve.memory._native import fold_decode, fold_prefill, fold_slots
from muxserve.memory.errors import MemoryManagerError, MemoryManagerGone

__all__ = ["MemoryManagerError", "MemoryManagerGone", "fold_decode", "fold_prefill", "fold_slots"]
