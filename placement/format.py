"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def format_size(size: int) -> str:
    """`size` bytes in the largest binary unit that keeps it at least 1, e.g. "256 MiB"."""
    value = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def enumerate_words(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def format_seconds(seconds: float | None) -> str:
    """`12 ms`, `1.25 s`; `-` for what was not measured, or is not there."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def format_part(part: float) -> str:
    """`97%`, `99.7%`."""
    return f"{part:.0%}" if part < 0.995 else f"{part:.1%}"
