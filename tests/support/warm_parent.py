"""The warm parent of a unit on GPUs as it is, with what needs a GPU or vLLM played by functions of the same types."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from muxserve.engine.rest import RestOrders
from muxserve.forks import direct, warm_parent
from muxserve.spec import EnginePhase, UnitSpec

Copier = Callable[[str, Any, socket.socket], None]
Engine = Callable[[UnitSpec, str, EnginePhase, Any, Any, RestOrders], None]


class Holder(Protocol):
    def __call__(self, unit_spec: UnitSpec, model: str, control: Any, copies: bool = False) -> None: ...


if TYPE_CHECKING:
    # What is played has the types of what is there: mypy says where it no longer has.
    from muxserve.engine.cuda.weight_copier import run_copier
    from muxserve.engine.cuda.weight_holder import run_holder

    _holder: Holder = run_holder
    _copier: Copier = run_copier
    _engine: Engine = direct._run


def main(holder: Holder, copier: Copier, engine: Engine) -> None:
    """Arguments of the command line as those of `muxserve.forks.warm_parent`."""
    for name, play in (("holder", holder), ("copier", copier)):
        module = ModuleType(f"muxserve.engine.cuda.weight_{name}")
        vars(module)[f"run_{name}"] = play
        sys.modules[module.__name__] = module
    vars(direct)["_run"] = engine
    vars(warm_parent).update(preload=lambda device: None, register=lambda models, device: None)
    warm_parent.main()
