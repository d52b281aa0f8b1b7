"""A replica's handle between schedulers of macro instances: plain data, sent as msgpack."""

from __future__ import annotations

import msgspec

from muxserve.rolling.member import Member

VERSION = 2


class Handle(msgspec.Struct, frozen=True):
    """Everything that the next scheduler must know of a member. The replica itself notices nothing: it goes on with its
    requests, and its reports come to the new scheduler.

    `address` is where the replica's unit scheduler is reached.
    """

    address: str
    member: Member
    version: int = VERSION


class HandleError(ValueError):
    """Bytes that are no handle of ours."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Handle)


def pack(member: Member, address: str) -> bytes:
    """The handle as bytes."""
    return _encoder.encode(Handle(address, member))


def unpack(data: bytes) -> Handle:
    """What `pack` made.

    Raises:
        HandleError: it is not one, or of another version.
    """
    try:
        handle = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise HandleError(f"not a handle of a replica: {error}") from None
    if handle.version != VERSION:
        raise HandleError(f"a handle of version {handle.version}, this is {VERSION}")
    return handle
