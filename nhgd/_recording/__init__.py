"""Recording of an inner step: taps on layers, their verification, and passes for parameters outside layers."""
