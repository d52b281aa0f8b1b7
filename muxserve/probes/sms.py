"""On which SMs kernels run, asked of the SMs themselves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import smid

# Enough for every SM to get some, and none of them done before the last has begun.
_PROGRAMS = 4096
_ROUNDS = 4096
_MOST_SMS = 1024


@triton.jit
def mark_sm_kernel(seen_ptr, rounds):
    """Write a 1 to the entry of the SM that this program runs on."""
    value = 0.0
    for step in range(rounds):
        value = value * 0.5 + step
    tl.store(seen_ptr + smid(), tl.where(value >= 0.0, 1, 0))


class SmMarks:
    """Marks of the SMs that kernels ran on, int32 on the GPU."""

    def __init__(self) -> None:
        self._seen = torch.zeros(_MOST_SMS, dtype=torch.int32, device="cuda")
        # Compiled before anything is captured.
        self.launch()
        self.take()

    def launch(self, times: int = 1) -> None:
        """Launch a kernel that marks the SMs it runs on, and takes so many times as long as it needs to."""
        mark_sm_kernel[(_PROGRAMS,)](self._seen, times * _ROUNDS)

    def take(self) -> set[int]:
        """Numbers of the SMs that were marked since the last call."""
        torch.cuda.synchronize()
        marks = self._seen.cpu()
        # By copies: kernels would run on SMs, too.
        self._seen.copy_(torch.zeros_like(marks))
        torch.cuda.synchronize()
        return set(marks.nonzero().flatten().tolist())
