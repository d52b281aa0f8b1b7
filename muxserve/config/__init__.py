"""The fleet file: what a user writes, read into typed and checked objects.

    fleet = load_fleet("fleet.yaml")     # raises FleetError, which lists every mistake with file, line and key

Importing this package loads pydantic; the command line does so only in the commands that need a fleet.
"""

from muxserve.config.loader import load_fleet, parse_fleet
from muxserve.config.problems import FleetError, Problem
from muxserve.config.schema import ALL_MODELS, NETWORK, Fleet, MemorySection, Model, Replicas
from muxserve.config.values import AUTO

__all__ = [
    "ALL_MODELS",
    "AUTO",
    "NETWORK",
    "Fleet",
    "FleetError",
    "MemorySection",
    "Model",
    "Problem",
    "Replicas",
    "load_fleet",
    "parse_fleet",
]
