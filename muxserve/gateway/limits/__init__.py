"""Who may ask for how much: keys, tenants, priority levels, places at a model."""
