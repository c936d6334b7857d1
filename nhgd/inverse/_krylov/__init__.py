"""Parts of the iterative solvers."""
