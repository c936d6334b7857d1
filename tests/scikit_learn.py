"""scikit-learn's common checks of an estimator, as cases of a test."""

from __future__ import annotations

from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks


def scikit_learn_checks(estimator: Any) -> pytest.MarkDecorator:
    """The mark that scikit-learn makes, its cases as a list: some versions give a generator, which pytest no longer takes."""
    mark: pytest.MarkDecorator = parametrize_with_checks([estimator])
    names, cases = mark.args
    return pytest.mark.parametrize(names, list(cases), **mark.kwargs)
