"""Ways of arranging the prefill and decode phases of a model, one file each.

Another one is a file here and a name in `ARRANGEMENTS` (and in `spec.PhasesName`), a policy in `scheduling/`, and what
its engines have to do in `engine/`.
"""

from __future__ import annotations

from muxserve.config import AUTO, Model
from muxserve.planning.arrangements.base import Arrangement
from muxserve.planning.arrangements.multiplexed import MultiplexedArrangement
from muxserve.planning.arrangements.pipelined import PipelinedArrangement
from muxserve.planning.arrangements.rolling import RollingArrangement
from muxserve.spec import PhasesName

# Simple ones first: of equals the first is taken.
_ALL: tuple[Arrangement, ...] = (MultiplexedArrangement(), PipelinedArrangement(), RollingArrangement())
ARRANGEMENTS: tuple[PhasesName, ...] = tuple(each.name for each in _ALL)


def arrangement(name: str) -> Arrangement:
    """That of a name; what nobody has chosen yet (`auto`) is multiplexed."""
    return next((each for each in _ALL if each.name == name), _ALL[0])


def arrangement_of(model: Model) -> Arrangement:
    """That of a model of the fleet file."""
    return arrangement(model.phases)


def is_open(model: Model) -> bool:
    """Whether the fleet file leaves it to the planner."""
    return model.phases == AUTO


def may_be_dedicated(model: Model) -> bool:
    """Whether each replica of a model has a unit to itself, or may have once an arrangement is chosen for it."""
    return is_open(model) or arrangement_of(model).dedicated
