"""Units that fit their machine, and what their processes are started with.

- `fleet_planner`: the units that `muxserve deploy` starts, now and later
- `unit_plan`, `gpus`: one unit on a CPU or on GPUs: its models, memory, shares
- `joining`: a model that joins a unit which runs
- `residency`: what memory decides at run time
- `unit_specs`: the specs that processes read
- `plan_file`: a placement as `plan.yaml`
"""
