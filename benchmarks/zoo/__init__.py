"""Twelve small bilevel problems of different kinds, on which no method was tuned.

    python -m benchmarks.zoo --out zoo.jsonl --jobs 2 --seeds 0-2
    python -m benchmarks.zoo --out zoo.jsonl --table --figure zoo.png

All methods get the same inner problem, inner step size and number of inner steps, the same three outer step sizes of Adam, and
the same budget in gradient-equivalents: one for each gradient, Hessian product and cross product that the solver counts. The
measure is the outer loss on held-out samples at the last v, after one deterministic optimiser, the same for all, has trained
theta to its end there. The outer step size of a method on a problem is the one with the least such loss on a third set of
samples.
"""
