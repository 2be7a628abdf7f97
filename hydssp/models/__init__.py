"""Built-in models as functions that a configuration can name (``_target_: hydssp.models.lenet``).

torch only: no MPI, no Hydra, no torchvision. Every builder takes the shape of one image and the number of
classes first and returns a module that maps ``x_BCHW`` to ``logits_BK``, initialised from torch's global
generator: the caller seeds it.
"""

from hydssp.models.classifiers import alexnet_small, lenet, mlp
from hydssp.models.residual import resnet

__all__ = ["alexnet_small", "lenet", "mlp", "resnet"]
