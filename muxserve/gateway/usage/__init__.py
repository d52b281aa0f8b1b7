"""What tenants and keys have used: the database, budgets of tokens, keys that are made while the fleet serves."""
