"""Live migration: the process beside each unit scheduler that moves pages to other units, and takes them in.

`outgoing` and `incoming` are pure: messages, outcomes and the time in; messages and tasks out. `pages` and `hands` do
the tasks in a thread (`worker`), `links` has the sockets, `process` ties them together.
"""
