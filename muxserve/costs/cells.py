"""Measured steps, as a profile holds them. Each is written as a JSON array of its fields in order."""

from __future__ import annotations

import msgspec


class PrefillCell(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A prefill step of `sequences` prompts, each computing `tokens` tokens after `context` earlier ones, took
    `seconds` (the median of `samples` steps)."""

    sequences: int
    tokens: int
    context: int
    seconds: float
    samples: int = 1

    @property
    def total(self) -> int:
        """Tokens of the whole step."""
        return self.sequences * self.tokens

    @property
    def pairs(self) -> int:
        """(query, key) pairs of attention."""
        return self.sequences * (self.tokens * self.context + self.tokens * (self.tokens + 1) // 2)

    @property
    def place(self) -> tuple[int, int, int]:
        """Where it lies in the grid."""
        return self.sequences, self.tokens, self.context


class DecodeCell(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A decode step of `batch` sequences with `context` tokens of KV each took `seconds` (the median of `samples`)."""

    batch: int
    context: int
    seconds: float
    samples: int = 1

    @property
    def place(self) -> tuple[int, int]:
        """Where it lies in the grid."""
        return self.batch, self.context
