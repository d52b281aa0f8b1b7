"""Messages between processes.

Every message is a tagged msgspec struct sent as one msgpack frame over ZeroMQ. Nothing is ever pickled.
Tokens take a path of their own (engine to gateway, see `TokensHeader`) and never pass the unit scheduler.
"""

from __future__ import annotations

from typing import Union

import msgspec

from muxserve.wire.base import Message
from muxserve.wire.migration import (
    Blocks,
    Detach,
    Detached,
    MigratorHello,
    MoveAbort,
    MoveCommit,
    MoveCommitted,
    MoveFailed,
    MoveStage,
    MoveStaged,
    Moving,
    MovingIn,
    PeerAbort,
    PeerCommit,
    PeerCommitted,
    PeerOpen,
    PeerOpened,
    PeerPages,
    PeerRefused,
    PeerStaged,
    PeerThere,
    ShowBlocks,
    TakenOver,
    TakeOver,
)
from muxserve.wire.replicas import (
    ControllerHello,
    DrainReplicas,
    Elsewhere,
    Loads,
    NotPlaced,
    Paired,
    Place,
    Placed,
    RollingReport,
    RollingRequest,
    SchedulerHello,
    StartFailed,
    StartReplicas,
    StopReplica,
    Terminating,
    TookOver,
    Unpaired,
    Unplace,
    Waits,
)
from muxserve.wire.unit import (
    Abort,
    Admit,
    Cancel,
    Cause,
    ComputedJob,
    Degraded,
    EngineDown,
    EngineHello,
    EngineLost,
    EngineSuspect,
    Failures,
    GatewayDown,
    GatewayHello,
    HandOver,
    HeldRequests,
    Lease,
    Lost,
    MovedRequest,
    Prefilled,
    Refused,
    RequestFailed,
    Reset,
    Retire,
    Returned,
    Revive,
    ShowRequests,
    StateReply,
    StateRequest,
    StepFailed,
    StepReport,
    Stop,
    Submit,
    TimelineReply,
    TimelineRequest,
    TokensHeader,
    UnitHello,
)

__all__ = [
    "Abort",
    "Admit",
    "AnyMessage",
    "Blocks",
    "Cancel",
    "Cause",
    "ComputedJob",
    "ControllerHello",
    "Degraded",
    "Detach",
    "Detached",
    "DrainReplicas",
    "Elsewhere",
    "EngineDown",
    "EngineHello",
    "EngineLost",
    "EngineSuspect",
    "Failures",
    "GatewayDown",
    "GatewayHello",
    "HandOver",
    "HeldRequests",
    "Lease",
    "Loads",
    "Lost",
    "Message",
    "MigratorHello",
    "MoveAbort",
    "MoveCommit",
    "MoveCommitted",
    "MoveFailed",
    "MoveStage",
    "MoveStaged",
    "MovedRequest",
    "Moving",
    "MovingIn",
    "NotPlaced",
    "Paired",
    "PeerAbort",
    "PeerCommit",
    "PeerCommitted",
    "PeerOpen",
    "PeerOpened",
    "PeerPages",
    "PeerRefused",
    "PeerStaged",
    "PeerThere",
    "Place",
    "Placed",
    "Prefilled",
    "Refused",
    "RequestFailed",
    "Reset",
    "Retire",
    "Returned",
    "Revive",
    "RollingReport",
    "RollingRequest",
    "SchedulerHello",
    "ShowBlocks",
    "ShowRequests",
    "StartFailed",
    "StartReplicas",
    "StateReply",
    "StateRequest",
    "StepFailed",
    "StepReport",
    "Stop",
    "StopReplica",
    "Submit",
    "TakeOver",
    "TakenOver",
    "Terminating",
    "TimelineReply",
    "TimelineRequest",
    "TokensHeader",
    "TookOver",
    "UnitHello",
    "Unpaired",
    "Unplace",
    "Waits",
    "decode",
    "encode",
]

AnyMessage = Union[
    GatewayHello, Submit, Cancel, UnitHello, Lost, Refused, Lease, Abort, Reset, Stop, EngineHello, EngineLost,
    StepReport, EngineDown, GatewayDown, StateRequest, StateReply, TokensHeader, SchedulerHello, Loads, Paired,
    Unpaired, Terminating, Elsewhere, TookOver, Place, Unplace, Placed, NotPlaced, ControllerHello, StartReplicas,
    StopReplica, StartFailed, DrainReplicas, ShowBlocks, Blocks, Detach, Detached, MigratorHello, MoveStage,
    MoveStaged, MoveCommit, MoveCommitted, MoveFailed, MoveAbort, PeerOpen, PeerOpened, PeerPages, PeerStaged,
    PeerCommit, PeerCommitted, PeerRefused, PeerThere, PeerAbort, TakeOver, TakenOver, MovingIn, Retire, Revive,
    RollingReport, Waits, ShowRequests, HeldRequests, Degraded, EngineSuspect, RequestFailed, StepFailed,
    TimelineRequest, TimelineReply,
]  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """One msgpack frame."""
    return _encoder.encode(message)


def decode(frame: bytes | memoryview) -> AnyMessage:
    """The message of one frame.

    Raises:
        msgspec.DecodeError: the frame is not msgpack or not one of the messages above.
    """
    return _decoder.decode(frame)
