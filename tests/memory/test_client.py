"""The client against a real manager: arguments, results, mappings and errors of its operations.

What operations do to blocks, pages and quotas: `test_properties.py`, over this client too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from muxserve.memory import MemoryManagerError, MemoryManagerGone
from muxserve.memory._native import ModelConfig
from muxserve.memory.client import MemoryClient
from muxserve.spec import UnitSpec
from tests.memory.support import PAGE_BYTES, PAGES, assert_balanced, block_hash, ids, stats_of
from tests.support.patience import eventually

Connect = Callable[..., MemoryClient]


def test_description_names_pools_and_models(connect: Connect) -> None:
    client = connect()
    assert [pool["name"] for pool in client.description["pools"]] == ["p"]
    assert [(m["name"], m["layers"], m["kv_heads"]) for m in client.description["models"]] == [("a", 2, 3), ("b", 1, 2)]
    assert int(client.description["generation"]) == client.generation != 0


def test_reserved_blocks_have_pages_in_the_mapped_table(connect: Connect) -> None:
    client = connect()
    view = client.map("a")
    assert view.page_table.shape == (20, 2, 3)
    assert view.pool.shape == (PAGES, PAGE_BYTES)
    blocks = client.step(view, reserve=3).reserved
    assert blocks.dtype == np.int32
    pages = view.page_table[blocks].reshape(-1)
    assert len(set(pages.tolist())) == 18
    assert pages.min() > 0
    assert (view.page_table[0] == 0).all()
    with pytest.raises(ValueError, match="read-only"):
        view.page_table[1] = 0


def test_views_of_one_pool_share_memory(connect: Connect) -> None:
    a, b = connect().map("a"), connect().map("b")
    a.pool[7, 3] = 42
    assert b.pool[7, 3] == 42
    assert b.pool.flags.writeable


def test_mapped_memory_outlives_the_client(connect: Connect) -> None:
    client = connect()
    view = client.map("a")
    client.close()
    view.pool[5] = 1
    assert view.page_table[0, 0, 0] == 0
    assert view.counters.free_pages == PAGES - 1


def test_counters_follow_every_step(connect: Connect) -> None:
    client = connect()
    a, b = client.map("a").counters, client.map("b").counters
    assert (a.free_pages, a.used_pages, a.quota_pages, a.available_blocks) == (100, 0, 60, 10)
    blocks = client.step("a", reserve=4).reserved
    assert (a.free_pages, a.used_pages, a.available_blocks, b.available_blocks) == (76, 24, 6, 20)
    client.step("a", publish_ids=blocks[:2], publish_hashes=[block_hash(0), block_hash(1)], release=blocks)
    assert (a.free_pages, a.used_pages, a.cached_pages, a.pool_cached_pages) == (88, 0, 12, 12)
    assert a.available_blocks == 10
    assert a.generation == client.generation


@pytest.mark.parametrize("packed", [False, True])
def test_lookups_find_the_longest_published_prefix(connect: Connect, packed: bool) -> None:
    prefill, decode = connect("prefill"), connect("decode")
    blocks = prefill.step("a", reserve=4).reserved
    hashes = [block_hash(i) for i in range(4)]
    prefill.step("a", publish_ids=blocks, publish_hashes=b"".join(hashes) if packed else hashes)
    wanted = [hashes, [hashes[0], block_hash(9), hashes[1]], [], hashes[:2]]
    found = decode.step("a", lookups=[b"".join(w) for w in wanted] if packed else wanted, reserve=2)
    assert [hits.tolist() for hits in found.lookups] == [blocks.tolist(), blocks[:1].tolist(), [], blocks[:2].tolist()]
    assert len(found.reserved) == 2
    assert not set(found.reserved.tolist()) & set(blocks.tolist())
    prefill.step("a", release=blocks)
    assert decode.step("a", lookups=[hashes]).lookups[0].tolist() == blocks.tolist()
    decode.step("a", release=np.concatenate([blocks, found.reserved]))
    stats = stats_of(decode.stats(), "a")
    assert (stats["owned_pages"], stats["cached_pages"], stats["hits"], stats["lookups"]) == (0, 24, 11, 13)
    assert_balanced(decode)


def test_posts_are_ordered_with_steps(connect: Connect) -> None:
    client = connect()
    for _ in range(200):
        blocks = client.step("a", reserve=10).reserved
        assert len(blocks) == 10  # the quota: works only if the post before was carried out
        client.post("a", release=blocks)
    assert stats_of(client.stats(), "a")["owned_pages"] == 0


def test_a_refused_post_is_raised_later(connect: Connect) -> None:
    client = connect()
    client.post("a", release=ids(3))
    client.stats()
    with pytest.raises(MemoryManagerError, match=r"earlier post was refused: .*block 3 is not held") as error:
        client.stats()
    assert error.value.code == "NOT_OWNER"
    client.stats()


def test_hand_off_and_adopt(connect: Connect) -> None:
    prefill, decode = connect("prefill"), connect("decode")
    blocks = prefill.step("a", reserve=3).reserved
    prefill.hand_off("a", "request", blocks, 1000.0)
    assert stats_of(prefill.stats(), "a")["handed_pages"] == 18
    with pytest.raises(MemoryManagerError, match="not held"):
        prefill.step("a", release=blocks)
    prefill.close()
    assert decode.adopt("a", "request").tolist() == blocks.tolist()
    with pytest.raises(MemoryManagerError, match="no hand-off") as error:
        decode.adopt("a", "request")
    assert error.value.code == "UNKNOWN_KEY"
    decode.step("a", release=blocks)
    assert_balanced(decode)


def test_hand_offs_expire_by_themselves(connect: Connect) -> None:
    client = connect()
    view = client.map("a")
    blocks = client.step(view, reserve=3).reserved
    client.hand_off(view, "soon", blocks, 0.02)
    eventually(lambda: view.counters.used_pages == 0, "the hand-off expires")
    with pytest.raises(MemoryManagerError) as error:
        client.adopt(view, "soon")
    assert error.value.code == "UNKNOWN_KEY"
    assert stats_of(client.stats(), "a")["expired_hand_offs"] == 1


@pytest.mark.parametrize("ttl", [0.0, -1.0, float("nan"), float("inf")])
def test_hand_off_times_are_checked(connect: Connect, ttl: float) -> None:
    client = connect()
    with pytest.raises(MemoryManagerError, match="time to live"):
        client.hand_off("a", "k", ids(), ttl)


def test_models_can_be_added_and_removed(connect: Connect) -> None:
    client, other = connect(), connect()
    client.set_quotas({"a": 50})
    index = client.add_model(ModelConfig("c", "p", layers=1, kv_heads=1, num_blocks=4, quota_pages=3))
    view = other.map("c")  # a client that connected before
    assert (view.index, view.page_table.shape) == (index, (4, 1, 1))
    blocks = other.step("c", reserve=2).reserved
    with pytest.raises(MemoryManagerError) as error:
        client.remove_model("c")
    assert error.value.code == "MODEL_IN_USE"
    other.step("c", release=blocks)
    client.remove_model("c")
    with pytest.raises(MemoryManagerError) as error:
        other.step("c", reserve=1)
    assert error.value.code == "UNKNOWN_MODEL"
    assert not view.current
    with pytest.raises(MemoryManagerError, match="no pool"):
        client.add_model(ModelConfig("d", "q", layers=1, kv_heads=1, num_blocks=4, quota_pages=3))


def test_a_model_with_a_window_can_be_added(connect: Connect) -> None:
    client = connect("c")
    client.set_quotas({"a": 50})
    client.add_model(ModelConfig("c", "p", 2, 1, num_blocks=4, quota_pages=4, windowed_layers=[1], window_blocks=1))
    view = client.map("c")
    blocks = client.step("c", reserve=2).reserved
    client.leave_window("c", blocks[:1])
    assert view.page_table[blocks[0]].tolist()[1] == [0]
    assert view.page_table[blocks[1]].all()
    assert view.counters.used_pages == 3
    assert [entry["held_pages"] for entry in client.stats()["clients"] if entry["name"] == "c"] == [3]
    with pytest.raises(MemoryManagerError) as error:
        client.leave_window("a", [])
    assert error.value.code == "INVALID"


def test_statistics_name_the_clients(connect: Connect) -> None:
    import os

    first, second = connect("first"), connect('sec"ond')
    second.step("b", reserve=2)
    clients = {entry["name"]: entry for entry in first.stats()["clients"]}
    assert clients['sec"ond']["held_pages"] == 4
    assert clients["first"] == {"id": first.client_id, "name": "first", "pid": os.getpid(), "held_pages": 0}


def test_arguments_that_name_nothing_or_have_wrong_types_are_refused(connect: Connect) -> None:
    client = connect()
    with pytest.raises(MemoryManagerError, match="no model 'z'; there are: a, b"):
        client.set_quotas({"z": 1})
    with pytest.raises(TypeError, match="int32"):
        client.step("a", release=np.array([1], dtype=np.int64))
    with pytest.raises(ValueError, match="32 bytes"):
        client.step("a", lookups=[[b"short"]])
    with pytest.raises(ValueError, match="exactly one hash"):
        client.step("a", publish_ids=ids(1), publish_hashes=b"")
    with pytest.raises(TypeError):
        client.step("a", reserve=-1)
    with pytest.raises(OverflowError):
        client.step("a", release=[1 << 40])
    blocks = client.step("a", reserve=4).reserved
    client.step("a", release=blocks[::2])  # a strided view works
    client.step("a", release=blocks[1::2].tolist())
    assert stats_of(client.stats(), "a")["owned_pages"] == 0


def test_one_client_may_be_used_by_many_threads(connect: Connect) -> None:
    client = connect()

    def work() -> None:
        for _ in range(200):
            blocks = client.step("b", reserve=1, partial=True).reserved
            client.post("b", release=blocks)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stats_of(client.stats(), "b")["owned_pages"] == 0


def test_a_closed_client_says_so(connect: Connect) -> None:
    client = connect()
    client.close()
    client.close()
    with pytest.raises(MemoryManagerGone, match="closed"):
        client.step("a", reserve=1)


def test_no_manager_no_client(small: UnitSpec) -> None:
    with pytest.raises(MemoryManagerGone, match="no memory manager answers"):
        MemoryClient(small.memory_socket, "early")
    with pytest.raises(ConnectionError):
        MemoryClient("/" + "x" * 200, "long")
