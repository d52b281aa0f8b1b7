"""What a profile says of the control path, for whoever simulates under it."""

from __future__ import annotations

from typing import NamedTuple

from muxserve.costs.front_end import with_front_end
from muxserve.costs.latency import LatencyModel
from muxserve.costs.measured import ProfileModel
from muxserve.costs.profile import Overheads
from muxserve.simulator import ControlDelays


class MeasuredControl(NamedTuple):
    """Costs of steps with what they bring for the front end, and the delays around steps."""

    latency: LatencyModel
    delays: ControlDelays


def measured_control(latency: LatencyModel, device: str) -> MeasuredControl:
    """As measured on that device; what was not is free in `latency`, and as everywhere in the delays."""
    known = latency.profile.overheads.get(device) if isinstance(latency, ProfileModel) else None
    known = known or Overheads()
    delays = ControlDelays.live(known.turn, known.between, known.request, known.rested)
    return MeasuredControl(with_front_end(latency, known), delays)
