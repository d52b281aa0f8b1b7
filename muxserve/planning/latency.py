"""Which source of costs a command uses."""

from __future__ import annotations

from pathlib import Path

from muxserve.costs.latency import CostError, LatencyModel
from muxserve.costs.llama_tables import read_llama_tables
from muxserve.costs.measured import ProfileModel
from muxserve.costs.profile import Overheads, load_profile
from muxserve.costs.roofline import Roofline


def latency_model(profile: Path | None) -> LatencyModel:
    """The roofline; with a profile file, its measurements, and the roofline for what was not measured. The file may
    also be in the format of the step times that MuxServe's authors published.

    Raises:
        CostError: the file cannot be read.
    """
    if profile is None:
        return Roofline()
    try:
        loaded = load_profile(profile)
    except CostError as own:
        try:
            loaded = read_llama_tables(profile)
        except CostError:
            raise own from None
    return ProfileModel(loaded, beyond=Roofline())


def latency_words(profile: Path | None) -> str:
    """Where the costs come from, for people."""
    return "roofline" if profile is None else f"measured ({profile}); roofline where nothing was measured"


def measured_overheads(latency: LatencyModel, device: str) -> Overheads | None:
    """What a profile knows of time outside of steps on that device."""
    return latency.profile.overheads.get(device) if isinstance(latency, ProfileModel) else None


def between_steps(latency: LatencyModel, device: str) -> float:
    """Seconds from the end of a step to the start of the next, beyond what steps take; 0 if nobody measured them."""
    known = measured_overheads(latency, device)
    return known.between if known else 0.0
