"""Messages of live migration.

A request moves from unit A to unit B in stages (`docs/cluster.md` has the sequence). Four processes take part: the
decode engine and the unit scheduler of A, and the migrators of A and B, which move pages and nothing else. The unit
scheduler of A decides everything; until `MoveCommit` is sent, it can take everything back.

`move` is the id of one migration, unique for all time: `UNIT:EPOCH:NUMBER`.
"""

from __future__ import annotations

from muxserve.wire.base import Message, Seconds
from muxserve.wire.unit import RequestSpec

# ---------------------------------------------------------------- unit scheduler <-> decode engine


class ShowBlocks(Message):
    """Which blocks does the request have, from its block number `since` on?"""

    request_id: str
    incarnation: int
    since: int = 0


class Blocks(Message):
    """Answer to `ShowBlocks`, between two steps. `computed_tokens` tokens have their KV in the request's blocks; only
    whole ones among them stay as they are. No blocks and no tokens: it is not running in this engine."""

    request_id: str
    incarnation: int
    since: int
    blocks: list[int]
    computed_tokens: int


class Detach(Message):
    """Take the request out of the batch, between two steps, and leave its blocks with the memory manager under `key`.
    Nothing happens if it is not running in this engine."""

    request_id: str
    incarnation: int
    key: str
    since: int = 0


class Detached(Message):
    """Answer to `Detach`. `blocks` are those from number `since` on; `output_tokens` everything generated so far. With
    an empty `key` the request is not running in this engine."""

    request_id: str
    incarnation: int
    key: str
    since: int
    blocks: list[int]
    computed_tokens: int
    output_tokens: list[int]


# ---------------------------------------------------------------- unit scheduler <-> its migrator


class MigratorHello(Message):
    """First message of a migrator (identity `migrator`), answered by `Reset`. Whatever was under way with the one
    before it is over."""

    epoch: str
    pid: int


class MoveStage(Message):
    """Copy `blocks`, the request's blocks from number `since` on, to the migrator at `address`. The first stage of a
    move opens it: the other side sets aside `reserve` blocks beyond those already held there."""

    move: str
    model: str
    address: str
    since: int
    blocks: list[int]
    reserve: int


class MoveStaged(Message):
    """All blocks up to number `until` are over there. `seconds` and `bytes` are this stage's."""

    move: str
    until: int
    seconds: float
    bytes: int


class MoveCommit(Message):
    """All blocks are over there: hand the request over. From here on the outcome is the other side's."""

    move: str
    request: Moving


class MoveCommitted(Message):
    """The other unit has the request."""

    move: str


class MoveFailed(Message):
    """The move is over, and nothing is left of it on the other side. `uncertain`: the other unit may have the request
    nevertheless."""

    move: str
    reason: str
    uncertain: bool = False


class MoveAbort(Message):
    """The unit scheduler wants the move undone."""

    move: str


# ---------------------------------------------------------------- migrator <-> migrator


class PeerOpen(Message):
    """First message of a move, and of each later stage that needs more blocks: set `blocks` more aside. `layout` must
    be that of the model over there. `epoch` is the sending migrator's: moves of an earlier one of the same `unit` are
    void. `machine` tells whether its pool can be written to from over there (see `PeerOpened`)."""

    move: str
    unit: str
    epoch: str
    model: str
    layout: str
    blocks: int
    machine: str = ""


class PeerOpened(Message):
    """Answer to `PeerOpen`: block ids over there, in order of the request's blocks.

    If both are on one machine (`machine` is equal: boot id and user), the sender may write into the pool itself: it
    connects to the memory manager at `memory_socket`, of which `generation` is the life that granted the blocks, and
    adopts the hand-off `key`. So both hold the blocks, and whoever dies, they are given to nobody while one writes.
    """

    move: str
    blocks: list[int]
    machine: str
    memory_socket: str
    generation: int
    key: str = ""


class PeerPages(Message):
    """Followed by one frame: the pages of blocks `since` to `since + blocks - 1` on `rank`, in the order of the page
    table (block, layer, head), each K and V of `block_tokens` tokens."""

    move: str
    since: int
    blocks: int
    rank: int


class PeerStaged(Message):
    """Sent after some pages, and answered with the same when all blocks up to number `until` have been written. Also
    sent from time to time while nothing moves: a side that hears nothing for ten seconds lets go."""

    move: str
    until: int


class PeerCommit(Message):
    """Hand the blocks off to your unit with this request."""

    move: str
    request: Moving


class PeerCommitted(Message):
    """The unit has the request."""

    move: str


class PeerRefused(Message):
    """The move is over on this side; nothing of it is left here. `uncertain`: the unit had got the request
    and did not answer, so that it may have taken it."""

    move: str
    reason: str
    uncertain: bool = False


class PeerThere(Message):
    """Not to be answered: ZeroMQ tells the receiving side of a move when nobody takes this any more."""

    move: str


class PeerAbort(Message):
    """The move is over; let go of everything."""

    move: str


# ---------------------------------------------------------------- migrator -> its unit scheduler, on arrival


class Moving(Message):
    """A request on its way: everything that the next unit must know of it. Times are ages, since the clocks of two
    machines differ: `waited` seconds since it arrived at its gateway. `moves` counts its migrations within this
    attempt, this one included."""

    request_id: str
    attempt: int
    gateway_epoch: str
    request: RequestSpec
    waited: Seconds
    output_tokens: list[int]
    computed_tokens: int
    moves: int = 0


class TakeOver(Message):
    """Serve this request: its blocks wait in the memory manager under `key`."""

    move: str
    key: str
    blocks: int
    request: Moving


class TakenOver(Message):
    """Answer to `TakeOver`. With a `reason` the unit does not take it."""

    move: str
    reason: str = ""


class MovingIn(Message):
    """How many moves to this unit are under way, by model; sent by its migrator when it has been greeted, and whenever
    that changes."""

    moves: dict[str, int]
