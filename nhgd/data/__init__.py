"""Batches and where they come from."""

from nhgd.data.batch import Batch
from nhgd.data.loader import Data, reiterable
from nhgd.data.stream import Stream

__all__ = ["Batch", "Data", "Stream", "reiterable"]
