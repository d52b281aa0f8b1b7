"""What is measured of requests, defined once for the gateway, the replay and the simulator. Pure.

The definitions and records need no numpy; import `summarise` and the reports from their own modules.
"""

from muxserve.metrics.definitions import Objectives, Reference, percentile, time_per_token
from muxserve.metrics.records import RequestRecord

__all__ = ["Objectives", "Reference", "RequestRecord", "percentile", "time_per_token"]
