"""What a worker computes from one range, against plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hydssp.backward import Backward, Clip, LossScale, Plan
from hydssp.update.layout import FlatModule, ParameterLayout

LOSS = nn.CrossEntropyLoss()
NO_CLIP = Clip()


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    return module, FlatModule(copy.deepcopy(module), ParameterLayout.of(module, dtype))


def make_range(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 5, generator=generator, dtype=dtype)
    return inputs, torch.randint(0, 3, (count,), generator=generator)


def flat_gradient(module):
    return torch.cat([p.grad.reshape(-1) for p in module.parameters()])


def plain_gradient(module, inputs, targets):
    module.zero_grad()
    LOSS(module(inputs), targets).backward()
    return flat_gradient(module)


class TestPlan:
    def test_a_range_is_one_batch_whatever_its_size(self):
        assert [*Plan(4).steps(11)] == [[(0, 11)]]

    def test_a_last_batch_may_be_smaller(self):
        assert [*Plan(4, accumulate=3).steps(10)] == [[(0, 4), (4, 8), (8, 10)]]
        assert [*Plan(4, accumulate=3).steps(3)] == [[(0, 3)]]


class TestAccumulate:
    @pytest.mark.parametrize("count", [12, 10, 3])
    def test_gradient_loss_and_hits_are_those_of_one_batch(self, count):
        module, model = make_model()
        inputs, targets = make_range(count)
        backward = Backward(model, LOSS, NO_CLIP, Plan(4, accumulate=3))
        passed = backward.run(inputs, targets)
        torch.testing.assert_close(backward.vector, plain_gradient(module, inputs, targets))
        torch.testing.assert_close(passed.loss, LOSS(module(inputs), targets).detach())
        assert passed.correct == (module(inputs).argmax(1) == targets).sum()
        assert passed.is_finite

    def test_the_sum_is_clipped_and_not_the_parts(self):
        module, model = make_model()
        inputs, targets = make_range(8)
        backward = Backward(model, LOSS, Clip(norm=0.1), Plan(4, accumulate=2))
        backward.run(inputs, targets)
        expected = plain_gradient(module, inputs, targets)
        torch.testing.assert_close(backward.vector, expected * 0.1 / (expected.norm() + 1e-6))

    @pytest.mark.parametrize("place", [0, 9])
    def test_one_bad_batch_spoils_the_range(self, place):
        _, model = make_model()
        inputs, targets = make_range(10)
        inputs[place] = float("nan")
        assert not Backward(model, LOSS, NO_CLIP, Plan(4, accumulate=3)).run(inputs, targets).is_finite


class TestLocalSteps:
    @pytest.mark.parametrize("clip", [NO_CLIP, Clip(norm=0.05)])
    def test_the_sum_of_gradients_is_the_way_divided_by_the_rate(self, clip):
        """Against a plain loop of SGD steps; the last one has one batch of 4 and one of 2."""
        module, model = make_model()
        inputs, targets = make_range(22)
        start = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
        backward = Backward(model, LOSS, clip, Plan(4, accumulate=2, local_steps=3, lr=0.4))
        passed = backward.run(inputs, targets, lr_factor=0.5)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
        losses, hits = [], 0
        for a, b in ((0, 8), (8, 16), (16, 22)):
            outputs = module(inputs[a:b])
            loss = LOSS(outputs, targets[a:b])
            optimizer.zero_grad()
            loss.backward()
            if clip.norm:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip.norm)
            optimizer.step()
            losses.append(float(loss.detach()) * (b - a) / 22)
            hits += int((outputs.argmax(1) == targets[a:b]).sum())
        end = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
        torch.testing.assert_close(backward.vector, (start - end) / 0.2)
        assert float(passed.loss) == pytest.approx(sum(losses))
        assert passed.correct == hits

    def test_one_step_is_the_gradient_bit_for_bit(self):
        _, model = make_model()
        _, other = make_model()
        inputs, targets = make_range(7)
        one = Backward(model, LOSS, NO_CLIP, Plan(7, local_steps=1, lr=0.4))
        several = Backward(other, LOSS, NO_CLIP, Plan(7, local_steps=3, lr=0.4))
        one.run(inputs, targets)
        several.run(inputs, targets)  # a range that gives one step only
        assert torch.equal(one.vector, several.vector)

    def test_a_second_range_begins_from_the_weights_pulled(self):
        _, model = make_model()
        backward = Backward(model, LOSS, NO_CLIP, Plan(2, local_steps=2, lr=0.4))
        pulled = model.weights.clone()
        first = backward.run(*make_range(4)), backward.vector.clone()
        model.weights.copy_(pulled)
        second = backward.run(*make_range(4)), backward.vector
        assert first[0].loss == second[0].loss
        assert torch.equal(first[1], second[1])


class TestPrecision:
    @pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("count", [4, 6])
    def test_the_gradient_is_that_of_autocast(self, precision, count):
        """Whatever the scale, up to what float16 rounds; also over two accumulated batches."""
        module, model = make_model(torch.float32)
        inputs, targets = make_range(count, torch.float32)
        backward = Backward(model, LOSS, NO_CLIP, Plan(4, accumulate=2, precision=precision))
        passed = backward.run(inputs, targets)
        with torch.autocast("cpu", precision):
            outputs = module(inputs)
        loss = LOSS(outputs.float(), targets)
        loss.backward()
        assert backward.vector.dtype == torch.float32
        torch.testing.assert_close(backward.vector, flat_gradient(module), rtol=0.02, atol=0.002)
        assert not torch.equal(backward.vector, plain_gradient(module, inputs, targets))
        torch.testing.assert_close(passed.loss, loss.detach())

    def test_clipping_comes_after_the_scale_is_taken_out(self):
        module, model = make_model(torch.float32)
        inputs, targets = make_range(4, torch.float32)
        norm = float(plain_gradient(module, inputs, targets).norm())
        backward = Backward(model, LOSS, Clip(norm=norm / 2), Plan(precision=torch.float16))
        backward.run(inputs, targets)
        assert float(backward.vector.norm()) == pytest.approx(norm / 2, rel=0.01)

    def test_a_scaled_gradient_that_overflows_is_skipped_until_the_scale_fits(self):
        _, model = make_model(torch.float32)
        inputs, targets = make_range(4, torch.float32)
        backward = Backward(model, lambda x, y: LOSS(x, y) * 10, NO_CLIP, Plan(precision=torch.float16))
        seen = [backward.run(inputs, targets) for _ in range(8)]
        skipped = [passed.is_skipped for passed in seen]
        num_skipped = sum(skipped)
        assert 0 < num_skipped < 8
        assert skipped == [True] * num_skipped + [False] * (8 - num_skipped)
        assert [bool(passed.is_finite) for passed in seen] == [not was for was in skipped]
        assert backward.run(inputs, targets, worker=1).is_skipped  # each worker finds its own scale

    def test_what_no_scale_can_help_is_not_skipped(self):
        """A loss that is not finite at once; an endless gradient of a finite loss when the scale has come down to 1."""
        _, model = make_model(torch.float32)
        inputs, targets = make_range(4, torch.float32)
        bad = inputs * float("nan")
        passed = Backward(model, LOSS, NO_CLIP, Plan(precision=torch.float16)).run(bad, targets)
        assert not passed.is_finite
        assert not passed.is_skipped
        backward = Backward(
            model, lambda x, y: x.sum().abs().mul(0).sqrt(), NO_CLIP, Plan(precision=torch.float16)
        )
        skipped = [backward.run(inputs, targets) for _ in range(18)]
        assert [passed.is_skipped for passed in skipped] == [True] * 16 + [False] * 2
        assert not any(passed.is_finite for passed in skipped)

    def test_local_steps_end_at_a_skipped_one(self):
        _, model = make_model(torch.float32)
        inputs, targets = make_range(8, torch.float32)
        backward = Backward(
            model, lambda x, y: LOSS(x, y) * 10, NO_CLIP, Plan(4, local_steps=2, precision=torch.float16)
        )
        assert backward.run(inputs, targets).is_skipped

    def test_scale_grows_as_torchs_does(self):
        scale = LossScale()
        for _ in range(LossScale.GROWTH_STEPS - 1):
            scale.update(is_finite=True)
        assert scale.value == 2.0**16
        scale.update(is_finite=True)
        assert scale.value == 2.0**17
        scale.update(is_finite=False)
        assert scale.value == 2.0**16


def test_targets_that_are_no_classes_have_no_hits():
    module, model = make_model()
    inputs, _ = make_range(4)
    passed = Backward(model, nn.MSELoss(), NO_CLIP).run(inputs, module(inputs).detach() + 1)
    assert passed.correct is None
    torch.testing.assert_close(passed.loss, torch.tensor(1.0, dtype=torch.float64))
