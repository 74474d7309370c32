"""Which expert rows are in memory, and where: slots, address table, policies, heat, metrics."""
