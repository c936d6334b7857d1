"""Parts of the inverses that learn from inner steps."""
