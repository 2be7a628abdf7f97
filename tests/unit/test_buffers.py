from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hydssp.errors import UserError
from hydssp.update.buffers import BufferPolicy, ModuleBuffers, WorkersBuffers, recalibrate


def make():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2), nn.BatchNorm1d(2))
    module.register_buffer("scratch", torch.zeros(5), persistent=False)
    return module


def test_round_trip_is_exact():
    module = make()
    for _ in range(3):
        module(torch.randn(8, 3))
    buffers = ModuleBuffers(module)
    assert buffers.numel == (4 + 4 + 1) + (2 + 2 + 1)
    assert buffers.is_integer.sum() == 2
    vector = np.empty(buffers.numel)
    buffers.read(vector)
    other = make()
    ModuleBuffers(other).write(vector)
    for name, buffer in module.named_buffers():
        assert (buffer == other.get_buffer(name)).all(), name
    assert other[1].num_batches_tracked == 3
    assert other[1].num_batches_tracked.dtype == torch.int64


def test_a_buffer_that_forward_replaces_is_still_read():
    module = make()
    buffers = ModuleBuffers(module)
    module[1].running_mean = torch.full((4,), 7.0)
    vector = np.empty(buffers.numel)
    buffers.read(vector)
    assert (vector[:4] == 7).all()


def test_no_buffers():
    buffers = ModuleBuffers(nn.Linear(2, 2))
    assert buffers.numel == 0
    buffers.read(np.empty(0))
    buffers.write(np.empty(0))


def test_complex_buffers_are_refused():
    module = nn.Module()
    module.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UserError, match="'phase'"):
        ModuleBuffers(module)


def test_policies():
    integer = np.array([False, True])

    def combined(policy, pushes):
        workers = WorkersBuffers(np.array([1.0, 10.0]), 3, policy, integer)
        for worker, values in pushes:
            workers.update(worker, np.array(values))
        return workers.combined().tolist()

    pushes = [(1, [9.0, 9.0]), (1, [2.0, 13.0]), (2, [6.0, 12.0])]  # worker 0 has its initial ones
    assert combined(BufferPolicy.average, pushes) == [3.0, 12.0]
    assert combined(BufferPolicy.recalibrate, pushes) == [3.0, 12.0]
    assert combined(BufferPolicy.worker0, pushes) == [1.0, 10.0]


def test_recalibration_gives_the_statistics_of_the_data():
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.9))
    module[0].running_mean.fill_(99)
    batches = [torch.randn(50, 3) * 2 + 5 for _ in range(4)]
    recalibrate(module, batches)
    data = torch.cat(batches)
    torch.testing.assert_close(module[0].running_mean, data.mean(0))
    torch.testing.assert_close(module[0].running_var, torch.stack([b.var(0) for b in batches]).mean(0))
    assert module[0].momentum == 0.1
    assert not any(m.training for m in module.modules())
