"""From a fleet file to what runs, and to what that will deliver. Each stage imports only those above it:

- `demand`: what the file asks for, and what its models are
- `candidates`: the ways to serve, and the devices that a replica may have
- `specs`: units that fit their machine, and what their processes are started with; `muxserve deploy` is here
- `place`: a plan under workloads, and the contest that takes the best plan, by the search in the package `placement`
- `report`: a plan as JSON and as a page

`planner` is the whole, for `muxserve plan` and `muxserve simulate`.
"""
