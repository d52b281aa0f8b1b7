"""The process of a unit on GPUs that copies the weights of models which have slept back, from where the controller
keeps them in the host's memory. It takes the place of a holder: nothing is read from disk, processed or measured again.

It stays, with its contexts on the GPUs, and pins the host's memory while nobody waits for it: pinned memory is copied
at the speed of the link, and pinning it takes longer than copying it once. It exits when the driver fails, since a
context may be of no use then.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from muxserve.engine.cuda.weight_memory import Piece, in_file, on_gpu, restored
from muxserve.gpu import weight_wire as wire
from muxserve.gpu.weight_wire import Copied, fetch_copy, say
from muxserve.net.heartbeat import PERIOD_SECONDS, Heartbeat, heartbeat_file
from muxserve.net.process import words
from muxserve.spec import UnitSpec, load

log = logging.getLogger(__name__)

# What it is told, with a model's name behind a space: copy its weights back; know its copy, which can be pinned; or let
# go of that, since the model is served no longer.
RESTORE, PIN, FORGET = "restore", "pin", "forget"
_LONGEST = 1 << 12
# Makes memory fast to copy from, or not any more; see `pinned` and `unpinned`.
Pin = Callable[[torch.Tensor], None]


def pinned(memory: torch.Tensor) -> None:
    """Lock it in memory for the driver.

    Raises:
        RuntimeError: the driver or the kernel refuses.
    """
    # 1: for all contexts of this process.
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 1))


def unpinned(memory: torch.Tensor) -> None:
    """Undo `pinned`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


@dataclass(slots=True)
class _Copy:
    """A model's weights of one rank: the files of their pieces by number, their bytes, and which are pinned."""

    files: list[int]
    memory: list[torch.Tensor]
    pinned: set[int] = field(default_factory=set)


class HostCopies:
    """The copies that this process has mapped, by model and rank.

    Args:
        pin, unpin: how memory is pinned, which may fail: it is copied more slowly then.
    """

    def __init__(self, pin: Pin = pinned, unpin: Pin = unpinned) -> None:
        self._pin = pin
        self._unpin = unpin
        self._copies: dict[tuple[str, int], _Copy] = {}

    def pieces(self, model: str, rank: int, descriptors: list[int], sizes: list[int]) -> list[torch.Tensor]:
        """The bytes of the copy's pieces, of which the caller has the `descriptors`; another one of that model and rank
        is let go of."""
        files = [os.fstat(each).st_ino for each in descriptors]
        known = self._copies.get((model, rank))
        if known is not None and known.files == files:
            return known.memory
        self._let_go(model, rank)
        memory = [in_file(each, size) for each, size in zip(descriptors, sizes, strict=True)]
        self._copies[model, rank] = _Copy(files, memory)
        return memory

    def forget(self, model: str) -> None:
        """Let go of the copies of a model, as far as there are any."""
        for rank in [rank for name, rank in self._copies if name == model]:
            self._let_go(model, rank)

    def _let_go(self, model: str, rank: int) -> None:
        known = self._copies.pop((model, rank), None)
        if known is not None:
            for piece in known.pinned:
                self._unpin(known.memory[piece])

    def pin_next(self) -> bool:
        """Pin a piece that is not; whether there may be another."""
        for who, copy in self._copies.items():
            left = [piece for piece in range(len(copy.memory)) if piece not in copy.pinned]
            if not left:
                continue
            try:
                self._pin(copy.memory[left[0]])
            except RuntimeError as error:
                log.warning("copies stay as they are, and are copied more slowly: %s", error)
                self._pin = _nothing
                return False
            copy.pinned.add(left[0])
            if len(left) == 1:
                log.info("the copy of %s on rank %d is pinned", *who)
            return True
        return False


def _nothing(memory: torch.Tensor) -> None:
    """There is no pinning here."""


def run_copier(file: str, control: Any, orders: socket.socket) -> None:
    """Copy weights of models back to each GPU of the unit, whose spec is in `file`, from the host's memory, and have
    them kept, whenever `orders` say so; until these end.

    Reports `up` on `control` for each model; `failed` with the reason if it cannot, and ends.
    """
    from muxserve.gpu import environment

    unit_spec = load(file)
    # Outside MPS, as a holder.
    environment.prepare(unit_spec, unit_spec.models[0].name, "weights")
    heartbeat = Heartbeat(heartbeat_file(unit_spec.run_dir, "copier"))
    copies, poll, pinning = HostCopies(), select.poll(), False
    poll.register(orders, select.POLLIN)
    while True:
        heartbeat.beat()
        if not poll.poll(0 if pinning else 1000 * PERIOD_SECONDS):
            pinning = copies.pin_next()
            continue
        order, _, model = orders.recv(_LONGEST).decode().partition(" ")
        if not order:
            return  # who gives orders has ended
        if order == FORGET:
            copies.forget(model)
            continue
        # A model may have joined the unit.
        unit_spec, pinning = load(file), True
        if order == PIN:
            known(unit_spec, model, copies)
        else:
            _restore(unit_spec, model, copies, control)


def known(unit_spec: UnitSpec, model: str, copies: HostCopies) -> None:
    """Map the copies of a model that is awake."""
    for rank in range(unit_spec.ranks):
        try:
            copy, files = fetch_copy(unit_spec.weights_socket(model, rank))
        except (OSError, RuntimeError):
            return  # it sleeps by now, and is pinned another time
        try:
            copies.pieces(model, rank, files, _sizes(copy))
        finally:
            wire.close_all(files)


def _restore(unit_spec: UnitSpec, model: str, copies: HostCopies, control: Any) -> None:
    def event(name: str, **more: Any) -> None:
        control.event(name, kind="weights", model=model, phase="", **more)

    try:
        event("progress", detail="copying weights back")
        # Each GPU has a link of its own.
        with ThreadPoolExecutor(unit_spec.ranks) as ranks:
            list(ranks.map(lambda rank: restore(unit_spec, model, rank, copies), range(unit_spec.ranks)))
    except OSError as error:
        # Nobody wants them any more.
        event("failed", error=words(error))
        return
    except Exception as error:
        log.exception("cannot copy the weights of %s back", model)
        event("failed", error=words(error))
        raise
    event("up", pid=os.getpid(), kept=True)


def restore(unit_spec: UnitSpec, model: str, rank: int, copies: HostCopies) -> None:
    """Copy the weights of one rank back, and have them kept.

    Raises:
        OSError: nobody keeps a copy any more.
        muxserve.memory.errors.DeviceMemoryError: there is not enough memory, or it cannot be exported.
    """
    path = unit_spec.weights_socket(model, rank)
    copy, files = fetch_copy(path)
    pieces: list[Piece] = []
    try:
        assert unit_spec.gpu is not None
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        memory = copies.pieces(model, rank, files, _sizes(copy))
        weights, pieces = restored(copy.weights, memory, on_gpu(unit_spec.gpu.uuids[rank], device))
        torch.cuda.synchronize(device)
        say(path, wire.Keep(copy.fingerprint, weights), [piece.descriptor for piece in pieces])
    finally:
        # The keeper has its own.
        wire.close_all([*files, *(piece.descriptor for piece in pieces)])


def _sizes(copy: Copied) -> list[int]:
    return [each.size for each in copy.weights.allocations if each.kind == "vmm"]
