"""python examples/distillation.py [--tiny] [--data DIR]      ten learnt images train a classifier as well as thousands

Without --data it distils the digits that come with scikit-learn, in seconds. With --data it distils Fashion-MNIST from IDX files
(DIR/fashion-mnist), in a minute or two: one image for each of ten kinds of clothes.
"""

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import nhgd
from nhgd.data.idx import find, read_images
from nhgd.plot.distilled import draw_distilled


def images(data):
    """Pixels (N, P) and labels, for training and for testing."""
    if data is None:
        X, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(y))
        return X[order[:1300]], y[order[:1300]], X[order[1300:]], y[order[1300:]]
    files = read_images(find("fashion-mnist", data))
    flat = [x.reshape(len(x), -1) for x in (files.train_images, files.test_images)]
    return flat[0], files.train_labels, flat[1], files.test_labels


def main(arguments=None):
    """Distil, and compare with as many real images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    X, y, X_test, y_test = images(options.data)
    steps = 30 if options.tiny else 200 if options.data is None else 1000
    distiller = nhgd.DatasetDistiller(per_class=1, steps=steps, random_state=0, verbose=None).fit(X, y)
    learnt = distiller.score(X_test, y_test)

    real = [np.flatnonzero(y == c)[0] for c in distiller.classes_]
    top = float(X.max())
    chosen = LogisticRegression(max_iter=1000).fit(X[real] / top, y[real]).score(X_test / top, y_test)
    print(f"test accuracy of a linear classifier trained on {len(real)} images: {chosen:.3f} real, {learnt:.3f} learnt")
    if options.out is not None:
        side = round(X.shape[1] ** 0.5)
        pictures = distiller.images_.reshape(len(distiller.classes_), 1, side, side, 1)
        draw_distilled(options.out, pictures, [str(c) for c in distiller.classes_], "Ten learnt images")
        print(f"the learnt images: {options.out}")
    return learnt, chosen


if __name__ == "__main__":
    main()
