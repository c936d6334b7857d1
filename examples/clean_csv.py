"""Which rows of a table are mislabelled?

    python examples/clean_csv.py                                        a made-up table in which 15 % of the labels are wrong
    python examples/clean_csv.py --tiny                                 the same with fewer steps
    python examples/clean_csv.py my.csv --label y --trusted some.csv    yours: numbers and categories, a header, commas

From the shell, `nhgd clean my.csv --label y --trusted some.csv --out weights.csv` does the same and writes every row with its
weight, whether it is suspect, the label that the cleaned model would give it, and how strongly it is suspected.
"""

import argparse
import csv
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

import nhgd
from nhgd.data.csv_file import labels, read_table
from nhgd.data.features import Features


def write_tables(folder, seed=0):
    """A table with wrong labels and a small trusted one, and the true labels of the first."""
    found = load_breast_cancer()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(found.target))
    names = [str(name).replace(" ", "_") for name in found.feature_names]
    right = np.where(found.target == 0, "malignant", "benign")[order]
    given = right.copy()
    wrong = rng.permutation(np.arange(60, len(order)))[: round(0.15 * (len(order) - 60))]
    given[wrong] = np.where(right[wrong] == "benign", "malignant", "benign")
    size = np.where(found.data[order, 3] > np.median(found.data[:, 3]), "large", "small")  # a column that is no number
    rows = [[*line, s, y] for line, s, y in zip(found.data[order].tolist(), size, given, strict=True)]
    for name, part in (("trusted.csv", rows[:60]), ("train.csv", rows[60:])):
        with open(folder / name, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([[*names, "area_class", "diagnosis"], *part])
    return folder / "train.csv", folder / "trusted.csv", right[60:]


def suspects(train, trusted, label, steps):
    """How much each row is suspected. Both tables must be read by the same Features, so that columns mean the same."""
    rows, examples = read_table(train), read_table(trusted)
    features = Features(impute=True).fit(rows, [name for name in rows.header if name != label])
    cleaner = nhgd.LabelCleaner(steps=steps, random_state=0)
    cleaner.fit(features.transform(rows), labels(rows, label), features.transform(examples), labels(examples, label))
    return cleaner, labels(rows, label)


def main(arguments=None):
    """Clean, and print the worst rows; where the truth is known, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path, nargs="?")
    parser.add_argument("--label", default="diagnosis")
    parser.add_argument("--trusted", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    if (options.train is None) != (options.trusted is None):
        parser.error("give a table and --trusted together, or neither")
    with tempfile.TemporaryDirectory() as folder:
        truth = None
        if options.train is None:
            options.train, options.trusted, truth = write_tables(Path(folder))
        cleaner, given = suspects(options.train, options.trusted, options.label, steps=10 if options.tiny else 40)

    issues = cleaner.label_issues_
    print(f"{len(issues)} of {len(given)} rows are suspect. The worst:\n")
    print(f"{'row':>5}  {'score':>6}  {'label':<12} {'suggested':<12}" + ("" if truth is None else " truly"))
    for i in issues[:10]:
        line = f"{i + 1:>5}  {cleaner.scores_[i]:6.2f}  {given[i]:<12} {cleaner.suggested_labels_[i]:<12}"
        print(line + ("" if truth is None else f" {truth[i]}"))
    if truth is None:
        return None
    wrong = np.array(given) != truth
    hits = int(wrong[issues].sum())
    print(f"\n{hits} of the {len(issues)} suspects are truly wrong; {int(wrong.sum())} wrong labels were in the table.")
    return hits, len(issues), int(wrong.sum())


if __name__ == "__main__":
    main()
