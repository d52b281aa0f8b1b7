"""Engines with vLLM's own KV cache, for models whose cache the shared pool cannot hold: stock scheduler, stock cache,
stock attention, under the leases of their unit."""
