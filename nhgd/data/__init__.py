"""Batches and where they come from."""

from nhgd.data.batch import Batch
from nhgd.data.loader import Data, Stream, reiterable

__all__ = ["Batch", "Data", "Stream", "reiterable"]
