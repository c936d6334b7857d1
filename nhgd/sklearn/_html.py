"""What a fitted `LabelCleaner` has found, below the picture of the estimator that scikit-learn shows in notebooks."""

from __future__ import annotations

from typing import Any

import numpy as np

from nhgd._html import table

MOST = 10  # pairs of classes


def findings(classes: Any, issue_counts: Any, noise: Any, samples: int) -> str:
    """Suspects by the class that was given and the one suggested, most frequent first."""
    suspects = int(issue_counts.sum())
    title = f"{suspects} of {samples} labels are suspect"
    given, suggested = np.nonzero(issue_counts)
    order = np.argsort(-issue_counts[given, suggested], kind="stable")
    rows = [(classes[i], classes[j], issue_counts[i, j]) for i, j in zip(given[order], suggested[order], strict=True)]
    right = float(np.mean(np.diag(noise)))
    notes = [f"Estimated probability that a label is right, mean over classes: {right:.3f}"]
    if len(rows) > MOST:
        notes.insert(0, f"and {len(rows) - MOST} more pairs of classes: issue_counts_ has all")
    return table(("given", "suggested", "labels"), rows[:MOST], title, notes, text=2)
