"""`python -m nhgd`: the command line, as torchrun starts it."""

from nhgd.cli import main

main()
