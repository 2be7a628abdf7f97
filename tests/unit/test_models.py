"""Built-in models: sizes, shapes, initialisation, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hydssp.errors import UserError
from hydssp.models import alexnet_small, lenet, mlp, resnet


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
        (alexnet_small((3, 32, 32), 10), 145_578),
        (alexnet_small((1, 8, 8), 10), 832 + 25_632 + 51_264 + 4_160 + 650),
        (resnet((3, 32, 32), 10, norm="group"), 272_474),
        (lenet((3, 32, 32), 10), 456 + 2_416 + (576 * 120 + 120) + 10_164 + 850),
    ],
)
def test_number_of_parameters(model: nn.Module, expected: int) -> None:
    assert num_parameters(model) == expected
    assert not list(model.buffers())


@pytest.mark.parametrize(
    ("depth", "num_classes", "parameters", "buffer_elements"),
    [
        (20, 10, 272_474, 1_589),
        (50, 10, 758_554, None),
        (50, 100, 764_404, None),
        (110, 10, 1_730_714, 8_399),
    ],
)
def test_size_of_resnet(depth: int, num_classes: int, parameters: int, buffer_elements: int | None) -> None:
    model = resnet((3, 32, 32), num_classes, depth)
    assert num_parameters(model) == parameters
    if buffer_elements is not None:
        assert sum(buffer.numel() for buffer in model.buffers()) == buffer_elements
    convolutions_3x3 = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(convolutions_3x3) + 1 == depth  # and the dense layer


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (2, 9, 15), (3, 64, 48)])
@pytest.mark.parametrize(
    "build", [alexnet_small, resnet, lambda *a: resnet(*a, depth=8, norm="group")], ids=str
)
def test_convolutional_models_take_any_size(build, shape: tuple[int, int, int]) -> None:
    model = build(shape, 7)
    logits_BK = model(torch.randn(2, *shape))  # noqa: N806
    assert logits_BK.shape == (2, 7)
    nn.functional.cross_entropy(logits_BK, torch.tensor([0, 6])).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_resnet_halves_twice() -> None:
    model = resnet((3, 32, 32), 10)
    assert model[:-3](torch.zeros(1, 3, 32, 32)).shape == (1, 64, 8, 8)


def test_resnet_with_groups_does_not_mix_samples() -> None:
    model = resnet((3, 16, 16), 10, depth=8, norm="group").double()
    x_BCHW = torch.randn(4, 3, 16, 16, dtype=torch.float64)  # noqa: N806
    torch.testing.assert_close(model(x_BCHW)[:1], model(x_BCHW[:1]))


@pytest.mark.parametrize("depth", [2, 7, 18, 21, 20.0, "20", True])
def test_resnet_refuses_other_depths(depth: object) -> None:
    with pytest.raises(UserError, match=r"model\.depth is .*6n \+ 2"):
        resnet((3, 32, 32), 10, depth=depth)  # type: ignore[arg-type]


def test_resnet_refuses_an_unknown_norm() -> None:
    with pytest.raises(UserError, match=r"model\.norm is 'layer'; allowed is batch, group"):
        resnet((3, 32, 32), 10, norm="layer")


@pytest.mark.parametrize("shape", [(3, 7, 32), (3, 32, 7)])
def test_alexnet_small_refuses_images_that_are_too_small(shape: tuple[int, int, int]) -> None:
    with pytest.raises(UserError, match=rf"model=alexnet_small.*{shape[1]}x{shape[2]}.*at least 8x8"):
        alexnet_small(shape, 10)


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


@pytest.mark.parametrize("build", [mlp, lenet, alexnet_small, resnet])
def test_seed_decides_the_weights(build) -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(build((1, 28, 28), 10).parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
