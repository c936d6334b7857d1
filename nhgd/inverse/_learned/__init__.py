"""What the inverses that learn from inner steps are made of."""
