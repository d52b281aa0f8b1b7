"""What all messages have in common."""

from __future__ import annotations

from typing import Annotated

import msgspec

# What nobody who counts or measures can send is no message; so no handler need be prepared for it.
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


class Message(msgspec.Struct, tag=True, tag_field="t", omit_defaults=True, gc=False):
    """Base of every message; the struct's name is its tag on the wire."""
