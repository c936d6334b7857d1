"""What cleanlab finds in tables stored as files, for benchmarks/cleaner.py: python benchmarks/cleanlab_reference.py FOLDER C

It imports only NumPy, scikit-learn and cleanlab, so it can run in an environment of its own. Each NAME.npz in the folder holds
X, y and seed. NAME.npy is written beside it, true for the labels found: `find_label_issues` with its defaults, from
probabilities by 5-fold cross-validation of a logistic regression on standardised features, with this C.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
from cleanlab.filter import find_label_issues
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler


def main(folder: Path, strength: float) -> None:
    warnings.simplefilter("ignore")
    for path in sorted(folder.glob("*.npz")):
        held = np.load(path)
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=2000))
        cv = StratifiedKFold(5, shuffle=True, random_state=int(held["seed"]))
        probabilities = cross_val_predict(model, held["X"], held["y"], cv=cv, method="predict_proba")
        np.save(path.with_suffix(".npy"), find_label_issues(held["y"], probabilities, n_jobs=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
