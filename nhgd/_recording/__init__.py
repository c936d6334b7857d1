"""How the record of an inner step is made: taps on layers, checks of them, and passes for what no layer tells."""
