"""Which version of vLLM is installed, for the few places that differ between the versions that MuxServe supports.

Those places are `muxserve.vllm.{engine,gateway,weight}_seam` and the lists of internals. `if since("0.33.0"):` there is
the one form of it; `muxserve.vllm.contract` reads for each version the branch that it takes.
"""

from __future__ import annotations

import functools


def numbers(version: str) -> tuple[int, ...]:
    """A release's numbers, without what names a build: `0.33.0+cpu` is (0, 33, 0)."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())


@functools.cache
def since(version: str) -> bool:
    """Whether the installed vLLM is `version` or a later one."""
    import vllm

    return numbers(vllm.__version__) >= numbers(version)
