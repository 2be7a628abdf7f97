"""Each method against its published vectors, against plain training, and against its formula written out in float64."""

from __future__ import annotations

import math
import random
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from hydssp.errors import UserError
from hydssp.update import kernel
from hydssp.update.dana import Dana, DanaGapAware
from hydssp.update.gap_aware import GapAware
from hydssp.update.mitigation import DelayCompensated, Mitigation, StalenessAware, check_mitigation
from hydssp.update.step import ChunkedOptimizer
from hydssp.update.updater import Contribution, Effect

NUMEL = 23
TENSORS = [(0, 5), (5, 6), (6, 20), (20, 23)]


COMPILING = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


def nothing(start, stop):
    pass


def maker(name, **options):
    return lambda groups: getattr(torch.optim, name)(groups, **{"lr": 0.1, **options})


class Trainer:
    """A ``ChunkedOptimizer`` on float64 weights whose chunks divide nothing evenly."""

    def __init__(self, mitigation, make, start, *, num_workers=1, ranges=None, chunk_numel=7):
        self.weights = torch.tensor(start, dtype=torch.float64)
        numel = len(self.weights)
        self.optimizer = ChunkedOptimizer(
            self.weights,
            make,
            ranges or [(0, numel, {})],
            chunk_numel,
            mitigation=mitigation,
            num_workers=num_workers,
            tensors=[(a, min(b, numel)) for a, b in TENSORS if a < numel],
        )
        self.version = 0
        self.granted_version = {}
        for worker in range(num_workers):
            self.grant(worker)

    def grant(self, worker):
        self.optimizer.granted(worker)
        self.granted_version[worker] = self.version

    def push(self, gradients, lr_factor=1.0, after=nothing):
        """One update from ``{worker: gradient}``, whose workers then go on."""
        effects = self.optimizer.step(
            [
                Contribution(
                    w, np.asarray(g, self.weights.numpy().dtype), 1.0, self.version - self.granted_version[w]
                )
                for w, g in gradients.items()
            ],
            lr_factor,
            after,
        )
        self.version += 1
        for worker in gradients:
            self.grant(worker)
        return effects


def two_pushes(mitigation, start, first, second, make):
    """Workers 0 and 1 are granted the same weights; what worker 1's push does after worker 0's."""
    trainer = Trainer(mitigation, make, start, num_workers=2)
    trainer.push({0: first})
    before = trainer.weights.clone()
    effects = trainer.push({1: second})
    return before, trainer.weights, effects[0]


# ---- vectors of the papers ----


def test_gap_aware_vector_of_the_first_update():
    # n = 1, v 0.1, lr 0.1: C = 0.1 * 0.1 = 0.01; the weights moved by 0.01, so G = 2.
    before, after, effect = two_pushes(GapAware(), [1.0], [0.1], [0.6], maker("SGD"))
    assert before.item() == pytest.approx(0.99)
    assert after.item() == pytest.approx(0.99 - 0.1 * 0.3, rel=1e-6)
    assert effect.gap == pytest.approx(0.01)
    assert effect.penalty_mean == effect.penalty_max == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize(("gap", "penalty"), [(0.03, 4.0), (0.0, 1.0), (0.1, 11.0)])
def test_gap_aware_vector_of_one_step(gap, penalty):
    trainer = Trainer(GapAware(), maker("SGD"), [1.0], num_workers=2)
    trainer.push({0: [0.1]})  # n = 1, v = 0.1, lr_max = 0.1: C = 0.01
    used, _ = trainer.optimizer.history.used(1)
    trainer.weights.copy_(used + gap)  # as if the weights had gone there
    before = trainer.weights.clone()
    (effect,) = trainer.push({1: [0.6]})
    assert effect.penalty_mean == pytest.approx(penalty, rel=1e-5)
    torch.testing.assert_close(before - trainer.weights, torch.full_like(before, 0.1 * 0.6 / penalty))


def test_gap_aware_vector_with_three_quarters_taken_off():
    # now 1.00, used 0.90, C 0.05, g 0.6: G = 3, result 0.2
    trainer = Trainer(GapAware(), maker("SGD"), [0.90], num_workers=2)
    trainer.push({0: [0.5]})  # C = 0.1 * 0.5
    trainer.weights.fill_(1.00)
    trainer.push({1: [0.6]})
    assert trainer.weights.item() == pytest.approx(1.00 - 0.1 * 0.2, rel=1e-6)


def test_staleness_aware_divides_the_step():
    # lr 1, momentum 0.5: v = 1; then v = 0.5 + 4 = 4.5, its step halved only from staleness 2 on
    trainer = Trainer(StalenessAware(), maker("SGD", lr=1.0, momentum=0.5), [0.0], num_workers=4)
    trainer.push({0: [1.0]})
    assert trainer.weights.item() == -1
    (effect,) = trainer.push({1: [4.0]})
    assert trainer.weights.item() == -5.5
    assert effect == Effect(None, 1.0, 1.0)
    (effect,) = trainer.push({2: [0.0]})  # v = 2.25
    assert trainer.weights.item() == -5.5 - 2.25 / 2
    assert effect == Effect(None, 2.0, 2.0)
    assert trainer.optimizer.learning_rate == 0.5


def test_staleness_aware_divides_each_gradient_of_a_group():
    trainer = Trainer(StalenessAware(), maker("SGD", lr=1.0), [0.0], num_workers=3)
    for _ in range(4):
        trainer.push({0: [0.0]})
    trainer.push({0: [8.0], 1: [8.0]})  # staleness 0 and 4
    assert trainer.weights.item() == pytest.approx(-8 - 2)


def test_dana_vector():
    # gamma 0.5, lr 1. Worker 0: v = 2, u = 0.5*2 + 2 = 3. Worker 1: v = 4, u = 6. Worker 0: v = 1+2 = 3, u = 3.5.
    trainer = Trainer(Dana(), maker("SGD", lr=1.0, momentum=0.5), [0.0], num_workers=2)
    for worker, gradient, expected in ((0, 2.0, -3.0), (1, 4.0, -9.0), (0, 2.0, -12.5)):
        trainer.push({worker: [gradient]})
        assert trainer.weights.item() == expected


def test_dana_gap_aware_finds_no_gap_where_its_look_ahead_comes_true():
    # gamma 0.5, lr 1: v_0 = 2 moves the weights to -3 and lets expect another 1 of way. Worker 0 is granted that and
    # goes on with v_0 = 1 and no new gradient: u = 0.5, which was foreseen, so that worker 1's gap is what was not.
    trainer = Trainer(DanaGapAware(), maker("SGD", lr=1.0, momentum=0.5), [0.0], num_workers=2)
    trainer.push({0: [2.0]})
    trainer.grant(1)
    trainer.push({0: [0.0]})
    assert trainer.weights.item() == -3.5
    (effect,) = trainer.push({1: [4.0]})
    assert effect.gap == 0
    assert effect.penalty_max == 1


def test_dana_gap_aware_is_the_form_in_which_the_master_sends_where_it_will_be():
    """DANA-Zero's master with Gap-Aware: it keeps theta, and sends theta less lr gamma times the sum of the momenta."""
    lr, gamma, workers = 0.1, 0.9, 5
    draw, rng = random.Random(0), np.random.default_rng(0)
    theta = rng.normal(size=NUMEL)
    trainer = Trainer(DanaGapAware(), maker("SGD", lr=lr, momentum=gamma), theta, num_workers=workers)
    momenta, sent = np.zeros((workers, NUMEL)), [theta.copy() for _ in range(workers)]
    mean_square = np.zeros(NUMEL)
    latest = 0
    for n in range(60):
        worker, gradient = draw.randrange(workers), rng.normal(size=NUMEL)
        if n and worker != latest:
            gap = np.abs(theta - lr * gamma * momenta[worker] - sent[worker])
            gradient_made = gradient / (1 + gap / (lr * (np.sqrt(mean_square / (1 - 0.999**n)) + 1e-8)))
        else:
            gradient_made = gradient
        momenta[worker] = gamma * momenta[worker] + gradient_made
        theta = theta - lr * momenta[worker]
        mean_square = 0.999 * mean_square + 0.001 * momenta[worker] ** 2
        sent[worker] = theta - lr * gamma * momenta.sum(axis=0)
        latest = worker
        trainer.push({worker: gradient})
        np.testing.assert_allclose(trainer.weights.numpy(), sent[worker], rtol=1e-9, atol=1e-12)


def test_delay_compensated_vector():
    _, after, effect = two_pushes(DelayCompensated(), [0.0], [2.0], [3.0], maker("SGD", lr=1.0))
    # now -2, used 0: 3 + 0.04 * 9 * (-2) = 2.28
    assert after.item() == pytest.approx(-2 - 2.28)
    assert effect == Effect(2.0, None, None)


# ---- one worker, and rounds ----

OPTIMIZERS = {
    "plain": maker("SGD"),
    "momentum": maker("SGD", momentum=0.9, weight_decay=0.01, fused=True),
    "nesterov": maker("SGD", momentum=0.9, nesterov=True),
    "adam": maker("Adam", weight_decay=0.01),
    "adamw": maker("AdamW", fused=True),
}
IDENTICAL = {
    "none": Mitigation,
    "staleness_aware": StalenessAware,
    "gap_aware": GapAware,
    "gap_aware_tensor": lambda: GapAware("tensor"),
    "gap_aware_scalar": lambda: GapAware("scalar"),
    "delay_compensated": DelayCompensated,
    "delay_compensated_adaptive": lambda: DelayCompensated(adaptive=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("method", IDENTICAL.values(), ids=IDENTICAL.keys())
def test_one_worker_trains_bit_for_bit_as_without(method, make, dtype):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(NUMEL, generator=generator, dtype=dtype)
    weights = start.clone()
    chunked = ChunkedOptimizer(
        weights, make, [(0, 9, {"lr": 0.03}), (9, NUMEL, {})], 7, mitigation=method(), tensors=TENSORS
    )
    pieces = [torch.nn.Parameter(start[a:b].clone()) for a, b in ((0, 7), (7, 9), (9, 16), (16, 23))]
    optimizer = make([{"params": [p], **({"lr": 0.03} if i < 2 else {})} for i, p in enumerate(pieces)])
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(40):
        gradient = torch.randn(NUMEL, generator=generator, dtype=dtype)
        factor = 1.0 - step / 50
        chunked.granted(0)
        effects = chunked.step([Contribution(0, gradient.numpy(), 1.0, 0)], factor, nothing)
        assert all(e.gap in (None, 0.0) and e.penalty_max in (None, 1.0) for e in effects)
        for piece, part in zip(pieces, gradient.split([7, 2, 7, 7]), strict=True):
            piece.grad = part.clone()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        optimizer.step()
    assert torch.equal(weights, torch.cat([p.detach() for p in pieces]))


@pytest.mark.parametrize("method", IDENTICAL.values(), ids=IDENTICAL.keys())
def test_rounds_train_bit_for_bit_as_without(method):
    draw = np.random.default_rng(0)
    start = draw.normal(size=NUMEL)
    make = maker("SGD", momentum=0.9, weight_decay=0.01)
    trainers = [Trainer(m, make, start, num_workers=3) for m in (method(), None)]
    for _ in range(10):
        gradients = dict(enumerate(draw.normal(size=(3, NUMEL))))
        for trainer in trainers:
            trainer.push(gradients)
    assert torch.equal(trainers[0].weights, trainers[1].weights)
    history = trainers[0].optimizer.history
    assert history is None or history.num_copies == 0


@pytest.mark.parametrize("method", [Dana, DanaGapAware])
@pytest.mark.parametrize("fused", [False, True])
def test_one_worker_of_dana_is_nesterovs_momentum(method, fused):
    draw = np.random.default_rng(0)
    start = draw.normal(size=NUMEL)
    options = {"momentum": 0.9, "weight_decay": 0.01, "fused": fused}
    ours = Trainer(method(), maker("SGD", **options), start)
    plain = Trainer(None, maker("SGD", nesterov=True, **options), start)
    for _ in range(30):
        gradient = draw.normal(size=NUMEL)
        ours.push({0: gradient})
        plain.push({0: gradient})
    assert torch.equal(ours.weights, plain.weights)


# ---- each formula, written out ----


class Formula:
    """Every method in float64 on whole vectors, all versions kept; SGD, Adam and AdamW as in their papers."""

    def __init__(
        self, method, optimizer, start, *, lr, momentum=0.0, nesterov=False, decay=0.0, granularity="element"
    ):
        self.method, self.optimizer = method, optimizer
        self.lr, self.momentum, self.nesterov, self.decay = lr, momentum, nesterov, decay
        self.granularity = granularity
        self.versions = [np.array(start, float)]
        self.velocity = np.zeros(NUMEL)
        self.velocities = {}
        self.mean_square, self.n, self.lr_max = np.zeros(NUMEL), 0, 0.0
        self.m, self.s, self.adam_steps = np.zeros(NUMEL), np.zeros(NUMEL), 0
        self.g_square = np.zeros(NUMEL)

    def blocks(self):
        if self.granularity == "tensor":
            return TENSORS
        return [(0, NUMEL)] if self.granularity == "scalar" else [(i, i + 1) for i in range(NUMEL)]

    def penalty(self, used, lr, worker):
        now, out = self.versions[-1], np.ones(NUMEL)
        if self.method == "dana_gap_aware":
            now = now + lr * self.momentum * sum(v for w, v in self.velocities.items() if w != worker)
        if not self.n or not self.lr_max:
            return out
        for a, b in self.blocks():
            rms = math.sqrt(np.mean(self.mean_square[a:b]) / (1 - 0.999**self.n))
            gap = math.sqrt(np.mean((now - used)[a:b] ** 2))
            out[a:b] = 1 + gap / (self.lr_max * (rms + 1e-8))
        return out

    def learn(self, velocity):
        self.mean_square = 0.999 * self.mean_square + 0.001 * velocity**2
        self.n += 1

    def update(self, group, factor):
        """``group``: worker, version used, gradient."""
        now = self.versions[-1]
        lr = self.lr * factor
        coupled = 0.0 if self.optimizer == "AdamW" else self.decay
        taus = [max(1, len(self.versions) - 1 - version) for _, version, _ in group]
        if self.method == "staleness_aware":
            mean = sum(1 / tau for tau in taus) / len(taus)
            lr *= mean
        self.lr_max = max(self.lr_max, lr)
        terms = []
        for (worker, version, g), tau in zip(group, taus, strict=True):
            used = self.versions[version]
            term = g + coupled * now / len(group)
            if self.method == "staleness_aware":
                term = g / tau / mean + coupled * now / len(group)
            if self.method in ("gap_aware", "dana_gap_aware"):
                term = term / (1 if used is now else self.penalty(used, lr, worker))
            if self.method == "delay_compensated":
                term = g + 0.04 * g * g * (now - used) + coupled * now / len(group)
            if self.method == "adaptive":
                self.g_square = 0.95 * self.g_square + 0.05 * g * g
                term = (
                    g + 2 / np.sqrt(self.g_square + 1e-7) * g * g * (now - used) + coupled * now / len(group)
                )
            terms.append((worker, term))
        if self.method.startswith("dana"):
            new = now.copy()
            for worker, term in terms:
                v = self.momentum * self.velocities.get(worker, 0.0) + term
                self.velocities[worker] = v
                new -= lr * (self.momentum * v + term)
                self.learn(v)
        else:
            total = sum(term for _, term in terms)
            if self.optimizer == "SGD":
                self.velocity = self.momentum * self.velocity + total
                v = self.velocity if self.momentum else total
                new = now - lr * (total + self.momentum * v if self.nesterov else v)
                self.learn(v)
            else:
                self.adam_steps += 1
                self.m = 0.9 * self.m + 0.1 * total
                self.s = 0.999 * self.s + 0.001 * total**2
                m, s = self.m / (1 - 0.9**self.adam_steps), self.s / (1 - 0.999**self.adam_steps)
                new = now * (1 - lr * self.decay if self.optimizer == "AdamW" else 1)
                new = new - lr * m / (np.sqrt(s) + 1e-8)
                if lr:
                    self.learn((now - new) / lr)
        self.versions.append(new)


METHODS = {
    "none": Mitigation,
    "staleness_aware": StalenessAware,
    "gap_aware": GapAware,
    "dana": Dana,
    "dana_gap_aware": DanaGapAware,
    "delay_compensated": DelayCompensated,
    "adaptive": lambda: DelayCompensated(adaptive=True),
}
SGD_FORMS = {
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"momentum": 0.9, "weight_decay": 0.05},
}


def follow(trainer, formula, *, num_workers, seed=0, updates=60, largest_group=3, zero_lr_at=()):
    """Drive both along one random stale trajectory and compare after every update."""
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    stale = 0
    for update in range(updates):
        group = sorted(draw.sample(range(num_workers), draw.randint(1, min(largest_group, num_workers))))
        gradients = {w: rng.normal(size=NUMEL) for w in group}
        factor = 0.0 if update in zero_lr_at else draw.choice([1.0, 0.5, 0.25])
        stale += sum(trainer.granted_version[w] < trainer.version for w in group)
        formula.update([(w, trainer.granted_version[w], gradients[w]) for w in group], factor)
        trainer.push(gradients, factor)
        np.testing.assert_allclose(trainer.weights.numpy(), formula.versions[-1], rtol=1e-9, atol=1e-12)
    assert stale > updates / 2


@pytest.mark.parametrize("largest_group", [1, 3])
@pytest.mark.parametrize("form", SGD_FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_formula_with_sgd(method, form, largest_group):
    options = SGD_FORMS[form]
    start = np.random.default_rng(1).normal(size=NUMEL)
    trainer = Trainer(METHODS[method](), maker("SGD", **options), start, num_workers=5)
    formula = Formula(
        method, "SGD", start, lr=0.1, momentum=0.9, nesterov=options.get("nesterov", False),
        decay=options.get("weight_decay", 0.0),
    )  # fmt: skip
    follow(trainer, formula, num_workers=5, largest_group=largest_group)


@COMPILING
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("form", ["momentum", "nesterov", "decay"])
@pytest.mark.parametrize(("method", "make"), [("gap_aware", GapAware), ("dana_gap_aware", DanaGapAware)])
def test_formula_of_the_compiled_kernel(method, make, form):
    options = SGD_FORMS[form]
    start = np.random.default_rng(1).normal(size=NUMEL)
    mitigation = make(compiled=True)
    mitigation.probe(torch.float64)
    trainer = Trainer(mitigation, maker("SGD", **options), start, num_workers=5, chunk_numel=11)
    formula = Formula(
        method, "SGD", start, lr=0.1, momentum=0.9, nesterov=options.get("nesterov", False),
        decay=options.get("weight_decay", 0.0),
    )  # fmt: skip
    follow(trainer, formula, num_workers=5, largest_group=2, zero_lr_at=(0, 7))


@COMPILING
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("make", [GapAware, DanaGapAware])
def test_the_compiled_kernel_keeps_old_weights_and_tells_the_same(make, monkeypatch):
    calls = Mock(wraps=kernel.compiled())
    monkeypatch.setattr(kernel, "compiled", lambda: calls)
    start = np.random.default_rng(1).normal(size=NUMEL)
    trainers = [
        Trainer(make(compiled=c), maker("SGD", momentum=0.9, maximize=True), start, num_workers=3)
        for c in (False, True)
    ]
    rng = np.random.default_rng(0)
    for update in range(12):
        gradient = rng.normal(size=NUMEL)
        eager, compiled = (trainer.push({update % 3: gradient})[0] for trainer in trainers)
        assert compiled == pytest.approx(eager)
    assert eager.gap > 0
    assert calls.call_count == 4 * 11  # chunks of all pushes but the first, which finds no gap


@pytest.mark.parametrize("method", ["none", "staleness_aware", "gap_aware", "delay_compensated", "adaptive"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_formula_without_momentum_and_with_adam(method, name):
    start = np.random.default_rng(1).normal(size=NUMEL)
    trainer = Trainer(METHODS[method](), maker(name, lr=0.02, weight_decay=0.05), start, num_workers=5)
    formula = Formula(method, name, start, lr=0.02, decay=0.05)
    follow(trainer, formula, num_workers=5, zero_lr_at=() if name == "SGD" else (0, 7))


@pytest.mark.parametrize("granularity", ["tensor", "scalar"])
@pytest.mark.parametrize(("method", "make"), [("gap_aware", GapAware), ("dana_gap_aware", DanaGapAware)])
def test_formula_of_coarser_penalties(method, make, granularity):
    start = np.random.default_rng(1).normal(size=NUMEL)
    options = {"momentum": 0.9, "weight_decay": 0.05}
    trainer = Trainer(make(granularity), maker("SGD", **options), start, num_workers=5)
    formula = Formula(method, "SGD", start, lr=0.1, momentum=0.9, decay=0.05, granularity=granularity)
    follow(trainer, formula, num_workers=5)


def test_the_mean_square_is_right_over_many_updates():
    """It is stored in a scaled form that is renewed every 9,000 updates or so."""
    start = np.zeros(NUMEL)
    trainer = Trainer(GapAware(), maker("SGD", momentum=0.9), start, num_workers=2, chunk_numel=100)
    formula = Formula("gap_aware", "SGD", start, lr=0.1, momentum=0.9)
    rng = np.random.default_rng(0)
    for update in range(10_000):
        gradient = rng.normal(size=NUMEL)
        formula.update([(update % 2, trainer.granted_version[update % 2], gradient)], 1.0)
        trainer.push({update % 2: gradient})
    np.testing.assert_allclose(trainer.weights.numpy(), formula.versions[-1], rtol=1e-8, atol=1e-10)


def test_each_parameter_group_has_its_own_rate_and_decay():
    start = np.ones(6)
    trainer = Trainer(
        GapAware(), maker("SGD", momentum=0.9), start, num_workers=2,
        ranges=[(0, 3, {"lr": 0.0}), (3, 6, {"lr": 0.5, "weight_decay": 0.1})],
    )  # fmt: skip
    trainer.push({0: np.full(6, 0.2)})
    trainer.push({1: np.full(6, 0.2)})
    assert (trainer.weights[:3] == 1).all()
    v1 = 0.2 + 0.1
    w1 = 1 - 0.5 * v1
    # n = 1: C = lr v1, which is the gap: G = 2
    expected = w1 - 0.5 * (0.9 * v1 + (0.2 + 0.1 * w1) / 2)
    torch.testing.assert_close(
        trainer.weights[3:], torch.full((3,), expected, dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_metrics_are_those_of_the_whole_vector():
    start = np.zeros(NUMEL)
    for granularity in ("element", "tensor", "scalar"):
        trainer = Trainer(GapAware(granularity), maker("SGD"), start, num_workers=2)
        rng = np.random.default_rng(0)
        gradient = rng.normal(size=NUMEL)
        trainer.push({0: gradient})
        moved = trainer.weights.clone().numpy()
        (effect,) = trainer.push({1: gradient})
        assert effect.gap == pytest.approx(np.sqrt(np.mean(moved**2)))
        # Every element moved by just what one update moves it: G = 2 everywhere, at every granularity.
        assert effect.penalty_mean == pytest.approx(2, rel=1e-5)
        assert effect.penalty_max == pytest.approx(2, rel=1e-5)


def test_a_method_works_in_bounded_pieces():
    for granularity in ("element", "tensor", "scalar"):
        trainer = Trainer(GapAware(granularity), maker("SGD"), np.zeros(NUMEL), num_workers=2)
        trainer.push({0: np.ones(NUMEL)})
        seen = []
        trainer.push({1: np.ones(NUMEL)}, after=lambda a, b, seen=seen: seen.append((a, b)))
        assert [piece for piece in seen if piece[0] < piece[1]] == [(0, 7), (7, 14), (14, 21), (21, 23)]
        assert len(seen) == (4 if granularity == "element" else 8)


def test_gradients_are_not_changed():
    for method in METHODS.values():
        trainer = Trainer(
            method(), maker("SGD", momentum=0.9, weight_decay=0.1), np.ones(NUMEL), num_workers=3
        )
        gradients = {w: np.full(NUMEL, 1.0 + w) for w in range(3)}
        trainer.push({0: gradients[0]})
        trainer.push({1: gradients[1], 2: gradients[2]})
        assert all((g == 1.0 + w).all() for w, g in gradients.items())


# ---- refusals ----


class Slow(torch.optim.SGD):
    """A subclass may step in another way."""


@pytest.mark.parametrize(
    ("method", "make", "words"),
    [
        (
            GapAware(),
            maker("RMSprop"),
            r"mitigation=gap_aware optimizer=torch.optim.rmsprop.RMSprop.*torch.optim.SGD",
        ),
        (GapAware(), lambda groups: Slow(groups, lr=0.1), "mitigation=gap_aware.*Slow"),
        (DelayCompensated(), maker("Adagrad"), "mitigation=delay_compensated.*Adagrad"),
        (Dana(), maker("AdamW"), "mitigation=dana optimizer=AdamW: .*momentum above 0"),
        (Dana(), maker("SGD"), "mitigation=dana optimizer=SGD with momentum=0, dampening=0"),
        (DanaGapAware(), maker("SGD", momentum=0.9, dampening=0.1), "dana_gap_aware.*dampening=0.1"),
    ],
)
def test_combinations_without_a_meaning_are_refused(method, make, words):
    optimizer = make([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(UserError, match=words):
        check_mitigation(method, optimizer)


def test_what_is_not_for_the_kernel_is_refused(monkeypatch):
    with pytest.raises(UserError, match=r"compiled=true mitigation.granularity=tensor"):
        GapAware("tensor", compiled=True)
    for make in (maker("SGD"), maker("Adam")):
        optimizer = make([{"params": [torch.nn.Parameter(torch.zeros(1))]}])
        with pytest.raises(UserError, match=r"mitigation=gap_aware mitigation.compiled=true optimizer="):
            check_mitigation(GapAware(compiled=True), optimizer)
    broken = RuntimeError("\nno compiler here\n more")
    monkeypatch.setattr(kernel, "compiled", lambda: Mock(side_effect=broken))
    with pytest.raises(
        UserError,
        match=r"mitigation.compiled=true: .*RuntimeError: no compiler here\); where rank 0 runs it needs",
    ):
        GapAware(compiled=True).probe(torch.float32)


def test_a_parameter_group_may_not_take_danas_momentum_away():
    optimizer = maker("SGD", momentum=0.9)([torch.nn.Parameter(torch.zeros(1))])
    check_mitigation(Dana(), optimizer, [{"pattern": "*", "momentum": 0.5}])
    with pytest.raises(UserError, match="momentum=0"):
        check_mitigation(Dana(), optimizer, [{"pattern": "*.bias", "momentum": 0}])


@pytest.mark.parametrize("method", [Dana(), DanaGapAware()])
def test_dana_in_rounds_is_refused_with_the_reason(method):
    optimizer = maker("SGD", momentum=0.9)([torch.nn.Parameter(torch.zeros(1))])
    check_mitigation(method, optimizer)
    with pytest.raises(UserError, match=f"mitigation={method.name}: .*nesterov=true"):
        check_mitigation(method, optimizer, is_synchronous=True)


def test_every_other_method_goes_with_rounds_and_any_optimizer_where_it_may():
    optimizer = maker("RMSprop")([torch.nn.Parameter(torch.zeros(1))])
    for method in (Mitigation(), StalenessAware()):
        check_mitigation(method, optimizer, is_synchronous=True)


@pytest.mark.parametrize("build", [lambda: GapAware("elements"), lambda: DanaGapAware("row")])
def test_unknown_granularity(build):
    with pytest.raises(UserError, match="mitigation.granularity=.*element, tensor, scalar"):
        build()


@pytest.mark.parametrize("strength", [-1, math.nan, math.inf])
def test_senseless_strength(strength):
    with pytest.raises(UserError, match="mitigation.strength="):
        DelayCompensated(strength)
