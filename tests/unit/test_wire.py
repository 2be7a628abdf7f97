import numpy as np
import pytest
import torch

from hydssp.update.wire import Wire

VALUES = np.array(
    [0.0, -0.0, 1.0, 1 / 3, -2 / 3, 65504.0, 1e5, 3e38, 1e-8, 1e-40, np.inf, -np.inf, np.nan], np.float32
)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_rounds_as_torch_does_whatever_the_value(name, dtype):
    wire = Wire(name)
    out = np.empty(len(VALUES), wire.numpy_dtype)
    wire.encode(out, VALUES)
    assert out.itemsize == 2
    expected = torch.from_numpy(VALUES).to(dtype)
    assert torch.equal(wire.tensor(out).view(torch.int16), expected.view(torch.int16))
    assert wire.array(wire.tensor(out)).dtype == out.dtype
    assert wire.array(wire.tensor(out)).ctypes.data == out.ctypes.data  # the same memory


def test_what_is_too_large_for_fp16_is_infinite_and_for_bf16_is_not():
    large = np.array([7e4], np.float32)
    for name, is_finite in (("fp16", False), ("bf16", True)):
        wire = Wire(name)
        out = np.empty(1, wire.numpy_dtype)
        wire.encode(out, large)
        assert bool(torch.isfinite(wire.tensor(out)).all()) is is_finite


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [(torch.float32, np.float32), (torch.float64, np.float64)])
def test_fp32_is_the_vectors_own_type(dtype, numpy_dtype):
    wire = Wire("fp32", dtype)
    values = np.array([1 / 3, np.nan, 1e30], numpy_dtype)
    out = np.empty(3, wire.numpy_dtype)
    wire.encode(out, values)
    assert wire.is_plain
    assert out.tobytes() == values.tobytes()
