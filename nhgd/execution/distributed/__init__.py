"""Curvature in other processes, and inner loops divided among processes."""

from nhgd.execution.distributed.executor import Distributed as Distributed
