"""A plan for people and programs.

- `document`, `html`: the plan as JSON, and as a page
- `costs_used`, `sureness`: which costs it was made with, and what becomes of it if they are off
"""
