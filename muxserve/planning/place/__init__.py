"""Which plan is best, by simulation.

- `workloads`, `window`: the load, and for how many seconds it is simulated
- `prediction`, `simulations`: a plan under a load
- `contest`: plans under all workloads, and the best of them
- `this_machine`: the plan of this machine's CPU
- `sleeping`: how many GPUs a fleet needs if its models may sleep
"""
