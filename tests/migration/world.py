"""Both ends of migration in one thread: messages, tasks and deaths happen when the test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from muxserve.memory import MemoryManagerError, MemoryManagerGone
from muxserve.migration.chunks import TokenBucket
from muxserve.migration.incoming import Incoming
from muxserve.migration.outgoing import Outgoing
from muxserve.migration.pages import ModelShape
from muxserve.migration.tasks import (
    Buffer,
    CopyOver,
    Gather,
    JoinPool,
    LeavePool,
    Outcome,
    StatePart,
    Task,
    TaskFailed,
    Write,
)
from muxserve.wire import (
    Message,
    MoveCommitted,
    MoveFailed,
    MoveStaged,
    PeerPages,
    TakenOver,
    TakeOver,
)

MODEL = "m"
ADDRESS = "ipc://b"
PEER = b"a/1/1"
BLOCK_BYTES = 1 << 20
SHAPES = {MODEL: ModelShape("layout", BLOCK_BYTES, 16)}
# The first blocks of a request hold a state: what is in them depends on when they are copied.
STATE_BLOCKS = 3
STATEFUL_SHAPES = {MODEL: ModelShape("layout", BLOCK_BYTES, 16, STATE_BLOCKS)}


def in_order(blocks: Sequence[int], part: StatePart) -> list[int]:
    """The blocks that a task means, one by one. A block stands for its pages here, so that what it has of a state is
    decided by its place in the order of the numbers."""
    return list(blocks) if part is None else sorted(blocks)[part[0] : part[1]]


@dataclass
class Store:
    """The memory manager of B: who holds which block, and what is in it."""

    size: int = 40
    life: int = 1
    socket: str = "/b/memory.sock"
    holders: dict[int, set[str]] = field(default_factory=dict)
    keys: dict[str, list[int]] = field(default_factory=dict)
    content: dict[int, int] = field(default_factory=dict)

    def _up(self) -> None:
        if not self.life:
            raise MemoryManagerGone("gone")

    def reserve(self, model: str, count: int) -> list[int]:
        self._up()
        # Not in the order of their numbers.
        free = [b for b in range(self.size - 1, 0, -1) if not self.taken(b)]
        if len(free) < count:
            return []
        for block in free[:count]:
            self.holders[block] = {"b"}
            self.content.pop(block, None)
        return free[:count]

    def taken(self, block: int) -> bool:
        return bool(self.holders.get(block)) or any(block in blocks for blocks in self.keys.values())

    def share(self, model: str, key: str, blocks: Sequence[int], seconds: float) -> None:
        self._up()
        assert all("b" in self.holders[b] for b in blocks)
        self.keys[key] = list(blocks)

    def hand_off(self, model: str, key: str, blocks: Sequence[int], extra: Sequence[int], seconds: float) -> None:
        self.share(model, key, blocks, seconds)
        self.release(model, [*blocks, *extra])

    def release(self, model: str, blocks: Sequence[int], who: str = "b") -> None:
        self._up()
        for block in blocks:
            self.holders[block].remove(who)

    def adopt(self, key: str, who: str) -> list[int]:
        self._up()
        if key not in self.keys:
            raise MemoryManagerError("UNKNOWN_KEY", key)
        blocks = self.keys.pop(key)
        for block in blocks:
            self.holders.setdefault(block, set()).add(who)
        return blocks

    def drop(self, model: str, key: str) -> None:
        self._up()
        self.keys.pop(key, None)

    def die(self) -> None:
        self.life, self.holders, self.keys = 0, {}, {}

    def used(self) -> set[int]:
        return {b for b in range(1, self.size) if self.taken(b)}


class World:
    """Unit A with `Outgoing` and unit B with `Incoming`; the test plays both unit schedulers."""

    def __init__(
        self, *, same_machine: bool = True, reachable: bool = True, rate: float = 0.0, stateful: bool = False
    ) -> None:
        self.shapes = STATEFUL_SHAPES if stateful else SHAPES
        # How many steps have overwritten the state of the request that moves.
        self.steps = 0
        self.now = 0.0
        self.lives = 1
        self.store = Store()
        self.reachable = reachable
        self.a_to_b: deque[tuple[Message, Buffer | None]] = deque()
        self.b_to_a: deque[Message] = deque()
        self.tasks_a: deque[Task] = deque()
        self.tasks_b: deque[Task] = deque()
        self.unit_a: list[Message] = []
        self.unit_b: list[Message] = []
        self.joined: dict[str, tuple[int, list[int]]] = {}
        self.connected = True
        self.unit_b_there = True
        self.accepted: set[str] = set()
        self.machines = ("here", "here" if same_machine else "there")
        bucket = TokenBucket(rate)
        self.outgoing = Outgoing(
            "a",
            epoch="1",
            machine=self.machines[0],
            shapes=self.shapes,
            ranks=1,
            bandwidth=bucket,
            effects=_ActionsOfA(self),
        )
        self.begin_b()

    def begin_b(self) -> None:
        self.tasks_b.clear()
        self.incoming = Incoming(self.shapes, 1, self.machines[1], self.store, _ActionsOfB(self))

    # ------------------------------------------------------------ what can happen

    def deliver_to_b(self) -> bool:
        if not self.a_to_b:
            return False
        message, data = self.a_to_b.popleft()
        self.incoming.heard(PEER, message, self.now, data)
        return True

    def deliver_to_a(self) -> bool:
        if not self.b_to_a:
            return False
        self.outgoing.heard(ADDRESS, self.b_to_a.popleft(), self.now)
        return True

    def work_a(self) -> bool:
        if not self.tasks_a:
            return False
        task = self.tasks_a.popleft()
        self.outgoing.outcome(task, self.do(task), self.now)
        return True

    def work_b(self) -> bool:
        if not self.tasks_b:
            return False
        task = self.tasks_b.popleft()
        assert isinstance(task, Write)
        self.incoming.outcome(task, self.do(task))
        return True

    def turn(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.outgoing.tick(self.now)
        self.incoming.tick(self.now)

    def settle(self) -> None:
        """Until nothing happens without time going on."""
        going = True
        while going:
            self.turn()
            going = any([self.deliver_to_b(), self.deliver_to_a(), self.work_a(), self.work_b()])

    def let_pass(self, seconds: float) -> None:
        """Time, in steps in which everything is delivered."""
        end = self.now + seconds
        while self.now < end:
            self.settle()
            due = min(self.outgoing.wakeup(self.now), self.incoming.wakeup(), end)
            self.turn(max(due - self.now, 1e-6))
        self.settle()

    def answer_take_over(self, reason: str = "") -> bool:
        """Unit B takes what was given to it, or does not."""
        for message in self.unit_b:
            if isinstance(message, TakeOver):
                self.unit_b.remove(message)
                if not reason:
                    self.accepted.add(message.move)
                    if message.key in self.store.keys:
                        blocks = self.store.adopt(message.key, "engine")
                        states = self.shapes[MODEL].state_blocks
                        state, kv = sorted(blocks[:states]), blocks[states:]
                        assert [self.store.content.get(b) for b in state] == self.state()
                        # Block number i of the request has what its block 100 + i had over there.
                        found = [self.store.content.get(b) for b in kv]
                        assert found == [100 + i for i in range(states, message.blocks)]
                self.incoming.taken_over(TakenOver(message.move, reason))
                return True
        return False

    def state(self) -> list[int]:
        """What its state is now, in the order in which its pages hold it."""
        return [(self.steps * STATE_BLOCKS + i) % 100 for i in range(self.shapes[MODEL].state_blocks)]

    def read(self, blocks: Sequence[int], part: StatePart) -> list[int]:
        """What is in blocks of unit A."""
        return list(blocks) if part is None else self.state()[part[0] : part[1]]

    def disconnect(self) -> None:
        """B's migrator dies and is started again: it held blocks, and what was under way to it is lost."""
        self.a_to_b.clear()
        self.b_to_a.clear()
        for holders in self.store.holders.values():
            holders.discard("b")
        self.unit_b.clear()
        self.begin_b()
        self.outgoing.peer_lost(ADDRESS, "the connection has ended")

    def kill_memory_b(self) -> None:
        self.store.die()
        self.incoming.memory_lost()
        self.lives += 1
        self.store.life = self.lives

    # ------------------------------------------------------------ tasks

    def do(self, task: Task) -> Outcome:
        try:
            return self._do(task)
        except (MemoryManagerGone, MemoryManagerError) as error:
            return TaskFailed(str(error))

    def _do(self, task: Task) -> Outcome:
        store = self.store
        match task:
            case JoinPool():
                if not self.reachable:
                    return False
                if task.generation != store.life:
                    raise MemoryManagerGone("started anew")
                life, blocks = self.joined.get(task.move, (store.life, []))
                if life != store.life:
                    raise MemoryManagerGone("started anew")
                self.joined[task.move] = (life, blocks + store.adopt(task.key, "a:" + task.move))
                return True
            case CopyOver():
                life, _ = self.joined[task.move]
                if life != store.life:
                    raise MemoryManagerGone("died")
                theirs = in_order(task.destination, task.part)
                for source, block in zip(self.read(task.source, task.part), theirs, strict=True):
                    assert "a:" + task.move in store.holders[block], "written to what is not held"
                    store.content[block] = source
            case Gather():
                return [np.repeat(np.array(self.read(task.source, task.part), dtype=np.uint8), BLOCK_BYTES)]
            case Write():
                if task.life != store.life:
                    raise MemoryManagerGone("died")
                for block, source in zip(in_order(task.blocks, task.part), task.data[::BLOCK_BYTES], strict=True):
                    assert "b" in store.holders[block], "written to what is not held"
                    store.content[block] = int(source)
            case LeavePool():
                life, blocks = self.joined.pop(task.move, (0, []))
                if life == store.life:
                    store.release(MODEL, blocks, "a:" + task.move)
        return None

    # ------------------------------------------------------------ what came of it

    def ends(self, move: str) -> list[Message]:
        """What unit A was told of the end of a move."""
        return [m for m in self.unit_a if isinstance(m, (MoveCommitted, MoveFailed)) and getattr(m, "move", "") == move]

    def staged(self) -> list[int]:
        return [message.until for message in self.unit_a if isinstance(message, MoveStaged)]


class _ActionsOfA:
    def __init__(self, world: World) -> None:
        self.world = world

    def tell_unit(self, message: Message) -> None:
        self.world.unit_a.append(message)

    def tell_peer(self, address: str, message: Message, pages: object = None) -> None:
        assert address == ADDRESS
        assert (pages is not None) == isinstance(message, PeerPages)
        self.world.a_to_b.append((message, pages))  # type: ignore[arg-type]

    def start(self, task: Task) -> None:
        self.world.tasks_a.append(task)


class _ActionsOfB:
    def __init__(self, world: World) -> None:
        self.world = world

    def tell_unit(self, message: Message) -> bool:
        if self.world.unit_b_there:
            self.world.unit_b.append(message)
        return self.world.unit_b_there

    def unit_there(self) -> bool:
        return self.world.unit_b_there

    def answer(self, peer: bytes, message: Message) -> bool:
        assert peer == PEER
        if self.world.connected:
            self.world.b_to_a.append(message)
        return self.world.connected

    def start(self, task: Task) -> None:
        self.world.tasks_b.append(task)
