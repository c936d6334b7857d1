"""Batches and where they come from."""

from nhgd.data.batch import Batch
from nhgd.data.loader import Data, reiterable
from nhgd.data.stream import BatchStream

__all__ = ["Batch", "BatchStream", "Data", "reiterable"]
