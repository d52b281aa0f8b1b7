"""Which copies of weights are mapped and pinned: files in memory as the controller keeps them, no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from muxserve.engine.cuda.weight_copier import HostCopies


class Pins:
    """Notes what is pinned."""

    def __init__(self, refuse: int = 1 << 30) -> None:
        self.refuse = refuse
        self.now: list[int] = []

    def pin(self, memory: torch.Tensor) -> None:
        if len(self.now) >= self.refuse:
            raise RuntimeError("no more of it")
        self.now.append(memory.data_ptr())

    def unpin(self, memory: torch.Tensor) -> None:
        self.now.remove(memory.data_ptr())


@pytest.fixture
def files() -> Iterator[list[int]]:
    made = [os.memfd_create("weights") for _ in range(4)]
    for number, file in enumerate(made):
        os.write(file, bytes([number]) * 4096)
    yield made
    for file in made:
        os.close(file)


def test_pieces_are_mapped_once_and_pinned_one_at_a_time(files: list[int]) -> None:
    pins = Pins()
    copies = HostCopies(pins.pin, pins.unpin)
    assert not copies.pin_next()
    first = copies.pieces("a", 0, files[:2], [4096, 100])
    assert [piece.numel() for piece in first] == [4096, 100]
    assert [int(piece[0]) for piece in first] == [0, 1]
    again = [os.dup(each) for each in files[:2]]
    assert copies.pieces("a", 0, again, [4096, 100]) is first, "other descriptors of the same files"
    copies.pieces("b", 0, files[2:3], [4096])
    for left in (3, 2, 1):
        assert len(pins.now) == 3 - left
        assert copies.pin_next()
    assert len(pins.now) == 3
    assert not copies.pin_next()
    for each in again:
        os.close(each)


def test_another_copy_takes_the_place_of_one(files: list[int]) -> None:
    pins = Pins()
    copies = HostCopies(pins.pin, pins.unpin)
    first = copies.pieces("a", 0, files[:2], [4096, 4096])
    assert copies.pin_next()
    second = copies.pieces("a", 0, files[2:], [4096, 4096])
    assert pins.now == []
    assert [int(piece[0]) for piece in (*first, *second)] == [0, 1, 2, 3]
    while copies.pin_next():
        pass
    assert len(pins.now) == 2


def test_what_cannot_be_pinned_is_copied_as_it_is(files: list[int]) -> None:
    pins = Pins(refuse=1)
    copies = HostCopies(pins.pin, pins.unpin)
    copies.pieces("a", 0, files, [4096] * 4)
    assert copies.pin_next()
    assert not copies.pin_next()
    assert len(pins.now) == 1


def test_what_is_served_no_longer_is_let_go_of(files: list[int]) -> None:
    pins = Pins()
    copies = HostCopies(pins.pin, pins.unpin)
    copies.pieces("a", 0, files[:1], [4096])
    copies.pieces("a", 1, files[1:2], [4096])
    kept = copies.pieces("b", 0, files[2:3], [4096])
    while copies.pin_next():
        pass
    copies.forget("a")
    copies.forget("a")
    assert pins.now == [kept[0].data_ptr()]
    assert copies.pieces("b", 0, files[2:3], [4096]) is kept
