"""Sizes, durations and speeds as people write them: "512MiB", "1.5 GiB", "30s", "2m", "500ms", "25Gb/s", "3GB/s"."""

from __future__ import annotations

import math
import re

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "kib": 1 << 10,
    "m": 1000**2,
    "mb": 1000**2,
    "mib": 1 << 20,
    "g": 1000**3,
    "gb": 1000**3,
    "gib": 1 << 30,
    "t": 1000**4,
    "tb": 1000**4,
    "tib": 1 << 40,
}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SPEED = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT])(i?)(b|bit|B)(?:/s|ps)?\s*")
_PREFIXES = {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4}

SPEED_PATTERN = r"^\s*\d+(\.\d+)?\s*[kKMGT]i?(b|bit|B)(/s|ps)?\s*$"
SIZE_PATTERN = r"^\s*\d+(\.\d+)?\s*([kKmMgGtT]([iI]?[bB])?|[bB])?\s*$"
DURATION_PATTERN = r"^\s*\d+(\.\d+)?\s*(us|ms|s|m|min|h)\s*$"


def parse_size(value: object) -> int:
    """Bytes of a size: a whole number of bytes, or text such as "512MiB" (1024) or "500MB" (1000).

    Raises:
        ValueError: not a positive size.
    """
    wrong = f"must be a size such as 512MiB or 2GiB, not {value!r}"
    if isinstance(value, bool):
        raise ValueError(wrong)
    if isinstance(value, int):
        size = value
    elif isinstance(value, str) and (match := _QUANTITY.fullmatch(value)) and match[2].lower() in _SIZE_UNITS:
        size = round(float(match[1]) * _SIZE_UNITS[match[2].lower()])
    else:
        raise ValueError(wrong)
    if size <= 0:
        raise ValueError(f"must be larger than zero, not {value!r}")
    return size


def parse_duration(value: object, *, unit: str = "s") -> float:
    """A duration in `unit` ("s" or "ms"): a number of those, or text such as "500ms", "30s", "2m".

    Raises:
        ValueError: not a finite duration of at least zero.
    """
    wrong = f"must be a number of {unit} or a duration such as 500ms, 30s or 2m, not {value!r}"
    if isinstance(value, bool):
        raise ValueError(wrong)
    if isinstance(value, (int, float)):
        duration = float(value)
    elif isinstance(value, str) and (match := _QUANTITY.fullmatch(value)) and match[2] in _SECONDS:
        duration = float(match[1]) * _SECONDS[match[2]] / _SECONDS[unit]
    else:
        raise ValueError(wrong)
    if not math.isfinite(duration) or duration < 0:
        raise ValueError(f"must be zero or more, not {value!r}")
    return duration


def parse_speed(value: object) -> float:
    """Bytes per second of a link's speed, which says whether it means bits or bytes: "25Gb/s", "25Gbit" or "3GB/s".

    Raises:
        ValueError: not a speed above zero.
    """
    wrong = f"must be a speed such as 25Gb/s (bits) or 3GB/s (bytes), not {value!r}"
    match = _SPEED.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(wrong)
    number, prefix, binary, unit = match.groups()
    speed = float(number) * float(1024 if binary else 1000) ** _PREFIXES[prefix] / (1 if unit == "B" else 8)
    if not 0.0 < speed < math.inf:
        raise ValueError(f"must be larger than zero, not {value!r}")
    return speed
