"""Runs through the local transport against plain PyTorch and against each other; no MPI, deterministic."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch

from hydssp import server as server_role
from hydssp import worker as worker_role
from hydssp.backward import ONE_BATCH, Backward, Clip, Plan
from hydssp.coordination.coordinator import Coordinator
from hydssp.coordination.paradigms import ASP, BSP, DSSP, SSP
from hydssp.coordination.ranges import RangeDealer
from hydssp.data import EpochOrder, digits
from hydssp.data.batches import Batches
from hydssp.models import mlp
from hydssp.observe.recorder import Recorder
from hydssp.straggler import NoStraggler
from hydssp.transport.local import LocalFabric
from hydssp.update.layout import FlatModule, ParameterLayout
from hydssp.update.schedule import Constant, LrClock, Step
from hydssp.update.step import ChunkedOptimizer, group_ranges
from hydssp.update.updater import Contribution
from hydssp.update.wire import Wire

DTYPE = torch.float64
TRAIN = digits().train
LOSS = torch.nn.CrossEntropyLoss()
CONSTANT, NO_LIMITS = Constant(), server_role.Limits()


def make_model():
    torch.manual_seed(0)
    module = mlp((1, 8, 8), 10, hidden=(24,)).to(DTYPE)
    return module, ParameterLayout.of(module, DTYPE)


def batches_of(order, data):
    return lambda epoch, start, n: data.batch(order.indices(epoch, start, n))


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-3)


def train(
    paradigm,
    num_workers,
    *,
    batch_size=32,
    epochs=2.0,
    make=sgd,
    schedule=CONSTANT,
    lr_clock=LrClock.samples,
    groups=(),
    turns=None,
    limits=NO_LIMITS,
    spoil=None,
    chunk_numel=1000,
    plan=ONE_BATCH,
    loss=LOSS,
    pull="fp32",
    push="fp32",
    error_feedback=False,
):
    """Train in this process; worker ``turns[i]`` is stepped i-th (all in turn by default).

    Returns:
        The final weights, the recorder's summary and the server.
    """
    module, layout = make_model()
    samples_per_push = batch_size * plan.accumulate * plan.local_steps
    ticks = count()
    fabric = LocalFabric(
        num_workers,
        layout.numel,
        layout.numpy_dtype,
        clock=lambda: next(ticks) * 1e-3,
        pull_dtype=Wire(pull, DTYPE).numpy_dtype,
        push_dtype=Wire(push, DTYPE).numpy_dtype,
    )
    order, data = EpochOrder(len(TRAIN), 0), Batches(TRAIN, DTYPE)
    batches = batches_of(order, data)
    if spoil is not None:
        batches = spoil(batches)
    wires = Wire(pull, DTYPE), Wire(push, DTYPE)
    workers = []
    for end in fabric.workers:
        flat = FlatModule(copy.deepcopy(module), layout)
        backward = Backward(flat, loss, Clip(), plan)
        workers.append(
            worker_role.Worker(end, flat, batches, backward, NoStraggler(), None, *wires, error_feedback)
        )
    model = FlatModule(module, layout)
    recorder = Recorder(None, paradigm="test", data_size=len(TRAIN))
    server = server_role.Server(
        transport=fabric.server,
        coordinator=Coordinator(paradigm, num_workers),
        dealer=RangeDealer(len(TRAIN), samples_per_push, epochs, rounds=paradigm.is_synchronous),
        optimizer=ChunkedOptimizer(
            model.weights, make, group_ranges(layout, groups), chunk_numel, wire=Wire(push, DTYPE)
        ),
        step_rule=server_role.StepRule(
            schedule=schedule,
            lr_clock=lr_clock,
            push_weight=1.0 if paradigm.is_synchronous else 1 / num_workers,
            is_mean=paradigm.is_synchronous,
            batch_size=samples_per_push,
            num_samples=len(TRAIN),
        ),
        evaluator=None,
        evaluate_every=float("inf"),
        recorder=recorder,
        limits=limits,
        encode=wires[0].encode,
    )
    recorder.started(fabric.server.now(), num_workers)
    server.start()
    for step in range(10**6):
        if server.is_done:
            break
        server.step()
        for worker in turns(step) if turns else range(num_workers):
            workers[worker].step()
    assert server.is_done
    summary = recorder.write_summary(fabric.server.now(), "done", server.ended_by)
    return model.weights.numpy().copy(), summary, server


def plain(batch_size, epochs=2, make=sgd, lr_at=None):
    """Plain single-process training on the same order of samples."""
    module, _ = make_model()
    optimizer = make([{"params": list(module.parameters())}])
    order, data = EpochOrder(len(TRAIN), 0), Batches(TRAIN, DTYPE)
    seen, rate = 0, optimizer.param_groups[0]["lr"]
    for epoch in range(epochs):
        for start in range(0, len(TRAIN), batch_size):
            n = min(batch_size, len(TRAIN) - start)
            if lr_at:
                optimizer.param_groups[0]["lr"] = rate * lr_at(seen / len(TRAIN))
            inputs, targets = data.batch(order.indices(epoch, start, n))
            optimizer.zero_grad()
            LOSS(module(inputs), targets).backward()
            optimizer.step()
            seen += n
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()


def adamw(groups):
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.01)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_bsp_equals_one_process_with_a_larger_batch(make):
    weights, summary, _ = train(BSP(), 3, make=make)
    np.testing.assert_allclose(weights, plain(96, make=make), rtol=0, atol=1e-6)
    assert summary["staleness"]["max"] == 0
    assert summary["samples"] == 2 * len(TRAIN)


@pytest.mark.parametrize("lr_clock", LrClock)
def test_accumulated_batches_are_one_large_batch(lr_clock):
    """Also the range of 1437 % 96 = 93 samples at the end of an epoch, which is cut into 32, 32 and 29."""
    schedule = Step([0.5, 1.5], 0.1)
    settings = {"schedule": schedule, "lr_clock": lr_clock}
    pieces, summary, _ = train(BSP(), 1, **settings, plan=Plan(32, accumulate=3))
    whole, expected, _ = train(BSP(), 1, **settings, batch_size=96)
    np.testing.assert_allclose(pieces, whole, rtol=0, atol=1e-10)
    for key in ("samples", "pushes", "updates", "epochs"):
        assert summary[key] == expected[key]
    assert summary["samples"] == 2 * len(TRAIN)
    assert summary["updates"] == 2 * 15


def test_local_steps_in_rounds_average_the_workers_weights():
    """Plain SGD at the server too: the mean of the weights that the workers came to, as local SGD is defined."""

    def make(groups):
        return torch.optim.SGD(groups, lr=0.05)

    weights, summary, _ = train(BSP(), 2, epochs=1.0, make=make, plan=Plan(32, local_steps=5, lr=0.05))
    module, layout = make_model()
    flat = FlatModule(module, layout)
    order, data = EpochOrder(len(TRAIN), 0), Batches(TRAIN, DTYPE)
    for first in range(0, len(TRAIN), 320):
        start, ends, counts = flat.weights.clone(), [], []
        for begin in (first, first + 160):
            stop = max(begin, min(begin + 160, len(TRAIN)))
            flat.weights.copy_(start)
            for at in range(begin, stop, 32):
                flat.zero_gradient()
                inputs, targets = data.batch(order.indices(0, at, min(32, stop - at)))
                LOSS(module(inputs), targets).backward()
                flat.weights.sub_(flat.gradient, alpha=0.05)
            ends.append(flat.weights.clone())
            counts.append(stop - begin)
        flat.weights.copy_(sum(n * end for n, end in zip(counts, ends, strict=True)) / sum(counts))
    np.testing.assert_allclose(weights, flat.weights.numpy(), rtol=0, atol=1e-10)
    assert summary["updates"] == 5
    assert summary["samples"] == len(TRAIN)
    assert (summary["pushes"], summary["empty_pushes"]) == (10, 1)


@pytest.mark.parametrize(
    ("pull", "push", "error_feedback"),
    [
        ("bf16", "fp32", False),
        ("fp32", "bf16", False),
        ("fp32", "bf16", True),
        ("bf16", "fp16", False),
        ("fp16", "fp16", True),
    ],
)
def test_a_short_wire_rounds_what_travels_and_nothing_else(pull, push, error_feedback):
    """One worker, bit for bit: rounded weights at the worker, the server's own whole, each gradient rounded."""
    types = {"fp32": DTYPE, "bf16": torch.bfloat16, "fp16": torch.float16}
    weights, _, _ = train(ASP(), 1, epochs=1.0, pull=pull, push=push, error_feedback=error_feedback)
    module, layout = make_model()
    flat = FlatModule(module, layout)
    whole = torch.nn.Parameter(flat.weights.clone())
    optimizer = sgd([{"params": [whole]}])
    order, data = EpochOrder(len(TRAIN), 0), Batches(TRAIN, DTYPE)
    lost = torch.zeros_like(flat.weights)
    for start in range(0, len(TRAIN), 32):
        flat.weights.copy_(whole.detach().to(types[pull]))
        flat.zero_gradient()
        inputs, targets = data.batch(order.indices(0, start, min(32, len(TRAIN) - start)))
        LOSS(module(inputs), targets).backward()
        gradient = flat.gradient + lost
        whole.grad = gradient.to(types[push]).to(DTYPE)
        if error_feedback:
            lost = gradient - whole.grad
        optimizer.step()
    assert (weights == whole.detach().numpy()).all()


def test_each_worker_keeps_its_own_error():
    """On average nothing is lost: the sums of what was pushed and of what was computed differ by the last errors."""
    settings = {"epochs": 1.0, "make": lambda g: torch.optim.SGD(g, lr=1e-3)}
    exact, _, _ = train(BSP(), 3, **settings)
    rounded, _, _ = train(BSP(), 3, **settings, push="bf16")
    fed_back, _, _ = train(BSP(), 3, **settings, push="bf16", error_feedback=True)
    assert np.abs(fed_back - exact).mean() < 0.5 * np.abs(rounded - exact).mean()


def test_a_gradient_that_does_not_fit_the_wire_is_refused():
    weights, summary, _ = train(ASP(), 1, epochs=0.1, push="fp16", loss=lambda x, y: LOSS(x, y) * 1e8)
    assert summary["rejected_gradients"] == summary["pushes"] == 5
    fits, _, _ = train(ASP(), 1, epochs=0.1, push="bf16", loss=lambda x, y: LOSS(x, y) * 1e8)
    assert (weights != fits).any()


def test_decoding_takes_one_vector_for_each_gradient_of_an_update_and_no_more():
    decoded = []

    class Spy(ChunkedOptimizer):
        def _room_for(self, count):
            room = super()._room_for(count)
            decoded.append([gradient.data_ptr() for gradient in room])
            return room

    weights = torch.zeros(50)
    optimizer = Spy(weights, lambda g: torch.optim.SGD(g, lr=1.0), [(0, 50, {})], 7, wire=Wire("bf16"))
    gradient = np.empty(50, np.uint16)
    Wire("bf16").encode(gradient, np.arange(50, dtype=np.float32))
    for num_workers in (1, 2, 1):
        optimizer.step(
            [Contribution(w, gradient, 1.0, 0) for w in range(num_workers)], 1.0, lambda start, stop: None
        )
    assert (weights == -4.0 * torch.arange(50)).all()
    assert decoded[0] == decoded[2] == decoded[1][:1]
    assert len({*decoded[1]}) == 2


def test_bsp_does_not_depend_on_who_is_fast():
    in_turn, _, _ = train(BSP(), 3)
    skewed, _, _ = train(BSP(), 3, turns=lambda step: [2] if step % 5 else [0, 1, 2])
    assert (in_turn == skewed).all()


def test_bsp_with_more_workers_than_batches():
    weights, summary, _ = train(BSP(), 5, batch_size=400)
    np.testing.assert_allclose(weights, plain(len(TRAIN)), rtol=0, atol=1e-6)
    assert summary["empty_pushes"] == 2
    assert summary["updates"] == 2


@pytest.mark.parametrize("paradigm", [BSP(), ASP(), SSP(0), DSSP()])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_one_worker_is_plain_training_bit_for_bit(paradigm, make):
    weights, summary, _ = train(paradigm, 1, make=make, chunk_numel=10**6)
    assert (weights == plain(32, make=make)).all()
    assert summary["staleness"]["max"] == 0


def test_chunks_change_nothing():
    whole, _, _ = train(BSP(), 1, chunk_numel=10**6)
    pieces, _, _ = train(BSP(), 1, chunk_numel=7)
    assert (whole == pieces).all()


def test_learning_rate_decays_by_samples():
    schedule = Step([0.5, 1.5], 0.1)
    weights, _, _ = train(BSP(), 3, schedule=schedule)
    np.testing.assert_allclose(weights, plain(96, lr_at=schedule.factor), rtol=0, atol=1e-6)


def test_asynchronous_step_is_scaled_by_the_number_of_workers():
    """Two workers, one push each, arriving together: one step on the sum, at half the rate."""
    weights, summary, _ = train(ASP(), 2, batch_size=720, epochs=1)
    module, _ = make_model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.025, momentum=0.9, weight_decay=1e-3)
    order, data = EpochOrder(len(TRAIN), 0), Batches(TRAIN, DTYPE)
    for start, n in ((0, 720), (720, 717)):
        inputs, targets = data.batch(order.indices(0, start, n))
        LOSS(module(inputs), targets).backward()
    optimizer.step()
    expected = torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy()
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12)
    assert summary["updates"] == 1
    assert summary["pushes"] == 2


@pytest.mark.parametrize("paradigm", [ASP(), SSP(3), DSSP(3, 15), DSSP.bounded(1, 4), DSSP.paper()])
def test_every_sample_is_used_once_per_epoch_whatever_the_speeds(paradigm):
    used = []

    def spoil(batches):
        def record(epoch, start, n):
            used.append((epoch, start, n))
            return batches(epoch, start, n)

        return record

    _, summary, _ = train(paradigm, 3, turns=lambda step: [2] if step % 7 else [0, 1, 2], spoil=spoil)
    for epoch in range(2):
        positions = sorted(p for e, start, n in used if e == epoch for p in range(start, start + n))
        assert positions == list(range(len(TRAIN)))
    assert summary["samples"] == 2 * len(TRAIN)
    assert summary["discarded_pushes"] == 0


def test_parameter_groups_have_their_own_options():
    """Weights decay, biases do not, as one optimizer with two groups does it."""

    def make_two(groups):
        module = {tuple(p.shape): p for g in groups for p in g["params"]}
        biases = [p for shape, p in module.items() if len(shape) == 1]
        others = [p for shape, p in module.items() if len(shape) > 1]
        return torch.optim.SGD(
            [{"params": others}, {"params": biases, "weight_decay": 0.0}], lr=0.05, weight_decay=0.1
        )

    weights, _, _ = train(
        BSP(),
        1,
        make=lambda g: torch.optim.SGD(g, lr=0.05, weight_decay=0.1),
        groups=[{"pattern": "*.bias", "weight_decay": 0.0}],
    )
    assert (weights == plain(32, make=make_two)).all()


def test_max_updates_is_exact_and_what_is_in_flight_is_discarded():
    _, summary, server = train(
        ASP(), 3, limits=server_role.Limits(max_updates=7), turns=lambda step: [step % 3]
    )
    assert summary["updates"] == 7
    assert server.ended_by == "max_updates"
    assert summary["pushes"] == sum(w["pushes"] for w in summary["by_worker"])
    assert summary["discarded_pushes"] > 0


@pytest.mark.parametrize("paradigm", [ASP(), BSP(), DSSP()])
def test_a_skipped_step_moves_the_clock_and_nothing_else(paradigm, monkeypatch):
    def run(self, inputs, targets, lr_factor, worker):
        passed = right(self, inputs, targets, lr_factor, worker)
        return (
            replace(passed, is_finite=torch.tensor(False), is_skipped=True) if next(calls) == 10 else passed
        )

    calls, right = count(), Backward.run
    monkeypatch.setattr(Backward, "run", run)
    weights, summary, server = train(paradigm, 3)
    assert (summary["skipped_pushes"], summary["skipped_samples"]) == (1, 32)
    assert (summary["rejected_gradients"], summary["empty_pushes"], summary["discarded_pushes"]) == (0, 0, 0)
    assert summary["pushes"] == 90
    assert summary["samples"] == server.samples == 2 * len(TRAIN) - 32
    assert np.isfinite(weights).all()


def test_a_gradient_that_is_not_finite_is_refused_and_counted():
    def spoil(batches):
        calls = count()

        def record(epoch, start, n):
            inputs, targets = batches(epoch, start, n)
            return (inputs * float("nan") if next(calls) == 10 else inputs), targets

        return record

    for paradigm in (ASP(), BSP(), DSSP()):
        weights, summary, _ = train(paradigm, 3, spoil=spoil)
        assert summary["rejected_gradients"] == 1
        assert np.isfinite(weights).all()
        assert summary["pushes"] == 90
