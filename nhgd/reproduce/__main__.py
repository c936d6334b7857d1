"""`python -m nhgd.reproduce`: see `command`."""

from __future__ import annotations

import sys

from nhgd.reproduce.command import main

if __name__ == "__main__":
    sys.exit(main())
