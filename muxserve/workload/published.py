"""Length distributions fitted to published figures, and how distributions are named on the command line.

The figures are those of Llumnix (arXiv:2406.03243), Table 1: mean, P50, P80, P95 and P99 of ShareGPT's and BurstGPT's
(GPT-4 conversations) prompts and outputs, and of its generated short, medium and long sequences, which are power laws.
"""

from __future__ import annotations

from typing import NamedTuple

from muxserve.workload.errors import WorkloadError
from muxserve.workload.lengths import (
    FixedLength,
    Lengths,
    LogNormalLengths,
    PowerLawLengths,
    QuantileLengths,
    UniformLengths,
)


class Published(NamedTuple):
    """A row of the table, tokens."""

    mean: float
    p50: float
    p80: float
    p95: float
    p99: float


TABLE = {
    "sharegpt prompt": Published(306, 74, 348, 1484, 3388),
    "sharegpt output": Published(500, 487, 781, 988, 1234),
    "burstgpt prompt": Published(830, 582, 1427, 2345, 3549),
    "burstgpt output": Published(271, 243, 434, 669, 964),
    "short": Published(128, 38, 113, 413, 1464),
    "medium": Published(256, 32, 173, 1288, 4208),
    "long": Published(512, 55, 582, 3113, 5166),
}

# Exponent and bounds that minimise the squared relative errors of the five figures; docs/workload.md has the errors.
_POWER_LAWS = {
    "short": PowerLawLengths(1.908, 19, 3470),
    "medium": PowerLawLengths(1.477, 8, 6604),
    "long": PowerLawLengths(1.165, 4, 6017),
}
NAMES = ("sharegpt", "burstgpt", *_POWER_LAWS)
_GRAMMAR = (
    f"{', '.join(NAMES)}, a number (64), a range (16..256), lognormal/MEDIAN/SIGMA/LOW/HIGH "
    "or powerlaw/EXPONENT/LOW/HIGH"
)


def published(name: str, side: str) -> Lengths:
    """The distribution `name` (of NAMES) for `side`, prompt or output.

    The longest length of the two real ones is not in the table; it is taken to be as far above P99 as P99 is above P95.
    """
    if name in _POWER_LAWS:
        return _POWER_LAWS[name]
    row = TABLE[f"{name} {side}"]
    percentiles = {0.5: row.p50, 0.8: row.p80, 0.95: row.p95, 0.99: row.p99}
    return QuantileLengths(row.mean, percentiles, 1, round(row.p99**2 / row.p95))


def parse_lengths(text: str, side: str) -> Lengths:
    """A distribution as it is named in a workload's specification.

    Raises:
        WorkloadError: unknown, or with numbers that make no sense.
    """
    kind, *parts = text.split("/")
    try:
        if kind in NAMES and not parts:
            return published(kind, side)
        if kind == "lognormal" and len(parts) == 4:
            return LogNormalLengths(float(parts[0]), float(parts[1]), int(parts[2]), int(parts[3]))
        if kind == "powerlaw" and len(parts) == 3:
            return PowerLawLengths(float(parts[0]), int(parts[1]), int(parts[2]))
        if ".." in kind and not parts:
            low, high = kind.split("..", 1)
            return UniformLengths(int(low), int(high))
        if kind.isdigit() and not parts:
            return FixedLength(int(kind))
    except ValueError as error:
        raise WorkloadError(f"{side} lengths {text!r}: {error}") from None
    raise WorkloadError(f"{side} lengths {text!r} are not known; write {_GRAMMAR}")
