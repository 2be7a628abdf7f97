"""Built-in models: sizes, shapes, initialisation, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hydssp.errors import UserError
from hydssp.models import lenet, mlp


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (mlp((1, 8, 8), 10), 4_810),
        (mlp((1, 28, 28), 10, hidden=[256]), 203_530),
        (mlp((1, 8, 8), 10, hidden=(64, 48)), 4_160 + 3_120 + 490),
        (mlp((1, 8, 8), 10, hidden=()), 650),
        (lenet((1, 28, 28), 10), 61_706),
        (lenet((3, 32, 32), 10), 456 + 2_416 + (576 * 120 + 120) + 10_164 + 850),
    ],
)
def test_number_of_parameters(model: nn.Module, expected: int) -> None:
    assert num_parameters(model) == expected
    assert not list(model.buffers())


@pytest.mark.parametrize("shape", [(1, 12, 12), (1, 13, 17), (1, 28, 28), (3, 32, 32), (3, 64, 48)])
def test_lenet_gives_one_logit_per_class_at_any_size(shape: tuple[int, int, int]) -> None:
    logits_BK = lenet(shape, 7)(torch.zeros(2, *shape))  # noqa: N806
    assert logits_BK.shape == (2, 7)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 11, 28), (3, 28, 11)])
def test_lenet_refuses_images_that_are_too_small(shape: tuple[int, int, int]) -> None:
    with pytest.raises(UserError, match=rf"model=lenet.*{shape[1]}x{shape[2]}.*at least 12x12.*model=mlp"):
        lenet(shape, 10)


def test_logits_are_not_cut_off_at_zero() -> None:
    torch.manual_seed(0)
    for model in (mlp((1, 12, 12), 10), lenet((1, 12, 12), 10)):
        assert (model(torch.randn(64, 1, 12, 12)) < 0).any()


@pytest.mark.parametrize("hidden", [[0], [-3], [True], [2.5], 64, "64", None])
def test_mlp_refuses_bad_widths(hidden: object) -> None:
    with pytest.raises(UserError, match=r"model\.hidden is .*positive integers"):
        mlp((1, 8, 8), 10, hidden=hidden)  # type: ignore[arg-type]


def test_widths_may_come_from_a_configuration() -> None:
    omegaconf = pytest.importorskip("omegaconf", reason="omegaconf is not installed")
    hidden = omegaconf.OmegaConf.create([64])
    assert num_parameters(mlp((1, 8, 8), 10, hidden=hidden)) == 4_810


@pytest.mark.parametrize("build", [mlp, lenet])
def test_seed_decides_the_weights(build) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(build((1, 28, 28), 10).parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
