"""The memory manager's rules written down a second time, slowly and plainly: what the property tests compare with."""

from __future__ import annotations

from collections import Counter
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
        return sum(len(m.cached) * m.pages_per_block for m in self.models)

    def free_pages(self) -> int:
        used = sum(len(m.used()) * m.pages_per_block for m in self.models)
        return self.pages - 1 - used - self.cached_pages()

    def available(self, m: Model) -> int:
        room = m.quota - len(m.used()) * m.pages_per_block
        blocks = min(room, self.free_pages() + self.cached_pages()) // m.pages_per_block
        return max(0, min(blocks, m.num_blocks - 1 - len(m.used())))

    def settle(self, m: Model, block: int) -> None:
        if block in m.used():
            return
        m.holders.pop(block, None)
        if block in m.hashes:
            self.clock += 1
            m.cached[block] = self.clock

    def evict(self, m: Model) -> None:
        block = min(m.cached, key=m.cached.__getitem__)
        del m.cached[block], m.hashes[block]

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
            if block not in m.hashes and m.find(content) is None:
                m.hashes[block] = content
        for block in release:
            m.holders[block].discard(client)
            self.settle(m, block)
        hits = []
        for wanted in lookups:
            hits.append([])
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
            self.evict(m)
        while self.free_pages() < count * m.pages_per_block:
            others = (other for other in self.models if other.cached)
            self.evict(m if m.cached else min(others, key=lambda other: min(other.cached.values())))
        return hits, count

    def reserved(self, client: int, m: Model, blocks: list[int]) -> None:
        for block in blocks:
            assert 0 < block < m.num_blocks
            assert block not in m.used()
            assert block not in m.cached
            m.holders[block] = {client}

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
        m.cached.clear()
        m.hashes.clear()

    def disconnect(self, client: int) -> None:
        for m in self.models:
            for block in sorted(m.holders, reverse=True):
                if client in m.holders[block]:
                    m.holders[block].discard(client)
                    self.settle(m, block)
