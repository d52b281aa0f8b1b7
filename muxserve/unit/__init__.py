"""The live unit scheduler: one process per unit that queues requests and grants engines step leases."""
