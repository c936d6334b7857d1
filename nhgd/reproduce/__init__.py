"""The settings with which the experiments of the paper are run."""
