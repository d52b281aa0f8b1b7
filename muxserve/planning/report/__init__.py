"""A plan for people and programs.

- `document`, `html`: the plan as JSON, and as a page
- `basis`, `sureness`: which costs it was made with, what its models wait for, and what becomes of it if costs are off
"""
