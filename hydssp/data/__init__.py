"""Built-in data sets as functions that a configuration can name, and the types that they return.

``_target_: hydssp.data.digits`` in a configuration, ``hydssp.data.digits()`` in Python. Needs numpy alone;
tensors are made in ``hydssp.data.batches``, which is not imported here because it needs torch. No MPI, no
Hydra, no torchvision, and nothing is ever downloaded. A data module is not called like the function it
offers, so that the name here always means the function.
"""

from hydssp.data.arrays import ArrayDataset, Splits, check_splits
from hydssp.data.augment import Augment
from hydssp.data.cifar import cifar10, cifar100
from hydssp.data.clusters import synthetic
from hydssp.data.fashion import fashion_mnist
from hydssp.data.optdigits import digits
from hydssp.data.order import EpochOrder

__all__ = [
    "ArrayDataset",
    "Augment",
    "EpochOrder",
    "Splits",
    "check_splits",
    "cifar10",
    "cifar100",
    "digits",
    "fashion_mnist",
    "synthetic",
]
