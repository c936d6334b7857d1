"""What an algorithm acts on, and the parts that several algorithms share."""
