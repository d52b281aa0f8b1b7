"""Request traces: generators, and the project's trace format. Pure: no clock, no socket, no torch, no vLLM."""

from muxserve.workload.arrivals import poisson_arrivals, power_law_rates
from muxserve.workload.generate import ModelLoad, generate
from muxserve.workload.lengths import FixedLength, Lengths, LogNormalLengths, UniformLengths
from muxserve.workload.trace import (
    Trace,
    TraceError,
    TraceHeader,
    TraceRequest,
    TraceWriter,
    open_trace,
    read_trace,
    write_trace,
)

__all__ = [
    "FixedLength",
    "Lengths",
    "LogNormalLengths",
    "ModelLoad",
    "Trace",
    "TraceError",
    "TraceHeader",
    "TraceRequest",
    "TraceWriter",
    "UniformLengths",
    "generate",
    "open_trace",
    "poisson_arrivals",
    "power_law_rates",
    "read_trace",
    "write_trace",
]
