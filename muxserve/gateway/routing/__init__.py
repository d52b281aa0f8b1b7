"""Where requests go: the table of requests, the rules that place them, and the sockets to the units."""
