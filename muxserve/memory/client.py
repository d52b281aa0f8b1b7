"""Client of the memory manager.

A client *holds* blocks: a block is free again when its last holder has released it, and everything that a client holds
is released when its connection ends. A hold is not counted: a client that uses a block for two requests (a shared
prefix) holds it once and releases it once, when the last of them is done.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Union

import numpy as np
import numpy.typing as npt

from muxserve.memory import _native
from muxserve.memory.errors import MemoryManagerError, MemoryManagerGone
from muxserve.memory.view import BlockIds, ModelView, Views

Hashes = Union[bytes, Iterable[bytes]]
"""Content hashes of 32 bytes each: a sequence of them, or all of them in one bytes object."""

_NO_IDS: BlockIds = np.empty(0, dtype=np.int32)


class StepResult(NamedTuple):
    """What one step brought. All these blocks are now held by the client.

    `lookups[i]` has the blocks of the longest published prefix of the i-th lookup; `reserved` the new blocks. Both are
    int32 arrays of block ids.
    """

    lookups: list[BlockIds]
    reserved: BlockIds


ModelHandle = Union[str, int, ModelView]


class MemoryClient:
    """One connection to the memory manager.

    Every method raises `MemoryManagerError` if the manager refuses the request, in which case nothing of it was done,
    and `MemoryManagerGone` if the connection is lost. A model is given by name, index or `ModelView`.

    Args:
        socket_path: where the manager listens.
        name: for statistics; 1 to 128 bytes of UTF-8 without control characters.
        timeout_s: how long an answer may take before the manager counts as gone.
    """

    def __init__(self, socket_path: str, name: str, timeout_s: float = 10.0) -> None:
        self._native = _native.Client(socket_path, name, timeout_s)
        self._read_description(self._native.description)
        self._views = Views(socket_path)
        self._guard: _native.WriteGuard | None = None

    def close(self) -> None:
        """End the connection; the manager releases what this client holds. Mapped memory stays mapped."""
        self._native.close()

    def __enter__(self) -> MemoryClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def generation(self) -> int:
        """Random number of the manager's present life."""
        return self._native.generation

    @property
    def client_id(self) -> int:
        """Slot of this client at the manager, 0 to 63."""
        return self._native.client_id

    @property
    def description(self) -> dict[str, Any]:
        """Pools and models of the manager, as of connecting or the last `refresh`."""
        return self._description

    def refresh(self) -> dict[str, Any]:
        """Ask for the description again, after models were added or removed elsewhere."""
        self._read_description(self._native.describe())
        return self._description

    # ------------------------------------------------------------ blocks

    def step(
        self,
        model: ModelHandle,
        *,
        release: npt.ArrayLike = _NO_IDS,
        publish_ids: npt.ArrayLike = _NO_IDS,
        publish_hashes: Hashes = b"",
        lookups: Sequence[Hashes] = (),
        reserve: int = 0,
        partial: bool = False,
    ) -> StepResult:
        """One round trip for everything that an engine step needs: publish, release, look up, reserve, in this order.

        Args:
            release: blocks to give up; the earlier in the list, the earlier evicted if published.
            publish_ids: held blocks that others may find by `publish_hashes` from now on, so their content must be
                written. If a hash or a block is published already, the first one stays.
            lookups: one list of hashes per request.
            reserve: how many new blocks are wanted. They cannot fail later; give back with `release` what is not used.
            partial: take fewer if quota or pool do not allow all; otherwise it is all or none.

        Raises:
            MemoryManagerError: NOT_OWNER for a block that this client does not hold or gives twice.
        """
        reserved, hits, lengths = self._native.step(
            self._index(model), _ids(release), _ids(publish_ids), publish_hashes, lookups, reserve, partial
        )
        if hits is None or lengths is None:
            return StepResult([], reserved)
        found = []
        begin = 0
        for length in lengths:
            found.append(hits[begin : begin + length])
            begin += length
        return StepResult(found, reserved)

    def post(
        self,
        model: ModelHandle,
        *,
        release: npt.ArrayLike = _NO_IDS,
        publish_ids: npt.ArrayLike = _NO_IDS,
        publish_hashes: Hashes = b"",
    ) -> None:
        """Publish and release without waiting for an answer; done before anything that this client asks later.

        A refusal is raised by a later call: the manager's answer is met there.
        """
        self._native.post(self._index(model), _ids(release), _ids(publish_ids), publish_hashes)

    def hand_off(
        self,
        model: ModelHandle,
        key: str,
        blocks: npt.ArrayLike,
        ttl_seconds: float,
        release: npt.ArrayLike | None = None,
    ) -> None:
        """Leave `blocks`, at least one, under `key` for whoever adopts them within `ttl_seconds`.

        This client's hold ends on `release`, by default on all of `blocks`; leave out those that other requests of this
        client still use.

        Raises:
            MemoryManagerError: NOT_OWNER, KEY_EXISTS, INVALID for no blocks or a key that has not 1 to 128 bytes of
                UTF-8 without control characters, or EXHAUSTED where too many hand-offs are waiting.
        """
        ids = _ids(blocks)
        self._native.hand_off(self._index(model), key, ids, ids if release is None else _ids(release), ttl_seconds)

    def adopt(self, model: ModelHandle, key: str) -> BlockIds:
        """Take over the blocks of a hand-off, in its order. It is gone then.

        Raises:
            MemoryManagerError: UNKNOWN_KEY if it was adopted, dropped or expired, or never was.
        """
        return self._native.adopt(self._index(model), key)

    def drop(self, model: ModelHandle, key: str) -> None:
        """Give a hand-off up.

        Raises:
            MemoryManagerError: UNKNOWN_KEY.
        """
        self._native.drop(self._index(model), key)

    def leave_window(self, model: ModelHandle, blocks: npt.ArrayLike) -> None:
        """Give up the pages of windowed layers in `blocks`: no token to come sees what they hold.

        Pages of blocks that somebody else has as well stay. Those of published blocks are cached, and come back into
        use where a lookup needs them. The others' entries in the page table are zero when this returns.

        Raises:
            MemoryManagerError: NOT_OWNER for a block that this client does not hold, or INVALID for a model without
                windowed layers.
        """
        self._native.leave_window(self._index(model), _ids(blocks))

    # ------------------------------------------------------------ models

    def set_quotas(self, quotas: Mapping[str, int]) -> None:
        """Set the quotas (pages) of some models at once. Below the present use a model just gets no new pages.

        Raises:
            MemoryManagerError: QUOTA_EXCEEDS_POOL if the quotas of a pool would sum to more than its pages.
        """
        self._native.set_quotas([(self._index(model), pages) for model, pages in quotas.items()])

    def set_room(self, pool: str, pages: int) -> None:
        """Have that many pages of a pool in use at most, rounded up to whole chunks (its null page counts). What is
        cached in chunks that have to go is evicted; their memory is given back when nobody uses a page of them, which
        the counter `backed_pages` shows.

        Raises:
            MemoryManagerError: INVALID for more pages than the pool has, or NO_MEMORY where there is none for more
                chunks: then the pool has those that there was memory for.
            KeyError: there is no such pool.
        """
        index = {each["name"]: number for number, each in enumerate(self._description["pools"])}[pool]
        self._native.set_room(index, pages)

    def stats(self) -> dict[str, Any]:
        """Pages by state and pool and model, hits, evictions, hand-offs, and what each client holds."""
        result: dict[str, Any] = json.loads(self._native.statistics())
        return result

    def reset_cache(self, model: ModelHandle) -> None:
        """Forget every published block of the model."""
        self._native.reset_cache(self._index(model))

    def add_model(self, model: _native.ModelConfig) -> int:
        """Add a model to a running manager; returns its index. A manager that is started again does not know it.

        Raises:
            MemoryManagerError: INVALID, QUOTA_EXCEEDS_POOL, EXHAUSTED where a bound of the manager is reached, or
                NO_MEMORY where the machine has not the memory for the page table.
        """
        index = self._native.add_model(model)
        self.refresh()
        return index

    def remove_model(self, model: ModelHandle) -> None:
        """Remove a model that owns nothing.

        Raises:
            MemoryManagerError: MODEL_IN_USE.
        """
        self._native.remove_model(self._index(model))
        self.refresh()

    # ------------------------------------------------------------ memory

    def map(self, model: ModelHandle, rank: int = 0) -> ModelView:
        """Map the model's page table, its pool on `rank` and the counters into this process. Tables and counters are
        the same for all ranks.

        The mappings live as long as the arrays, also after the connection has ended.

        Raises:
            MemoryManagerGone: the memory is not there any more.
            ValueError: the pool has no such rank.
        """
        index = self._index(model)  # may ask for the description again
        return self._views.view(self._description, self._models[index], rank)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around everything that writes into pages of held blocks.

        A manager that is started while the block runs waits for its end before it gives these pages to anyone else.
        Costs two system calls. Not to be nested.

        Raises:
            MemoryManagerGone: the manager that granted the blocks has died; nothing may be written.
        """
        if self._guard is None:
            self._guard = _native.WriteGuard(self._description["prefix"], self.generation)
        if not self._guard.acquire():
            raise MemoryManagerGone("the memory manager that granted the blocks has died")
        try:
            yield
        finally:
            self._guard.release()

    # ------------------------------------------------------------ inside

    def _read_description(self, text: str) -> None:
        self._description: dict[str, Any] = json.loads(text)
        self._models: dict[int, dict[str, Any]] = {m["index"]: m for m in self._description["models"]}
        self._indices: dict[str, int] = {m["name"]: m["index"] for m in self._description["models"]}

    def _index(self, model: ModelHandle) -> int:
        if isinstance(model, ModelView):
            return model.index
        if isinstance(model, int):
            return model
        index = self._indices.get(model)
        if index is None:
            self.refresh()
            index = self._indices.get(model)
            if index is None:
                known = ", ".join(sorted(self._indices)) or "none"
                raise MemoryManagerError("UNKNOWN_MODEL", f"there is no model {model!r}; there are: {known}")
        return index


def _ids(ids: npt.ArrayLike) -> BlockIds:
    if isinstance(ids, np.ndarray):
        if ids.dtype != np.int32:
            raise TypeError(f"block ids must be int32, not {ids.dtype}")
        return ids if ids.flags.c_contiguous else np.ascontiguousarray(ids)
    return np.array(ids, dtype=np.int32)
