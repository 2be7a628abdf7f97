from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hydssp.errors import UserError
from hydssp.update.layout import FlatModule, ParameterLayout
from hydssp.update.schedule import Constant, Cosine, LrClock, OneCycle, Step, WarmUp, schedule_epoch
from hydssp.update.step import ChunkedOptimizer, check_elementwise, check_groups, group_ranges
from hydssp.update.updater import Contribution


class Tied(nn.Module):
    """A shared weight, a frozen layer and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.frozen = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.last(self.frozen(self.first(x)))


class TestLayout:
    def test_shared_parameters_lie_once_and_frozen_ones_not_at_all(self):
        layout = ParameterLayout.of(Tied())
        assert [(s.name, s.start, s.stop) for s in layout.spans] == [
            ("first.weight", 0, 9),
            ("last.bias", 9, 12),
        ]
        assert layout.numel == 12

    def test_vectors_are_the_modules_own_memory(self):
        module = Tied()
        before = module.first.weight.detach().clone()
        flat = FlatModule(module, ParameterLayout.of(module))
        assert (flat.weights[:9].view(3, 3) == before).all()
        flat.weights.fill_(2.0)
        assert (module.last.weight == 2).all()
        assert module.last.weight is module.first.weight

    def test_backward_fills_the_flat_gradient_anew(self):
        module = Tied()
        flat = FlatModule(module, ParameterLayout.of(module, torch.float64))
        x = torch.ones(2, 3, dtype=torch.float64)
        for _ in range(2):
            flat.zero_gradient()
            module(x).sum().backward()
        once = flat.gradient.clone()
        expected = torch.autograd.grad(module(x).sum(), [module.first.weight, module.last.bias])
        torch.testing.assert_close(once, torch.cat([g.reshape(-1) for g in expected]))
        assert module.frozen.weight.grad is None

    def test_digest_tells_models_apart(self):
        same = ParameterLayout.of(nn.Linear(2, 3)).digest
        assert ParameterLayout.of(nn.Linear(2, 3)).digest == same
        assert ParameterLayout.of(nn.Linear(3, 2)).digest != same
        assert ParameterLayout.of(nn.Linear(2, 3), torch.float64).digest != same

    def test_nothing_to_train_is_refused(self):
        with pytest.raises(UserError, match="no trainable parameter"):
            ParameterLayout.of(nn.Linear(2, 2).requires_grad_(False))

    def test_complex_parameters_are_refused(self):
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        with pytest.raises(UserError, match="'weight'"):
            ParameterLayout.of(module)


def sgd(**options):
    return lambda groups: torch.optim.SGD(groups, **{"lr": 0.1, **options})


class Lars(torch.optim.Optimizer):
    """The least that depends on a norm over the whole tensor."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * float(p.norm() / p.grad.norm()))


class TestElementwise:
    @pytest.mark.parametrize(
        "name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adadelta"]
    )
    def test_elementwise_optimizers_pass(self, name):
        check_elementwise(lambda groups: getattr(torch.optim, name)(groups, lr=0.01))

    @pytest.mark.parametrize("make", [Lars, torch.optim.LBFGS, torch.optim.Adafactor])
    def test_others_are_refused_by_name(self, make):
        with pytest.raises(UserError, match=f"optimizer.*{make.__name__}"):
            check_elementwise(make)

    @pytest.mark.parametrize(
        ("lr", "words"), [(-1, "refuses its arguments.*-1"), (float("inf"), "not finite")]
    )
    def test_a_senseless_rate_is_not_blamed_on_the_optimizer(self, lr, words):
        with pytest.raises(UserError, match=words):
            check_elementwise(lambda groups: torch.optim.SGD(groups, lr=lr))

    def test_wrong_arguments_are_the_users_mistake(self):
        with pytest.raises(UserError, match="momentun"):
            check_elementwise(lambda groups: torch.optim.SGD(groups, lr=0.1, momentun=0.9))


class TestGroupRanges:
    layout = ParameterLayout.of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))

    def test_without_groups_one_range(self):
        assert group_ranges(self.layout, []) == [(0, 12, {})]

    def test_first_match_counts_and_neighbours_with_equal_options_join(self):
        groups = [{"pattern": "1.*", "lr": 1.0}, {"pattern": "*.bias", "weight_decay": 0}]
        assert group_ranges(self.layout, groups) == [
            (0, 4, {}),
            (4, 6, {"weight_decay": 0}),
            (6, 12, {"lr": 1.0}),
        ]

    @pytest.mark.parametrize(
        "group", [{"pattern": "*.biass", "lr": 1.0}, {"lr": 1.0, "eps": 1}, {"pattern": 3, "lr": 1.0}]
    )
    def test_a_group_that_matches_nothing_is_refused(self, group):
        with pytest.raises(UserError, match=r"parameter_groups\[0\].pattern.*0\.weight"):
            group_ranges(self.layout, [group])

    def test_a_group_without_an_option_is_refused(self):
        with pytest.raises(UserError, match=r"parameter_groups\[0\].*no option"):
            group_ranges(self.layout, [{"pattern": "*.bias"}])

    def test_an_option_that_the_optimizer_does_not_have_is_refused(self):
        check_groups(sgd(), [{"pattern": "*.bias", "weight_decay": 0}])
        with pytest.raises(UserError, match=r"parameter_groups\[1\].weight_dcay=0: .*weight_decay"):
            check_groups(sgd(), [{"pattern": "*", "lr": 1}, {"pattern": "*.bias", "weight_dcay": 0}])


class TestChunkedOptimizer:
    def test_equals_the_optimizer_on_the_whole_vector(self):
        start = torch.randn(50, dtype=torch.float64)
        gradients = torch.randn(4, 50, dtype=torch.float64)
        weights = start.clone()
        chunked = ChunkedOptimizer(weights, sgd(momentum=0.9), [(0, 50, {})], chunk_numel=8)
        whole = nn.Parameter(start.clone())
        optimizer = torch.optim.SGD([whole], lr=0.1, momentum=0.9)
        for gradient in gradients:
            chunked.step([Contribution(0, gradient.numpy(), 1.0, 0)], 1.0, lambda a, b: None)
            whole.grad = gradient.clone()
            optimizer.step()
        assert (weights == whole).all()
        assert chunked.steps == 4

    def test_sums_weighted_gradients_and_scales_the_rate(self):
        weights = torch.zeros(5)
        chunked = ChunkedOptimizer(weights, sgd(), [(0, 5, {})], chunk_numel=2)
        a, b = torch.ones(5), torch.full((5,), 3.0)
        chunked.step(
            [Contribution(0, a.numpy(), 0.5, 0), Contribution(1, b.numpy(), 2.0, 0)], 0.5, lambda a, b: None
        )
        torch.testing.assert_close(weights, torch.full((5,), -0.05 * 6.5))
        assert chunked.learning_rate == pytest.approx(0.05)
        assert (a == 1).all()  # a worker's gradient is not the optimizer's scratch space

    def test_says_which_elements_are_final_in_bounded_pieces(self):
        weights = torch.zeros(10)
        chunked = ChunkedOptimizer(weights, sgd(), [(0, 3, {}), (3, 10, {"lr": 1.0})], chunk_numel=4)
        seen = []

        def after(a, b):
            assert (weights[a:b] != 0).all()
            assert (weights[b:] == 0).all()
            seen.append((a, b))

        chunked.step([Contribution(0, np.ones(10, np.float32), 1.0, 0)], 1.0, after)
        assert seen == [(0, 3), (3, 7), (7, 10)]
        torch.testing.assert_close(weights, torch.tensor([-0.1] * 3 + [-1.0] * 7))


class TestSchedule:
    def test_steps(self):
        schedule = Step([2, 4], 0.1)
        assert [schedule.factor(e) for e in (0, 1.99, 2, 3.9)] == [1, 1, 0.1, 0.1]
        assert schedule.factor(4) == pytest.approx(0.01)
        assert Constant().factor(99) == 1

    @pytest.mark.parametrize("milestones", [[], [0, 1], [2, 2], [3, 1]])
    def test_milestones_must_rise(self, milestones):
        with pytest.raises(UserError, match="schedule.milestones"):
            Step(milestones)

    @pytest.mark.parametrize("gamma", [0, -1, 1.5, float("nan")])
    def test_gamma_must_shrink(self, gamma):
        with pytest.raises(UserError, match="schedule.gamma"):
            Step([1], gamma)

    def test_cosine(self):
        schedule = Cosine(epochs=8, final=0.2)
        assert [schedule.factor(e) for e in (0, 4, 8, 99)] == pytest.approx([1, 0.6, 0.2, 0.2])
        assert schedule.factor(2) == pytest.approx(0.2 + 0.8 * (1 + 2**-0.5) / 2)

    def test_one_cycle_is_that_of_torch(self):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
        theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=101)
        ours = OneCycle(epochs=10.0, peak_at=0.3)
        for step in range(101):
            # torch's peak lies at step 0.3 * total_steps - 1
            share = step / 29.3 * 3 if step < 29.3 else 3 + (step - 29.3) / (100 - 29.3) * 7
            assert ours.factor(share) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
            optimizer.step()
            if step < 100:
                theirs.step()
        assert ours.factor(20) == pytest.approx(4e-6)

    def test_warm_up_rises_to_the_other_schedule(self):
        schedule = WarmUp(Step([1, 5], 0.5), epochs=2, start=0.25)
        factors = [schedule.factor(e) for e in (0, 0.5, 1, 2, 4, 5)]
        assert factors == pytest.approx([0.25, 0.4375, 0.5 * 0.625, 0.5, 0.5, 0.25])

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: Cosine(None), "schedule.epochs=None.*epochs=null"),
            (lambda: Cosine(0), "schedule.epochs=0"),
            (lambda: Cosine(float("inf")), "schedule.epochs=inf"),
            (lambda: Cosine(5, final=2), "schedule.final=2"),
            (lambda: Cosine(5, final=float("nan")), "schedule.final=nan"),
            (lambda: OneCycle(-1), "schedule.epochs=-1"),
            (lambda: OneCycle(5, peak_at=1), "schedule.peak_at=1"),
            (lambda: OneCycle(5, peak_at=0), "schedule.peak_at=0"),
            (lambda: OneCycle(5, start=1.5), "schedule.start=1.5"),
            (lambda: OneCycle(5, final=-1), "schedule.final=-1"),
            (lambda: WarmUp(Constant(), -1, 0.5), "warmup.epochs=-1"),
            (lambda: WarmUp(Constant(), float("nan"), 0.5), "warmup.epochs=nan"),
            (lambda: WarmUp(Constant(), 1, 2), "warmup.start=2"),
        ],
    )
    def test_senseless_schedules_are_refused(self, make, words):
        with pytest.raises(UserError, match=words):
            make()

    def test_clocks_agree_in_rounds_and_part_in_asynchronous_runs(self):
        def epochs(samples, updates, worker_clock):
            return [
                schedule_epoch(
                    clock,
                    samples=samples,
                    updates=updates,
                    worker_clock=worker_clock,
                    batch_size=10,
                    num_workers=4,
                    num_samples=400,
                )
                for clock in (LrClock.samples, LrClock.server_updates, LrClock.worker_epochs)
            ]

        assert epochs(samples=400, updates=10, worker_clock=10) == [1, 1, 1]  # BSP
        # 40 single pushes: the server's count is P times too early; a fast worker's own clock too.
        assert epochs(samples=400, updates=40, worker_clock=25) == [1, 4, 2.5]


def test_numpy_dtype():
    assert ParameterLayout.of(nn.Linear(1, 1), torch.float64).numpy_dtype == np.float64
