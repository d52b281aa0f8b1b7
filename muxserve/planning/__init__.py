"""From a fleet file to what runs and to what that will deliver. Each floor knows the ones above it:

- demand: `demands` (what the file asks for), `checkpoints`, `hub_reach` (what its models are)
- candidates: `ways` (the ways to serve), `layouts`, `device_pool`, `one_engine`, `dedicated_units` (replicas that have
  devices to themselves); where memory decides who is awake `resident_units`, `residency`
- place: `planner` (GPUs, or this machine: `this_machine`), by the search in the package `placement`
- trial: `workloads`, `prediction`, `simulations`, `window` (a plan under a workload), `contest` (which plan is best),
  `sleeping` (what models that sleep would bring)
- specs: `unit_plan`, `gpus`, `private` (units that fit their machine), `specs` (what processes are started with),
  `fleet_planner`, `joining` (for `muxserve deploy`, at its start and later), `plan_file`
- report: `document` (JSON), `html`
"""
