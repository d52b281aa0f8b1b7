"""Which generation of the fleet's file a gateway follows. It writes that into a file of its own, which the controller
reads: a change is complete only when no gateway follows an earlier generation.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from muxserve.spec.unit import write


class FollowedFleet(msgspec.Struct, frozen=True):
    """How far one gateway is.

    `pid` is its process. It goes by the fleet's file of that `generation`: keys, limits, units, and no model that has
    left. `offers` are the models that it answers for, each with the directories of its adapters by name; one that has
    come is among them as soon as its front end is built, and a candidate when it has answered a request. `refused`
    gives the reason why it cannot offer another model. Models that are `leaving` still have requests.
    """

    pid: int
    generation: int
    offers: dict[str, dict[str, str]]
    refused: dict[str, str] = {}
    leaving: tuple[str, ...] = ()

    def knows(self, model: str) -> bool:
        """Whether it offers the model or never will."""
        return model in self.offers or model in self.refused


def followed_file(run_dir: str | os.PathLike[str], index: int) -> Path:
    """Where gateway `index` of the fleet in that directory writes it."""
    return Path(run_dir) / f"gateway-{index}.json"


def save_followed(followed: FollowedFleet, path: Path) -> None:
    """Write it as a whole, readable by the owner only.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_suffix(".new")
    write(msgspec.json.encode(followed), temporary)
    os.replace(temporary, path)


def load_followed(path: Path) -> FollowedFleet | None:
    """What `save_followed` wrote; None: nothing, or nothing that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=FollowedFleet)
    except (OSError, msgspec.MsgspecError):
        return None
