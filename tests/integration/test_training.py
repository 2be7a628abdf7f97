"""The main job on real ranks: it learns, its folder is complete, its bounds hold, and it repeats itself."""

from __future__ import annotations

import json

import pytest
import torch
from launching import train, train_series

from hydssp.data.fashion import DEBIAN_FOLDER

pytestmark = [pytest.mark.launch, pytest.mark.timeout(900)]

SUMMARY_KEYS = [
    "status",
    "reason",
    "paradigm",
    "num_workers",
    "updates",
    "pushes",
    "samples",
    "wall_s",
    "updates_per_s",
    "pushes_per_s",
    "samples_per_s",
    "final_accuracy",
    "final_loss",
    "time_to_accuracy",
    "lead_max",
    "run_ahead_max",
    "staleness",
    "time_s_by_worker",
    "controller",
    "server",
    "rejected_gradients",
    "bytes",
]


def assert_complete(result, num_ranks=0):
    assert result.code == 0, result.err
    summary = result.summary
    assert not [key for key in SUMMARY_KEYS if key not in summary]
    assert summary["status"] == "done"
    assert set(summary["time_s_by_worker"][0]) == {"data", "pull", "compute", "push", "wait"}
    assert {"mean", "p50", "p99", "max", "histogram"} <= set(summary["staleness"])
    assert {"calls", "extension_histogram"} <= set(summary["controller"])
    assert {"busy_fraction", "apply_s"} <= set(summary["server"])
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "events.jsonl", "weights.pt"):
        assert (result.folder / name).stat().st_size > 0, name
    environment = json.loads((result.folder / "environment.json").read_text())
    ranks = [fact["rank"] for fact in environment["ranks"]]
    assert ranks == list(range(num_ranks or summary["num_workers"] + 1))
    assert sorted(p.name for p in (result.folder / "logs").iterdir()) == [f"rank_{r:04d}.log" for r in ranks]
    return summary


def weights(result):
    state = torch.load(result.folder / "weights.pt", weights_only=True)
    return torch.cat([tensor.reshape(-1).double() for tensor in state.values()])


PARADIGMS = ["bsp", "asp", "ssp", "dssp", "dssp_bounded", "dssp_paper"]
ENDS = {
    "max_updates": ["epochs=null", "max_updates=25"],
    "max_time_s": ["epochs=null", "max_time_s=2"],
    "target_accuracy": ["epochs=null", "target_accuracy=0.8"],
    "epochs": ["epochs=0.5"],
}


@pytest.fixture(scope="module")
def on_digits(tmp_path_factory):
    """Every paradigm, and every way to end."""
    learning = {p: [f"paradigm={p}", "epochs=20", "eval.targets=[0.5]"] for p in PARADIGMS}
    return train_series({**learning, **ENDS}, ranks=4, folder=tmp_path_factory.mktemp("digits"))


@pytest.mark.parametrize("paradigm", PARADIGMS)
def test_digits(on_digits, paradigm):
    result = on_digits[paradigm]
    summary = assert_complete(result)
    assert summary["final_accuracy"] >= 0.94
    assert summary["samples"] == 20 * 1437
    assert summary["pushes"] == sum(w["pushes"] for w in summary["by_worker"])
    assert 0 < summary["time_to_accuracy"]["0.5"] <= summary["wall_s"]
    assert result.out.count("run folder:") == 1  # N ranks, one voice
    for rank in range(4):
        assert f"rank {rank}" in result.out
    assert {path.name for path in result.folder.parent.iterdir()} == {*on_digits, "runs.json", "results.json"}


@pytest.mark.parametrize("transport", ["rma", "two_sided"])
def test_digits_over_a_bf16_wire_in_half_the_bytes(tmp_path, transport):
    options = ("epochs=20", "precision=bf16", "wire.push=bf16", "wire.pull=bf16", "wire.error_feedback=true")
    result = train(f"transport={transport}", *options, ranks=4, folder=tmp_path / "run")
    summary = assert_complete(result)
    assert summary["final_accuracy"] >= 0.94
    assert summary["bytes"]["pushed"] == 2 * 4810 * summary["pushes"]
    assert summary["bytes"]["pulled"] == 2 * 4810 * (summary["pushes"] + summary["pull_retries"])
    assert "computed in bf16, pushed as bf16 with error feedback, pulled as bf16" in result.out


@pytest.mark.parametrize(
    ("transport", "options", "push_bytes"),
    [
        ("rma", ["wire.compression=topk", "wire.ratio=0.1"], 8 * 481),
        ("two_sided", ["wire.compression=quantize", "wire.bits=4"], 76 * (4 + 32)),
    ],
)
def test_digits_with_compressed_pushes(tmp_path, transport, options, push_bytes):
    result = train(f"transport={transport}", "epochs=20", *options, ranks=4, folder=tmp_path / "run")
    summary = assert_complete(result)
    assert summary["final_accuracy"] >= 0.94
    assert summary["bytes"]["pushed"] == push_bytes * summary["pushes"]


@pytest.mark.skipif(
    not DEBIAN_FOLDER.is_dir(), reason="needs Fashion-MNIST: apt-get install dataset-fashion-mnist"
)
@pytest.mark.slow
@pytest.mark.once
def test_fashion_mnist_reaches_85_percent_in_two_epochs(tmp_path):
    runs = {
        p: ["data=fashion_mnist", "model=lenet", f"paradigm={p}", "epochs=2"]
        for p in ("bsp", "asp", "ssp", "dssp")
    }
    for result in train_series(runs, ranks=4, folder=tmp_path, timeout_s=880).values():
        assert assert_complete(result)["final_accuracy"] >= 0.85


def test_bsp_repeats_itself_and_equals_one_worker_with_a_larger_batch(tmp_path):
    options = ("paradigm=bsp", "epochs=3", "dtype=float64")
    several = {"once": options[:2], "again": options[:2], "three": options}
    runs = train_series(several, ranks=4, folder=tmp_path)
    assert (weights(runs["once"]) == weights(runs["again"])).all()
    three = runs["three"]
    one = train(*options, "batch_size=96", ranks=2, folder=tmp_path / "one")
    alone = train(*options, "transport=local", "num_workers=3", folder=tmp_path / "alone")
    assert_complete(three)
    assert_complete(alone, num_ranks=1)
    torch.testing.assert_close(weights(three), weights(one), rtol=0, atol=1e-6)
    assert (weights(three) == weights(alone)).all()  # the transport changes nothing


def bounds(paradigm, num_workers):
    """Largest staleness and lead after a push (algorithm bounds for P workers; None: none)."""
    others = num_workers - 1
    return {
        "bsp": (0, 1),
        "ssp": (others * (2 * 3 + 1), 4),
        "dssp": (others * (15 + 1), None),
        "dssp_bounded": (others * (2 * 15 + 1), 16),
    }[paradigm]


BOUNDED = ["bsp", "ssp", "dssp", "dssp_bounded"]


@pytest.fixture(scope="module")
def with_stragglers(tmp_path_factory):
    """Random pauses under every paradigm with a bound, and one long stall."""
    pauses = [
        "straggler=random",
        "straggler.iteration_s=0.002",
        "straggler.factor=60",
        "straggler.probability=0.05",
    ]
    stall = [
        "straggler=stall",
        "straggler.at_iteration=20",
        "straggler.duration_s=3",
        "epochs=null",
        "max_time_s=6",
    ]
    runs = {p: [f"paradigm={p}", *pauses, "epochs=20"] for p in BOUNDED}
    runs.update({f"{p}_stall": [f"paradigm={p}", *stall] for p in ("asp", "dssp")})
    return train_series(runs, ranks=4, folder=tmp_path_factory.mktemp("stragglers"))


@pytest.mark.parametrize("paradigm", BOUNDED)
def test_bounds_hold_under_random_pauses(with_stragglers, paradigm):
    result = with_stragglers[paradigm]
    summary = assert_complete(result)
    staleness, lead = bounds(paradigm, 3)
    assert summary["staleness"]["max"] <= staleness
    assert lead is None or summary["lead_max"] <= lead
    if paradigm == "dssp":
        assert summary["run_ahead_max"] <= 16
    releases = result.events("release")
    assert len(releases) == summary["pushes"]  # every push was granted, and no grant is left over
    waited = [e for e in releases if e["at"] > e["held_since"]]
    assert waited
    assert all(e["reason"].startswith(f"worker {e['w']} goes on") for e in waited)
    assert all(e["reason"].startswith(f"worker {e['w']} held by the") for e in result.events("hold"))


def test_a_stalled_worker_makes_less_stale_gradients_under_dssp(with_stragglers):
    asp, dssp = (assert_complete(with_stragglers[f"{p}_stall"])["staleness"]["max"] for p in ("asp", "dssp"))
    assert dssp <= asp / 2


@pytest.mark.parametrize("reason", ENDS)
def test_the_first_end_condition_ends_the_run_and_is_named(on_digits, reason):
    summary = assert_complete(on_digits[reason])
    assert reason in summary["reason"]
    if reason == "max_updates":
        assert summary["updates"] == 25
    if reason == "epochs":
        assert summary["samples"] == 719  # half of 1,437, rounded up
    if reason == "target_accuracy":
        assert summary["time_to_accuracy"]["0.8"] is not None


@pytest.mark.once
def test_adamw_with_groups_and_schedule(tmp_path):
    result = train(
        "optimizer=adamw",
        'parameter_groups=[{pattern:"*.bias",weight_decay:0}]',
        "schedule=step",
        "schedule.milestones=[10]",
        "epochs=15",
        "async_weight=one",
        ranks=3,
        folder=tmp_path / "run",
    )
    assert assert_complete(result)["final_accuracy"] >= 0.9
    rates = [event["lr"] for event in result.events("update")]
    assert rates[0] == pytest.approx(1e-3)
    assert rates[-1] == pytest.approx(1e-4)


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    not DEBIAN_FOLDER.is_dir(), reason="needs Fashion-MNIST: apt-get install dataset-fashion-mnist"
)
def test_gap_aware_learns_where_plain_momentum_stays_at_chance(tmp_path):
    result = train(
        "data=fashion_mnist",
        "model=lenet",
        "paradigm=asp",
        "mitigation=gap_aware",
        "async_weight=one",
        "optimizer.lr=0.02",
        "epochs=4",
        "target_accuracy=0.85",
        "eval.every_epochs=0.5",
        ranks=7,
        folder=tmp_path / "run",
        timeout_s=1100,
    )
    summary = assert_complete(result)
    assert "target_accuracy" in summary["reason"]
    assert summary["penalty"]["mean"] > 1.5
    assert summary["gap"]["max"] > 0
