"""Request workloads: generators, readers of the public trace formats, and the project's own format. Pure: no clock, no
socket, no torch, no vLLM."""

from muxserve.workload.arrivals import Arrivals, power_law_rates
from muxserve.workload.describe import describe
from muxserve.workload.errors import TraceError, WorkloadError
from muxserve.workload.fit import Context, check_fits
from muxserve.workload.generate import ModelLoad, generate
from muxserve.workload.lengths import (
    CappedLengths,
    FixedLength,
    Lengths,
    LogNormalLengths,
    PowerLawLengths,
    QuantileLengths,
    UniformLengths,
)
from muxserve.workload.shapes import Bursts, Diurnal, Groups
from muxserve.workload.source import Workload, open_workload
from muxserve.workload.trace import (
    TraceRequest,
    open_trace,
    read_trace,
    write_trace,
)

__all__ = [
    "Arrivals",
    "Bursts",
    "CappedLengths",
    "Context",
    "Diurnal",
    "FixedLength",
    "Groups",
    "Lengths",
    "LogNormalLengths",
    "ModelLoad",
    "PowerLawLengths",
    "QuantileLengths",
    "TraceError",
    "TraceRequest",
    "UniformLengths",
    "Workload",
    "WorkloadError",
    "check_fits",
    "describe",
    "generate",
    "open_trace",
    "open_workload",
    "power_law_rates",
    "read_trace",
    "write_trace",
]
