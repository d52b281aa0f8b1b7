"""Policies over the replicas of one model: dispatch, live migration, priorities, auto-scaling. Pure: they take events
and the time, and answer decisions.

The rule that joins them is Llumnix's (Sun et al., "Llumnix: Dynamic Scheduling for Large Language Model Serving",
OSDI 2024, arXiv:2406.03243): every purpose is expressed as *virtual usage* of an instance, and requests go, when they
arrive and while they run, to where the least of it is. docs/replicas.md has the formulas.
"""
