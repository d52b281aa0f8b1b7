"""How a fleet may be served: what the contest chooses among.

- `ways`: the ways to serve, each with how it is planned
- `layouts`: where the replicas of a model may be that has devices to itself
- `device_pool`: the devices, GPUs or the cores of a machine, that it may have
- `one_engine`: what an engine of both phases serves there
- `dedicated_units`: units of such models, beside the shared ones
- `resident_units`: which models share GPUs where memory decides who is awake
"""
