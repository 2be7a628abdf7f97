"""What is refused when data, model and loss are put together, and what is said of them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from test_config import compose_plain

from hydssp import task
from hydssp.errors import UserError


def regression(width: int = 1):
    """Targets are numbers [N] or vectors [N, width]."""
    targets = torch.rand(20) if width == 0 else torch.rand(20, width)
    data = torch.utils.data.TensorDataset(torch.rand(20, 4), targets)
    return SimpleNamespace(train=data, test=data)


def line(width: int = 1) -> torch.nn.Module:
    return torch.nn.Linear(4, width)


def build(*overrides, width):
    return task.build_task(
        compose_plain(
            "num_workers=2",
            "data._target_=test_task.regression",
            f"+data.width={width}",
            "model._target_=test_task.line",
            "~model.hidden",
            "~model.input_shape",
            "~model.num_classes",
            *overrides,
        )
    )


@pytest.mark.parametrize("loss", ["MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss"])
def test_targets_of_another_shape_than_the_outputs_are_refused(loss):
    """Torch would broadcast them, warn once per rank, and train on nonsense."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(UserError) as error:
            build(f"loss._target_=torch.nn.{loss}", width=0)
    assert not warned
    assert all(word in str(error.value) for word in (f"torch.nn.{loss}", "[2, 1]", "[2]", "same shape"))


def test_targets_of_the_same_shape_are_taken():
    assert build("loss._target_=torch.nn.MSELoss", width=1).num_samples == 20


def test_other_warnings_of_a_loss_are_no_mistake():
    with pytest.warns(UserWarning, match="an opinion"):
        build("loss._target_=test_task.LossWithAnOpinion", width=1)


class LossWithAnOpinion(torch.nn.MSELoss):
    def forward(self, outputs, targets):
        warnings.warn("an opinion", stacklevel=1)
        return super().forward(outputs, targets)


@pytest.mark.parametrize(
    ("num_samples", "num_workers", "found", "advice"),
    [
        (96, 3, "", ""),
        (95, 3, "3 workers share 95 training samples", "batch_size=31 or less"),
        (20, 1, "there are only 20 training samples", "batch_size=20 or less"),
        (2, 3, "there are only 2 training samples", "fewer workers lets all work"),
    ],
)
def test_a_batch_size_that_is_too_large_for_the_data_is_told(num_samples, num_workers, found, advice):
    note = task.batch_note(num_samples, 32, num_workers)
    assert bool(note) == bool(found)
    assert found in note
    assert advice in note


def test_a_push_of_several_batches_needs_as_many_samples():
    assert not task.batch_note(96, 32, 3)
    assert "batch_size=8 or less" in task.batch_note(96, 32, 3, num_batches=4)
    note = task.batch_note(960, 32, 3, num_batches=1000)
    assert "; at most 10 batches behind a push (accumulate x local_steps) lets all work" in note


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], ""),
        (["precision=bf16", "wire.pull=fp16"], "computed in bf16, pulled as fp16"),
        (["wire.push=bf16", "wire.error_feedback=true"], "pushed as bf16 with error feedback"),
        (["wire.compression=topk", "wire.ratio=0.02"], "pushed as top-k, 0.02 of the elements"),
        (["wire.compression=quantize", "wire.bits=8"], "pushed as 8 bits"),
    ],
)
def test_formats_are_told(overrides, words):
    assert task.describe_formats(compose_plain(*overrides)) == words
