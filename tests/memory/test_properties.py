"""Random operations against a plain reference: the core in this process, and a real manager over its socket.

After every operation the invariant is checked: free + owned + handed-off + cached pages are the pool, no page twice.
"""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from muxserve.memory import MemoryManagerError, _native, server
from muxserve.memory.client import MemoryClient
from muxserve.spec import UnitSpec
from tests.memory.reference import Model, Reference, Refusal
from tests.memory.support import block_hash, ids, model, stats_of, unit_spec
from tests.support.patience import eventually

CLIENTS = 3
NAMES = ("a", "b")
# Few pages, so that models often take each other's cached ones.
PAGES = 41
# The layer of the first model that has a window.
WINDOWED = 0
QUOTAS = [(30, 11), (41, 0), (0, 41), (20, 21), (12, 6), (41, 1)]


def small_pool(run_dir: Path) -> UnitSpec:
    return unit_spec(run_dir, PAGES, [model("a", 2, 3, 20, 30), model("b", 1, 2, 40, 11)])


def with_window(of: UnitSpec) -> UnitSpec:
    """The first of two layers of the first model sees two full blocks before the one that a token is in."""
    first, *others = of.models
    windowed = msgspec.structs.replace(first, window=2 * first.block_tokens, windowed_layers=(WINDOWED,))
    return msgspec.structs.replace(of, models=[windowed, *others])


class InProcess:
    """The C++ core without a server."""

    def __init__(self) -> None:
        config = server.manager_config(with_window(small_pool(Path("/nowhere"))))
        self.core = _native.Manager(config)
        self.slots: dict[int, int] = {}

    def connect(self, client: int) -> None:
        self.slots[client] = self.core.connect(f"client {client}")

    def disconnect(self, client: int) -> None:
        self.core.disconnect(self.slots.pop(client))

    def step(
        self,
        client: int,
        model: int,
        release: list[int],
        publish: list[tuple[int, bytes]],
        lookups: list[list[bytes]],
        reserve: int,
        partial: bool,
    ) -> tuple[list[list[int]], list[int]]:
        reserved, hits, lengths = self.core.step(
            self.slots[client],
            model,
            ids(*release),
            ids(*(block for block, _ in publish)),
            [content for _, content in publish],
            lookups,
            reserve,
            partial,
        )
        if hits is None or lengths is None:
            return [], reserved.tolist()
        ends = np.cumsum(lengths)
        return [hits[end - n : end].tolist() for n, end in zip(lengths, ends, strict=True)], reserved.tolist()

    def hand_off(self, client: int, model: int, key: str, blocks: list[int], release: list[int]) -> None:
        self.core.hand_off(self.slots[client], model, key, ids(*blocks), ids(*release), 10, 0)

    def adopt(self, client: int, model: int, key: str) -> list[int]:
        blocks: list[int] = self.core.adopt(self.slots[client], model, key).tolist()
        return blocks

    def leave_window(self, client: int, model: int, blocks: list[int]) -> None:
        self.core.leave_window(self.slots[client], model, ids(*blocks))

    def drop(self, model: int, key: str) -> None:
        self.core.drop(model, key)

    def set_quotas(self, quotas: list[int]) -> None:
        self.core.set_quotas(list(enumerate(quotas)))

    def reset_cache(self, model: int) -> None:
        self.core.reset_cache(model)

    def page_table(self, model: int) -> np.ndarray[Any, Any]:
        return self.core.page_table(model)

    def stats(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.core.statistics())
        return result

    def check(self) -> None:
        self.core.check()


class OverTheSocket:
    """A real manager; every client of the test is a connection of its own."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self.watcher = MemoryClient(socket_path, "watcher", timeout_s=60)
        self.views = [self.watcher.map(name) for name in NAMES]
        self.clients: dict[int, MemoryClient] = {}

    def connect(self, client: int) -> None:
        self.clients[client] = MemoryClient(self.socket_path, f"client {client}", timeout_s=60)

    def disconnect(self, client: int) -> None:
        name = f"client {client}"
        self.clients.pop(client).close()
        eventually(lambda: name not in [entry["name"] for entry in self.stats()["clients"]], "the client has left")

    def step(
        self,
        client: int,
        model: int,
        release: list[int],
        publish: list[tuple[int, bytes]],
        lookups: list[list[bytes]],
        reserve: int,
        partial: bool,
    ) -> tuple[list[list[int]], list[int]]:
        result = self.clients[client].step(
            model,
            release=ids(*release),
            publish_ids=ids(*(block for block, _ in publish)),
            publish_hashes=[content for _, content in publish],
            lookups=lookups,
            reserve=reserve,
            partial=partial,
        )
        return [hits.tolist() for hits in result.lookups], result.reserved.tolist()

    def hand_off(self, client: int, model: int, key: str, blocks: list[int], release: list[int]) -> None:
        self.clients[client].hand_off(model, key, ids(*blocks), 10_000.0, release=ids(*release))

    def adopt(self, client: int, model: int, key: str) -> list[int]:
        blocks: list[int] = self.clients[client].adopt(model, key).tolist()
        return blocks

    def leave_window(self, client: int, model: int, blocks: list[int]) -> None:
        self.clients[client].leave_window(model, ids(*blocks))

    def drop(self, model: int, key: str) -> None:
        self.watcher.drop(model, key)

    def set_quotas(self, quotas: list[int]) -> None:
        self.watcher.set_quotas(dict(zip(NAMES, quotas, strict=True)))

    def reset_cache(self, model: int) -> None:
        self.watcher.reset_cache(model)

    def page_table(self, model: int) -> np.ndarray[Any, Any]:
        return self.views[model].page_table

    def stats(self) -> dict[str, Any]:
        return self.watcher.stats()

    def check(self) -> None:
        for index, name in enumerate(NAMES):
            counters = self.views[index].counters
            stats = stats_of(self.stats(), name)
            assert counters.used_pages == stats["owned_pages"] + stats["handed_pages"]
            assert counters.cached_pages == stats["cached_pages"]

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self.watcher.close()


Backend = InProcess | OverTheSocket
clients = st.integers(0, CLIENTS - 1)
models = st.integers(0, 1)
keys = st.sampled_from(["k1", "k2", "k3"])
contents = st.integers(0, 29).map(block_hash)


class Machine(RuleBasedStateMachine):
    make_backend: ClassVar[Callable[[], Backend]]

    @initialize()
    def begin(self) -> None:
        self.backend = type(self).make_backend()
        windowed = Model(6, 20, 30, window_pages=3, window_blocks=2)
        self.reference = Reference(PAGES, [windowed, Model(2, 40, 11)])
        for client in range(CLIENTS):
            self.backend.connect(client)

    def teardown(self) -> None:
        if isinstance(backend := getattr(self, "backend", None), OverTheSocket):
            backend.close()

    def held(self, client: int, model: int) -> list[int]:
        return [b for b in sorted(self.reference.models[model].holders) if self.reference.models[model].held(b, client)]

    def blocks(self, data: st.DataObject, client: int, model: int) -> list[int]:
        """Mostly blocks that the client holds, sometimes others, sometimes one twice."""
        held = self.held(client, model)
        good = st.lists(st.sampled_from(held), unique=True) if held else st.just([])
        bad = st.lists(st.integers(-1, 41), min_size=1, max_size=3)
        blocks: list[int] = data.draw(st.one_of(good, good, good, good, bad))
        return blocks

    def same(self, ours: Callable[[], Any], theirs: Callable[[], Any]) -> Any:
        """The reference's result; both must agree also in refusing."""
        try:
            expected = ours()
        except Refusal as caught:
            refusal = caught
        else:
            return expected, theirs()
        with pytest.raises(MemoryManagerError) as error:
            theirs()
        assert error.value.code == refusal.code
        return None

    @rule(
        data=st.data(),
        client=clients,
        model=models,
        lookups=st.lists(st.lists(contents, max_size=4), max_size=3),
        reserve=st.integers(0, 12),
        partial=st.booleans(),
    )
    def step(
        self, data: st.DataObject, client: int, model: int, lookups: list[list[bytes]], reserve: int, partial: bool
    ) -> None:
        release = self.blocks(data, client, model)
        publish = [(block, data.draw(contents)) for block in self.blocks(data, client, model)]
        m = self.reference.models[model]
        args = (release, publish, lookups, reserve, partial)
        both = self.same(lambda: self.reference.step(client, m, *args), lambda: self.backend.step(client, model, *args))
        if both is not None:
            (hits, count), (got_hits, reserved) = both
            assert got_hits == hits
            assert len(reserved) == count == len(set(reserved))
            self.reference.reserved(client, m, reserved)

    @rule(client=clients, model=models, first=st.integers(0, 29), more=st.integers(1, 8), reserve=st.integers(0, 8))
    def finish(self, client: int, model: int, first: int, more: int, reserve: int) -> None:
        """Reserve, make everything held cached, and reserve again: what fills the pool with cached blocks."""
        m = self.reference.models[model]
        for release, count in ((False, more), (True, reserve)):
            held = self.held(client, model) if release else []
            publish = [(block, block_hash((first + i) % 30)) for i, block in enumerate(held)]
            _, expected = self.reference.step(client, m, held, publish, [], count, True)
            _, reserved = self.backend.step(client, model, held, publish, [], count, True)
            assert len(reserved) == expected
            self.reference.reserved(client, m, reserved)

    @rule(data=st.data(), client=clients, model=models, key=keys)
    def hand_off(self, data: st.DataObject, client: int, model: int, key: str) -> None:
        blocks, release = self.blocks(data, client, model), self.blocks(data, client, model)
        m = self.reference.models[model]
        self.same(
            lambda: self.reference.hand_off(client, m, key, blocks, release),
            lambda: self.backend.hand_off(client, model, key, blocks, release),
        )

    @rule(client=clients, model=models, key=keys)
    def adopt(self, client: int, model: int, key: str) -> None:
        m = self.reference.models[model]
        both = self.same(lambda: self.reference.adopt(client, m, key), lambda: self.backend.adopt(client, model, key))
        assert both is None or both[0] == both[1]

    @rule(data=st.data(), client=clients, model=models)
    def leave_window(self, data: st.DataObject, client: int, model: int) -> None:
        blocks = self.blocks(data, client, model)
        m = self.reference.models[model]
        self.same(
            lambda: self.reference.leave_window(client, m, blocks),
            lambda: self.backend.leave_window(client, model, blocks),
        )

    @rule(model=models, key=keys)
    def drop(self, model: int, key: str) -> None:
        m = self.reference.models[model]
        self.same(lambda: self.reference.drop(m, key), lambda: self.backend.drop(model, key))

    @rule(chosen=st.sampled_from(QUOTAS))
    def set_quotas(self, chosen: tuple[int, int]) -> None:
        quotas = list(chosen)
        self.same(lambda: self.reference.set_quotas(quotas), lambda: self.backend.set_quotas(quotas))

    @rule(model=models)
    @precondition(lambda self: self.reference.clock % 5 == 4)  # seldom: it empties what others test
    def reset_cache(self, model: int) -> None:
        self.reference.reset_cache(self.reference.models[model])
        self.backend.reset_cache(model)

    @rule(client=clients)
    def die_and_come_back(self, client: int) -> None:
        self.reference.disconnect(client)
        self.backend.disconnect(client)
        self.backend.connect(client)

    @invariant()
    def pages_are_accounted_for(self) -> None:
        if not hasattr(self, "backend"):
            return
        self.backend.check()
        stats = self.backend.stats()
        pool = stats_of(stats, "p")
        assert pool["free_pages"] == self.reference.free_pages()
        kinds = ("free_pages", "owned_pages", "handed_pages", "cached_pages")
        assert sum(pool[kind] for kind in kinds) + 1 == PAGES
        pages: list[int] = []
        for index, m in enumerate(self.reference.models):
            owned = {block for block, by in m.holders.items() if by}
            entry = stats_of(stats, NAMES[index])
            assert entry["owned_pages"] == m.pages(owned)
            assert entry["handed_pages"] == m.pages(m.used() - owned)
            assert entry["cached_pages"] == m.cached_pages()
            table = self.backend.page_table(index)
            for block in m.used() | set(m.cached):
                rows = table[block]
                if block in m.gone:
                    assert not rows[WINDOWED].any()
                    rows = rows[[layer for layer in range(len(rows)) if layer != WINDOWED]]
                pages.extend(rows.reshape(-1).tolist())
        assert len(set(pages)) == len(pages), "a page is in use twice"
        assert all(0 < page < PAGES for page in pages)


def check(backend: Callable[[], Backend], examples: int, steps: int) -> None:
    class Concrete(Machine):
        make_backend = staticmethod(backend)

    run_state_machine_as_test(
        Concrete,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_core_agrees_with_the_reference() -> None:
    check(InProcess, examples=60, steps=60)


def test_the_server_agrees_with_the_reference() -> None:
    with tempfile.TemporaryDirectory() as run_dir:
        of = with_window(small_pool(Path(run_dir)))
        process = server.start(of)
        try:

            def fresh() -> OverTheSocket:
                backend = OverTheSocket(of.memory_socket)
                eventually(lambda: len(backend.stats()["clients"]) == 1, "the clients of the last run have left")
                for model in range(2):
                    for key in ("k1", "k2", "k3"):
                        with contextlib.suppress(MemoryManagerError):  # there may be none of that key
                            backend.drop(model, key)
                    backend.reset_cache(model)
                backend.set_quotas([30, 11])
                assert stats_of(backend.stats(), "p")["free_pages"] == PAGES - 1
                return backend

            check(fresh, examples=25, steps=40)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            process.stderr.close()
