"""Processes that die: clients at any moment, and the manager itself."""

from __future__ import annotations

import multiprocessing
import os
import random
import select
import signal
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muxserve.memory import MemoryManagerError, MemoryManagerGone, server
from muxserve.memory.client import MemoryClient
from muxserve.memory.view import ModelView
from muxserve.spec import UnitSpec
from tests.memory.support import PAGES, assert_balanced, block_hash, ids, model, stats_of, unit_spec
from tests.support.patience import eventually
from tests.support.thoroughness import examples

Start = Callable[[UnitSpec], subprocess.Popen[bytes]]
Connect = Callable[..., MemoryClient]
CHILDREN = 8
KILLS = examples(40)
KEYS = [f"key {i}" for i in range(6)]


def test_pages_of_a_client_that_leaves_are_free_at_once(connect: Connect) -> None:
    leaving, staying = connect("leaving"), connect("staying")
    view = staying.map("a")
    blocks = leaving.step("a", reserve=4).reserved
    leaving.step("a", publish_ids=blocks[:1], publish_hashes=[block_hash(1)])
    leaving.hand_off("a", "k", blocks[1:2], 1000.0)
    leaving.close()
    eventually(lambda: view.counters.used_pages == 6, "only the hand-off is left")
    assert view.counters.cached_pages == 6
    staying.drop("a", "k")
    assert_balanced(staying)


# ------------------------------------------------------------ clients that are killed


def fill(view: ModelView, blocks: np.ndarray, mark: int) -> None:
    view.pool[view.page_table[blocks].reshape(-1)] = mark


def intact(view: ModelView, blocks: np.ndarray, mark: int) -> bool:
    return bool((view.pool[view.page_table[blocks].reshape(-1)] == mark).all())


def allowed(code: str, action: Callable[..., Any], *arguments: object) -> list[Any]:
    """The result of the action; nothing if it is refused, which it may be with that code only."""
    try:
        return [action(*arguments)]
    except MemoryManagerError as error:
        if error.code != code:
            raise
        return []


def busy_client(socket_path: str, seed: int, told: Connection) -> None:
    """Reserves, marks its pages, checks the marks, publishes, hands off and adopts until it is killed.

    Tells of every operation; an exception here is told too and fails the test.
    """
    try:
        random_ = random.Random(seed)
        mark = 1 + seed % 255
        client = MemoryClient(socket_path, f"child {seed}", timeout_s=60)
        views = [client.map("a"), client.map("b")]
        owned: list[list[int]] = [[], []]  # marked by this client and never published
        while True:
            which = random_.randrange(2)
            view, mine = views[which], owned[which]
            chosen = ids(*random_.sample(mine, random_.randrange(len(mine) + 1)))
            action = random_.randrange(5)
            if action <= 1:
                new = client.step(view, reserve=random_.randrange(1, 5), partial=True).reserved
                fill(view, new, mark)
                mine.extend(new.tolist())
                assert intact(view, ids(*mine), mark), "another client has written into our pages"
                continue_with = None
            elif action == 2:
                client.post(view, release=chosen)
                continue_with = chosen
            elif action == 3:
                hashes = [block_hash(random_.randrange(40)) for _ in chosen]
                client.step(view, publish_ids=chosen, publish_hashes=hashes, release=chosen)
                continue_with = chosen
            else:
                key = random_.choice(KEYS)
                handed = chosen.size and allowed("KEY_EXISTS", client.hand_off, view, key, chosen, 1000.0)
                continue_with = chosen if handed else None
                for adopted in allowed("UNKNOWN_KEY", client.adopt, view, random_.choice(KEYS)):
                    client.step(view, release=adopted)
            if continue_with is not None:
                gone = set(continue_with.tolist())
                mine[:] = [block for block in mine if block not in gone]
            told.send(None)
    except BaseException as error:
        told.send(f"{type(error).__name__}: {error}")
    finally:
        os._exit(1)


def test_eight_clients_killed_at_random_leak_nothing(start: Start, tmp_path: Path) -> None:
    of = unit_spec(tmp_path, 301, [model("a", 2, 3, 60, 180), model("b", 1, 2, 120, 120)])
    process = start(of)
    watcher = MemoryClient(of.memory_socket, "watcher", timeout_s=60)
    fork = multiprocessing.get_context("fork")
    random_ = random.Random(7)
    children: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def spawn(seed: int) -> None:
        hear, tell = fork.Pipe(duplex=False)
        child = fork.Process(target=busy_client, args=(of.memory_socket, seed, tell), daemon=True)
        child.start()
        tell.close()
        children.append((child, hear))

    try:
        for seed in range(CHILDREN):
            spawn(seed)
        for kill in range(KILLS):
            child, hear = children.pop(random_.randrange(len(children)))
            for _ in range(random_.randrange(1, 30)):  # so far, and no knowing how far beyond
                failure = hear.recv()
                assert failure is None, failure
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            hear.close()
            spawn(CHILDREN + kill)
            if kill % 10 == 0:
                assert_balanced(watcher)
    finally:
        for child, hear in children:
            child.kill()
            child.join()
            hear.close()
    assert process.poll() is None
    eventually(lambda: len(watcher.stats()["clients"]) == 1, "the manager has noticed every death")
    assert_balanced(watcher)
    pool = stats_of(watcher.stats(), "p")
    assert pool["owned_pages"] == 0
    for name in ("a", "b"):
        for key in KEYS:
            allowed("UNKNOWN_KEY", watcher.drop, name, key)
        watcher.reset_cache(name)
    assert stats_of(watcher.stats(), "p")["free_pages"] == 300
    watcher.close()


# ------------------------------------------------------------ the manager is killed


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_mappings_stay_good_when_the_manager_is_killed_and_started_again(start: Start, small: UnitSpec) -> None:
    first = start(small)
    client = MemoryClient(small.memory_socket, "engine", timeout_s=60)
    view = client.map("a")
    blocks = client.step(view, reserve=3).reserved
    view.pool[4] = 77
    kill(first)
    with pytest.raises(MemoryManagerGone, match="is gone"):
        client.step(view, release=blocks)
    assert view.current
    assert view.pool[4, 0] == 77

    start(small)
    again = MemoryClient(small.memory_socket, "engine", timeout_s=60)
    assert again.generation != client.generation
    assert view.current
    counters = view.counters
    assert (counters.free_pages, counters.used_pages, counters.generation) == (PAGES - 1, 0, again.generation)
    assert (view.page_table == 0).all()
    new = again.step(view, reserve=5).reserved  # a view from before works with the new client
    assert (view.page_table[new] > 0).all()
    assert counters.used_pages == 30
    assert again.map("a").pool[4, 0] == 77  # the very same memory
    with pytest.raises(MemoryManagerError, match="not held"):
        again.step(view, release=ids(19))


def test_nothing_may_be_written_for_a_dead_manager(start: Start, small: UnitSpec) -> None:
    first = start(small)
    client = MemoryClient(small.memory_socket, "engine", timeout_s=60)
    view = client.map("a")
    with client.writing():
        view.pool[1] = 1
    kill(first)
    with client.writing():  # nobody else has the pages yet
        view.pool[1] = 2
    start(small)
    with pytest.raises(MemoryManagerGone, match="has died"), client.writing():
        pytest.fail("the pages may belong to somebody else by now")
    with MemoryClient(small.memory_socket, "engine", timeout_s=60) as new, new.writing():
        view.pool[1] = 3


def test_a_new_manager_waits_for_clients_that_write(start: Start, small: UnitSpec) -> None:
    first = start(small)
    client = MemoryClient(small.memory_socket, "engine", timeout_s=60)
    with client.writing():
        kill(first)
        impatient = subprocess.run([*server.command(small), "--settle-ms", "20"], capture_output=True, timeout=60)
        assert impatient.returncode == 3
        assert b"still write into the pool" in impatient.stderr
        patient = subprocess.Popen(server.command(small), stdout=subprocess.PIPE)
        assert patient.stdout is not None
        assert not select.select([patient.stdout], [], [], 0.1)[0]
    try:
        assert server.wait_ready(patient, 60) != client.generation
    finally:
        patient.terminate()
        assert patient.wait(60) == 0
        patient.stdout.close()


def test_a_stopped_manager_leaves_nothing_behind(start: Start, small: UnitSpec) -> None:
    process = start(small)
    client = MemoryClient(small.memory_socket, "engine", timeout_s=60)
    view = client.map("a")
    process.terminate()
    assert process.wait(60) == 0
    assert not os.path.exists(small.memory_socket)
    assert not list(Path("/dev/shm").glob(f"{server.prefix(small)}*"))
    assert not view.current
    assert view.counters.generation == 0
    with pytest.raises(MemoryManagerGone), client.writing():
        pytest.fail("nobody grants pages any more")
    view.pool[1] = 1  # the mapping itself stays


def test_segments_of_a_killed_manager_can_be_removed(start: Start, small: UnitSpec) -> None:
    kill(start(small))
    assert list(Path("/dev/shm").glob(f"{server.prefix(small)}.*"))
    server.remove_segments(small)
    assert not list(Path("/dev/shm").glob(f"{server.prefix(small)}.*"))
