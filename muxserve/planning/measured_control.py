"""What a profile says of the control path, for whoever simulates under it."""

from __future__ import annotations

from typing import NamedTuple

from muxserve.costs.front_end import with_front_end
from muxserve.costs.latency import LatencyModel
from muxserve.costs.measured import ProfileModel
from muxserve.costs.pace import Pace
from muxserve.costs.profile import Overheads, Profile
from muxserve.simulator import ControlDelays


class MeasuredControl(NamedTuple):
    """Costs of steps with what they bring for the front end, the delays around steps, and how the speed varies."""

    latency: LatencyModel
    delays: ControlDelays
    pace: Pace | None = None


def measured_control(latency: LatencyModel, device: str) -> MeasuredControl:
    """As measured on that device; what was not is free in `latency`, and as everywhere in the delays."""
    profile = latency.profile if isinstance(latency, ProfileModel) else Profile()
    known = profile.overheads.get(device) or Overheads()
    return MeasuredControl(with_front_end(latency, known), ControlDelays.live(known), profile.pace.get(device))
