"""Curvature kept by other processes, and inner loops shared among processes."""

from nhgd.execution.distributed.executor import Distributed as Distributed
