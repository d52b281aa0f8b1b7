"""How engines can share the GPUs of this machine: by MPS if that works, else they alternate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from muxserve.gpu import mps
from muxserve.gpu.nvml import Gpu
from muxserve.spec import SmSharing

# Seen on the one GPU that this was tried on, with other MPS servers beside (docs/gpu.md); why is not known.
PERCENTAGES_NOTE = (
    "note: engines share the SMs by percentages of MPS; on an H200 (driver 580.159.04) such fleets answered wrongly, "
    "and fleets with green contexts, or whose engines alternate, did not: compare answers before you rely on them"
)

MpsWish = Literal["auto", "on", "off"]


class SharingError(RuntimeError):
    """MPS is needed and does not work here; the message says why."""


def settle(
    gpus: Sequence[Gpu], wish: MpsWish, sharing: SmSharing, directory: Path, ours: Path | None = None, known: str = ""
) -> tuple[SmSharing, list[str]]:
    """Try MPS on these GPUs.

    Args:
        wish: what the fleet file says of MPS.
        sharing: the way of sharing if MPS works.
        directory: below which a server is started to try it.
        ours: servers with their pipes below this are those of other units, on GPUs of their own.
        known: why MPS does not work here, if that has been found before.

    Returns:
        The way of sharing, and what the user should know of it.

    Raises:
        SharingError: MPS does not work, and it is wanted, or the GPUs let only one process compute.
    """
    foreign = mps.foreign(ours=ours)
    notes = [f"note: {foreign}; engines of this fleet alternate with its clients"] if foreign else []
    if wish == "off":
        why_not = "it is switched off in the fleet file"
    elif sharing == "off":
        why_not = "no probe has found that engines compute right side by side (`muxserve doctor --gpu` makes all)"
    elif known:
        why_not = known
    else:
        why_not = mps.probe([gpu.uuid for gpu in gpus], directory)
    if not why_not:
        return sharing, [*notes, *([PERCENTAGES_NOTE] if sharing == "mps" else [])]
    if wish == "on":
        raise SharingError(f"cluster.mps is on, but MPS does not work here: {why_not}")
    exclusive = [gpu for gpu in gpus if gpu.modes.compute.startswith("exclusive")]
    if exclusive:
        raise SharingError(
            f"GPU {exclusive[0].index} lets only one process compute ({exclusive[0].modes.compute}), and MPS cannot be "
            f"used: {why_not}; `nvidia-smi -c 0` allows several"
        )
    if wish == "auto" and sharing != "off":
        notes.append(f"without MPS: {why_not}; engines alternate on the GPU: one computes while the others wait")
    return "off", notes
