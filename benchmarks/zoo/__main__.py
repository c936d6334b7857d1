"""The command line: `python -m benchmarks.zoo --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import zoo
from benchmarks.zoo.case import export_digits
from benchmarks.zoo.catalogue import CASES
from benchmarks.zoo.run import START
from benchmarks.zoo.runs import keys, measure, read
from benchmarks.zoo.table import draw, table
from benchmarks.zoo.words import numbers, rates, words

METHODS = [START, "nhgd", "aid-identity", "aid-cg-10", "itd", "soba"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the file lacks, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo", description=zoo.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a file of JSON lines; runs that it holds are not made again")
    parser.add_argument("--problems", type=words, default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--methods", type=words, default=METHODS, help=f"names; {START}: v as it was given")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2], help="such as 0-2")
    parser.add_argument("--outer-lrs", type=rates, default=[0.01, 0.03, 0.1], help="Adam's, the same for every method")
    parser.add_argument("--share", type=float, default=1.0, help="of the budget of each problem")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--digits", type=Path, help="a file of --export-digits, for machines without scikit-learn")
    parser.add_argument("--export-digits", type=Path, metavar="FILE", help="write the digits and end")
    parser.add_argument("--table", action="store_true", help="make no runs; print the table of what the file holds")
    parser.add_argument("--figure", type=Path, help="draw what the file holds; needs Matplotlib")
    given = parser.parse_args(arguments)
    if given.export_digits:
        export_digits(given.export_digits)
        return 0
    if given.out is None:
        parser.error("--out is needed: a file for the runs")
    unknown = [name for name in given.problems if name not in CASES]
    if unknown:
        parser.error(f"no problem is called {', '.join(unknown)}; there are {', '.join(CASES)}")
    chosen = keys(given.problems, given.methods, given.seeds, given.outer_lrs, given.share)
    if not given.table:
        measure(given.out, chosen, given.jobs, given.digits)
    records = [r for r in read(given.out) if r["problem"] in given.problems and r["share"] == given.share]
    print(table(records))
    if given.figure:
        draw(records, given.figure)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
