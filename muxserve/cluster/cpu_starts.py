"""How the parts of a unit on a CPU come up: memory manager, warm parent and unit scheduler at once; engines are forked
when the memory manager serves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from muxserve.cluster.events import PartId
from muxserve.cluster.starts import MEMORY, UNIT, WARM, UnitStarts
from muxserve.cluster.supervision import Part, PartDied, PartFailed, while_running


class CpuStarts(UnitStarts):
    """See `UnitStarts`. The pools are as large as planned."""

    def _base(self) -> Sequence[PartId]:
        return MEMORY, WARM, UNIT

    def open(self) -> None:
        """See `UnitStarts.open`."""
        super().open()
        self.sized.set()

    async def _fork(self, part: Part) -> None:
        link = await self._until_warm()
        birth = self._order(part, link)
        try:
            process = await self._until_forked(part, birth)
            await while_running(process, asyncio.shield(birth.up))
        except (PartDied, PartFailed) as failure:
            raise await self._last_words(birth) or failure from None
