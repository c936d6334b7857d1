"""Front doors for practitioners, in the manner of scikit-learn. They need scikit-learn, and so the extra `cli`."""
