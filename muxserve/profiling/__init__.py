"""Measures what steps of live engines cost, and how much colocated engines slow each other down.

`measure` runs the plan that `grid` makes, on engines that `family` starts; `player` grants their leases and reads their
reports in the place of a unit scheduler; `jobs` are what is measured. What comes out is a `muxserve.costs.profile`.
"""
