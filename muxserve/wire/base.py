"""What all messages have in common."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, tag=True, tag_field="t", omit_defaults=True, gc=False):
    """Base of every message; the struct's name is its tag on the wire."""
