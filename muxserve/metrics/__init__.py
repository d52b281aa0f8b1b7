"""What is measured of requests, defined once for the gateway, the replay and the simulator. Pure."""

from muxserve.metrics.records import RequestRecord

__all__ = ["RequestRecord"]
