import pytest
import torch

from hydssp.update.compression import Quantized, TopK
from hydssp.update.wire import BLOCK

NUMEL = 20 * BLOCK + 21


def vector(seed=0):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def through(codec, values, seed=0, piece=BLOCK):
    words = torch.full((codec.num_words,), -1, dtype=torch.int32)
    codec.pack(values, words, (0, seed))
    out = torch.full((len(values),), float("nan"))
    for start in range(0, len(values), piece):
        codec.unpack(words, start, out[start : start + piece])
    return out


class TestTopK:
    @pytest.mark.parametrize("ratio", [1e-9, 0.01, 0.5])
    def test_the_largest_come_through_as_they_are(self, ratio):
        values, codec = vector(), TopK(NUMEL, ratio)
        out = through(codec, values)
        kept = out != 0
        assert int(kept.sum()) == codec.count == max(1, int(ratio * NUMEL))
        assert torch.equal(out[kept], values[kept])
        assert values[kept].abs().min() >= values[~kept].abs().max()
        assert codec.num_words == 2 * codec.count

    def test_all_of_them_are_the_vector(self):
        assert torch.equal(through(TopK(NUMEL, 1.0), vector()), vector())


class TestQuantized:
    @pytest.mark.parametrize("bits", [4, 8])
    def test_each_element_goes_to_one_of_its_neighbouring_levels(self, bits):
        values, levels = vector(), 2 ** (bits - 1) - 1
        values[BLOCK : 2 * BLOCK] *= 1e-6  # blocks have scales of their own
        values[5] = 0.0
        out = through(Quantized(NUMEL, bits), values)
        for start in range(0, NUMEL, BLOCK):
            before, after = values[start : start + BLOCK], out[start : start + BLOCK]
            step = before.abs().max() / levels
            assert ((after - before).abs() <= step * 1.0001).all()
            torch.testing.assert_close(after / step, (after / step).round(), rtol=0, atol=1e-4)
        assert out[5] == 0.0

    @pytest.mark.parametrize("bits", [4, 8])
    def test_the_mean_over_many_seeds_is_the_vector(self, bits):
        values, codec = vector(), Quantized(NUMEL, bits)
        mean = torch.stack([through(codec, values, seed) for seed in range(300)]).mean(0)
        step = values.abs().max() / (2 ** (bits - 1) - 1)
        assert ((mean - values).abs() < 0.5 * step / 300**0.5 * 5).all()

    def test_the_same_seed_draws_the_same(self):
        codec = Quantized(NUMEL, 4)
        assert torch.equal(through(codec, vector(), 7), through(codec, vector(), 7))
        assert not torch.equal(through(codec, vector(), 7), through(codec, vector(), 8))
        assert torch.equal(through(codec, vector(), 7), through(codec, vector(), 7, piece=NUMEL))

    @pytest.mark.parametrize("ratio", [2, 8, 30, 1000])
    def test_less_is_lost_than_there_was(self, ratio):
        """One large element among many small ones is the worst case."""
        values = torch.full((NUMEL,), 1.0 / ratio)
        values[::BLOCK] = 1.0
        lost = torch.stack([through(Quantized(NUMEL, 4), values, seed) - values for seed in range(50)])
        assert lost.square().sum(1).mean() <= 0.6 * values.square().sum()

    def test_zeros_stay_zeros(self):
        assert not through(Quantized(NUMEL, 4), torch.zeros(NUMEL)).any()

    def test_size(self):
        assert Quantized(NUMEL, 4).num_words == 21 * (1 + BLOCK // 8)
