"""hydssp: data-parallel PyTorch training over MPI windows for clusters whose GPUs are not equally fast.

This module imports nothing, so that ``--help`` and the pure parts start without torch or MPI.
"""

__version__ = "0.1.0"
