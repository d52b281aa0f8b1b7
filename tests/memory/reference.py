"""The memory manager's rules written down a second time, slowly and plainly: what the property tests compare with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


class Refusal(Exception):  # noqa: N818 - not an error of the reference
    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass
class Model:
    pages_per_block: int
    num_blocks: int
    quota: int
    holders: dict[int, set[int]] = field(default_factory=dict)
    hand_offs: dict[str, list[int]] = field(default_factory=dict)
    hashes: dict[int, bytes] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)  # block -> when it became cached
    # Pages of a block in layers with a window, and full blocks that the window reaches back.
    window_pages: int = 0
    window_blocks: int = 0
    aside: dict[int, int] = field(default_factory=dict)  # block -> when these pages became cached on their own
    gone: set[int] = field(default_factory=set)  # blocks that have none of these pages any more

    def pages(self, blocks: Iterable[int]) -> int:
        """Those that the blocks have beside what is cached on its own."""
        away = self.gone | set(self.aside)
        return sum(self.pages_per_block - self.window_pages * (block in away) for block in blocks)

    def used_pages(self) -> int:
        return self.pages(self.used())

    def cached_pages(self) -> int:
        return self.pages(self.cached) + self.window_pages * len(self.aside)

    def oldest(self) -> int | None:
        return min([*self.cached.values(), *self.aside.values()], default=None)

    def held(self, block: int, client: int) -> bool:
        return client in self.holders.get(block, ())

    def handed(self) -> Counter[int]:
        return Counter(block for blocks in self.hand_offs.values() for block in blocks)

    def used(self) -> set[int]:
        return {block for block, by in self.holders.items() if by} | set(self.handed())

    def find(self, wanted: bytes) -> int | None:
        return next((block for block, known in self.hashes.items() if known == wanted), None)


class Reference:
    """One pool with several models."""

    def __init__(self, pages: int, models: list[Model]) -> None:
        self.pages = pages
        self.models = models
        self.clock = 0

    # ------------------------------------------------------------ pages

    def cached_pages(self) -> int:
        return sum(m.cached_pages() for m in self.models)

    def free_pages(self) -> int:
        used = sum(m.used_pages() for m in self.models)
        return self.pages - 1 - used - self.cached_pages()

    def available(self, m: Model) -> int:
        room = m.quota - m.used_pages()
        blocks = min(room, self.free_pages() + self.cached_pages()) // m.pages_per_block
        return max(0, min(blocks, m.num_blocks - 1 - len(m.used())))

    def settle(self, m: Model, block: int) -> None:
        if block in m.used():
            return
        m.holders.pop(block, None)
        if block in m.hashes:
            self.clock += 1
            m.cached[block] = self.clock
        else:
            m.gone.discard(block)

    def evict_block(self, m: Model) -> None:
        self.withdraw(m, min(m.cached, key=m.cached.__getitem__))

    def evict(self, m: Model) -> None:
        if m.oldest() in m.cached.values():
            self.evict_block(m)
        else:
            block = min(m.aside, key=m.aside.__getitem__)
            del m.aside[block]
            m.gone.add(block)

    def withdraw(self, m: Model, block: int) -> None:
        """It can be found no more."""
        del m.hashes[block]
        if m.aside.pop(block, None) is not None:
            m.gone.add(block)
        if m.cached.pop(block, None) is not None:
            m.gone.discard(block)

    def prefix(self, m: Model, wanted: list[bytes]) -> list[int]:
        """The blocks that a lookup in a model with windows finds."""
        found = []
        for content in wanted:
            block = m.find(content)
            if block is None:
                break
            found.append(block)
        for count in range(len(found), 0, -1):
            blocks, seen = found[:count], found[:count][-m.window_blocks :]
            pages = m.pages(block for block in blocks if block not in m.used())
            pages += m.window_pages * sum(block in m.aside for block in seen)
            if m.used_pages() + pages <= m.quota and not m.gone & set(seen):
                return blocks
        return []

    # ------------------------------------------------------------ operations

    def step(
        self,
        client: int,
        m: Model,
        release: list[int],
        publish: list[tuple[int, bytes]],
        lookups: list[list[bytes]],
        reserve: int,
        partial: bool,
    ) -> tuple[list[list[int]], int]:
        """The hits of each lookup and how many blocks are reserved; `reserved` then says which they are."""
        if len(set(release)) < len(release) or not all(m.held(block, client) for block in release):
            raise Refusal("NOT_OWNER")
        if not all(m.held(block, client) for block, _ in publish):
            raise Refusal("NOT_OWNER")
        for block, content in publish:
            known = m.find(content)
            if block not in m.hashes and known in m.gone and block not in m.gone:
                assert known is not None
                self.withdraw(m, known)
            if block not in m.hashes and m.find(content) is None:
                m.hashes[block] = content
        for block in release:
            m.holders[block].discard(client)
            self.settle(m, block)
        hits = []
        for wanted in lookups:
            hits.append([])
            if m.window_pages:
                hits[-1] = self.prefix(m, wanted)
                for place, block in enumerate(hits[-1]):
                    m.cached.pop(block, None)
                    m.holders.setdefault(block, set()).add(client)
                    if place + m.window_blocks >= len(hits[-1]):
                        m.aside.pop(block, None)
                continue
            for content in wanted:
                found = m.find(content)
                if found is None:
                    break
                if found not in m.used():
                    if (len(m.used()) + 1) * m.pages_per_block > m.quota:
                        break
                    del m.cached[found]
                m.holders.setdefault(found, set()).add(client)
                hits[-1].append(found)
        available = self.available(m)
        count = min(reserve, available) if partial else (reserve if reserve <= available else 0)
        while m.num_blocks - 1 - len(m.used()) - len(m.cached) < count:
            self.evict_block(m)
        while self.free_pages() < count * m.pages_per_block:
            others = [(when, other) for other in self.models if (when := other.oldest()) is not None]
            self.evict(m if m.oldest() is not None else min(others, key=lambda each: each[0])[1])
        return hits, count

    def reserved(self, client: int, m: Model, blocks: list[int]) -> None:
        for block in blocks:
            assert 0 < block < m.num_blocks
            assert block not in m.used()
            assert block not in m.cached
            assert block not in m.gone
            m.holders[block] = {client}

    def leave_window(self, client: int, m: Model, blocks: list[int]) -> None:
        if not m.window_pages:
            raise Refusal("INVALID")
        if not all(m.held(block, client) for block in blocks):
            raise Refusal("NOT_OWNER")
        for block in blocks:
            if m.holders[block] != {client} or m.handed()[block] or block in m.gone or block in m.aside:
                continue
            if block in m.hashes:
                self.clock += 1
                m.aside[block] = self.clock
            else:
                m.gone.add(block)

    def hand_off(self, client: int, m: Model, key: str, blocks: list[int], release: list[int]) -> None:
        if not blocks:
            raise Refusal("INVALID")
        if key in m.hand_offs:
            raise Refusal("KEY_EXISTS")
        for ids in (blocks, release):
            if len(set(ids)) < len(ids) or not all(m.held(block, client) for block in ids):
                raise Refusal("NOT_OWNER")
        m.hand_offs[key] = list(blocks)
        for block in release:
            m.holders[block].discard(client)
            self.settle(m, block)

    def adopt(self, client: int, m: Model, key: str) -> list[int]:
        if key not in m.hand_offs:
            raise Refusal("UNKNOWN_KEY")
        blocks = m.hand_offs.pop(key)
        for block in blocks:
            m.holders.setdefault(block, set()).add(client)
        return blocks

    def drop(self, m: Model, key: str) -> None:
        if key not in m.hand_offs:
            raise Refusal("UNKNOWN_KEY")
        for block in reversed(m.hand_offs.pop(key)):
            self.settle(m, block)

    def set_quotas(self, quotas: list[int]) -> None:
        if sum(quotas) > self.pages:
            raise Refusal("QUOTA_EXCEEDS_POOL")
        for m, quota in zip(self.models, quotas, strict=True):
            m.quota = quota

    def reset_cache(self, m: Model) -> None:
        m.gone |= set(m.aside)
        m.gone -= set(m.cached)
        m.aside.clear()
        m.cached.clear()
        m.hashes.clear()

    def disconnect(self, client: int) -> None:
        for m in self.models:
            for block in sorted(m.holders, reverse=True):
                if client in m.holders[block]:
                    m.holders[block].discard(client)
                    self.settle(m, block)
