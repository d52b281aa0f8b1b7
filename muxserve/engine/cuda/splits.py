"""Into how many parts FlashAttention 3 may cut a context: the bound from which it allocates its partial results.

The kernel's own choice looks at the KV heads of a sequence to see whether the GPU is full. With heads folded into
sequences it sees one, and would take a split in 128 parts for a good idea in batches that fill the GPU many times; its
partial results would then take gigabytes. The bound is found here from all rows instead.
"""

from __future__ import annotations

from dataclasses import dataclass

# Queries (times query heads) and context tokens that one thread block works on, about: enough to tell full from idle.
_TILE_QUERIES = 64
_TILE_CONTEXT = 128
_MAX_SPLITS = 32
# Contexts up to this many tiles are not worth a split.
_SHORT = 4
# The partial results of a batch, float32.
MAX_PARTIAL_BYTES = 64 << 20


@dataclass(frozen=True)
class Splits:
    """For rows of `group` query heads of size `head_dim`, `kv_heads` rows a request, on `multiprocessors`."""

    group: int
    kv_heads: int
    head_dim: int
    multiprocessors: int

    def choose(self, tokens: int, max_query_len: int, max_seq_len: int) -> int:
        """For a batch of `tokens` tokens whose longest query and context are given.

        As the kernel does without folding, one sequence is assumed: it cannot know that a batch holds one long context
        among many short ones. What each row really uses of the bound is decided on the GPU.
        """
        busy = self.kv_heads * -(-max_query_len * self.group // _TILE_QUERIES)
        context = -(-max_seq_len // _TILE_CONTEXT)
        if busy >= 0.8 * self.multiprocessors or context <= _SHORT:
            return 1
        return self._within(tokens, min(-(-self.multiprocessors // busy), context, _MAX_SPLITS))

    def fixed(self, tokens: int, most: int) -> int:
        """For a captured graph of `tokens` tokens, at most `most`."""
        return self._within(tokens, most)

    def _within(self, tokens: int, splits: int) -> int:
        """As many as the partial results leave room for, at least one."""
        one = 4 * tokens * self.kv_heads * self.group * (self.head_dim + 1)
        return max(1, min(splits, MAX_PARTIAL_BYTES // max(one, 1)))
