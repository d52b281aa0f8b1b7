"""Names for what full blocks hold, by which requests find the blocks that they have in common."""

from __future__ import annotations

from muxserve.workload.trace import Content

# What a block holds, and all before it: a hash of the pieces before that of its last token, that one's name, and how
# much of it there is up to the block's end.
Key = tuple[int, str, int]


def extend_keys(found: list[Key], content: Content, blocks: int, size: int) -> None:
    """Have the keys of the first `blocks` blocks of `size` tokens, of which some may be there."""
    before, begins, end, last = 0, 0, (len(found) + 1) * size, len(content) - 1
    for place, (name, tokens) in enumerate(content):
        if len(found) >= blocks:
            return
        ends = begins + tokens if place < last else 1 << 60
        while end <= ends and len(found) < blocks:
            found.append((before, name, end - begins))
            end += size
        begins = ends
        before = hash((before, name, tokens))
