"""The soak: a real fleet under load, with faults injected by a seeded schedule. `python -m tests.soak.run --help`."""
