"""What the iterative solvers are made of."""
