"""What long and uneven runs need: accounting, batch norm, evaluation, stalls, several runs in a row."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from launching import mpirun, train, train_series

from hydssp import config as configuration
from hydssp import evaluation, task

pytestmark = [pytest.mark.launch, pytest.mark.timeout(600)]

STRAGGLERS = {
    "none": [],
    "constant": ["straggler.factors=[1,1,4]"],
    "random": ["straggler.probability=0.2", "straggler.factor=10"],
    "rotating": ["straggler.period=5"],
    "stall": ["straggler.at_iteration=3", "straggler.duration_s=1"],
}


def used(result):
    """Positions of all batches that were granted, by epoch."""
    positions = {}
    for event in result.events("release"):
        positions.setdefault(event["epoch"], []).extend(range(event["start"], event["start"] + event["n"]))
    return {epoch: sorted(p) for epoch, p in positions.items()}


def test_every_sample_once_per_epoch_under_every_straggler(tmp_path):
    runs = {}
    for straggler, options in STRAGGLERS.items():
        pace = [] if straggler == "none" else ["straggler.iteration_s=0.005"]
        paradigm = "bsp" if straggler == "rotating" else "dssp"
        runs[straggler] = [
            f"straggler={straggler}",
            *options,
            *pace,
            "batch_size=50",
            "epochs=2",
            f"paradigm={paradigm}",
        ]
    for straggler, result in train_series(runs, ranks=4, folder=tmp_path).items():
        assert result.code == 0, (straggler, result.err)
        assert used(result) == {epoch: list(range(1437)) for epoch in range(2)}, straggler
        assert result.summary["samples"] == 2 * 1437, straggler


def test_more_workers_than_batches(tmp_path):
    runs = {p: ["batch_size=700", "epochs=1", f"paradigm={p}"] for p in ("bsp", "asp")}
    for result in train_series(runs, ranks=5, folder=tmp_path).values():
        assert result.code == 0, result.err
        assert result.err.count("WARNING: batch_size=700: 4 workers share 1,437 training samples") == 1
        assert used(result) == {0: list(range(1437))}
        assert result.summary["samples"] == 1437


def test_shards_and_dropped_batches(tmp_path):
    result = train(
        "data.sharding=static", "data.drop_last=true", "batch_size=100", "epochs=2", "paradigm=asp",
        "straggler=constant", "straggler.factors=[1,3]", "straggler.iteration_s=0.01",
        ranks=3, folder=tmp_path / "run",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert used(result) == {epoch: list(range(1400)) for epoch in range(2)}
    shards = {(e["w"], e["start"] // 700) for e in result.events("release")}
    assert shards == {(0, 0), (1, 1)}
    finished = [e for e in result.events("finish") if 0 in e["w"]]
    (start,) = result.events("start")
    # The fast one is through long before the slow one.
    assert finished[0]["t"] - start["t"] < 0.7 * result.summary["wall_s"]


RESNET = ["model=resnet", "data=synthetic"]
CIFAR_SHAPED = [
    *RESNET,
    "model.depth=20",
    "data.shape=[3,32,32]",
    "data.num_samples=1000",
    "data.num_test=300",
    "data.separation=32",
    "epochs=6",
    "batch_size=20",
]
SMALLER = [
    *RESNET,
    "model.depth=8",
    "data.shape=[3,8,8]",
    "data.num_samples=300",
    "data.num_test=100",
    "epochs=2",
]
LOADED = ["paradigm=bsp", "epochs=2", "data.augment={pad: 1, flip: true}", "eval.where=after"]


@pytest.fixture(scope="module")
def on_three_ranks(tmp_path_factory):
    """What another MPI would not make different."""
    runs = {
        "no_loaders": [*LOADED, "data.loader_workers=0"],
        "loaders": [*LOADED, "data.loader_workers=2"],
        "asp": [*CIFAR_SHAPED, "paradigm=asp"],
        "dssp": [*CIFAR_SHAPED, "paradigm=dssp"],
        "worker0": [*SMALLER, "buffers=worker0"],
        "recalibrate": [*SMALLER, "buffers=recalibrate"],
        "after": ["epochs=4", "eval.where=after", "eval.targets=[0.3]"],
        "clipped": ["optimizer.lr=1", "clip.norm=0.01", "clip.value=0.005", "epochs=3"],
        "tensorboard": ["epochs=3", "progress_s=0.2", "tensorboard=null", "events=off"],
        "usage": ["epochs=20", "progress_s=0.2"],
        "compiled": ["paradigm=asp", "mitigation=gap_aware", "mitigation.compiled=true", "epochs=10"],
    }
    return train_series(runs, ranks=3, folder=tmp_path_factory.mktemp("three"), timeout_s=560)


@pytest.mark.once
def test_loader_processes_change_nothing(on_three_ranks):
    results = [on_three_ranks[name] for name in ("no_loaders", "loaders")]
    assert [r.code for r in results] == [0, 0], results[1].err
    first, second = (torch.load(r.folder / "weights.pt", weights_only=True) for r in results)
    assert all((first[name] == second[name]).all() for name in first)


@pytest.mark.parametrize("paradigm", ["asp", "dssp"])
@pytest.mark.once
def test_batch_norm_learns_and_the_saved_file_gives_the_reported_number(on_three_ranks, paradigm):
    result = on_three_ranks[paradigm]
    assert result.code == 0, result.err
    assert result.summary["final_accuracy"] > 0.5
    assert evaluated_again(result) == result.summary["final_accuracy"]


@pytest.mark.parametrize("policy", ["worker0", "recalibrate"])
@pytest.mark.once
def test_every_buffers_policy_can_be_reproduced(on_three_ranks, policy):
    result = on_three_ranks[policy]
    assert result.code == 0, result.err
    assert evaluated_again(result) == result.summary["final_accuracy"]


def evaluated_again(result):
    """The accuracy from configuration and weights.pt alone, in this process."""
    from omegaconf import OmegaConf

    config = OmegaConf.to_container(OmegaConf.load(result.folder / "config.yaml"))
    configuration.check(config)
    again = task.make_evaluation_task(config)
    state = torch.load(result.folder / "weights.pt", weights_only=True)
    again.model.module.load_state_dict(state)
    accuracy, loss = evaluation.evaluate(again)
    assert loss == pytest.approx(result.summary["final_loss"], rel=1e-5)
    return accuracy


@pytest.mark.once
def test_evaluation_after_training(on_three_ranks):
    result = on_three_ranks["after"]
    assert result.code == 0, result.err
    records = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [r for r in records if r["kind"] == "evaluation"]
    assert len(evaluations) in (4, 5)
    assert [e["version"] for e in evaluations] == sorted({e["version"] for e in evaluations})
    (start,) = result.events("start")
    ended_at = start["t"] + result.summary["wall_s"]
    assert all(e["pinned_at"] <= ended_at <= e["t"] for e in evaluations)
    assert result.summary["time_to_accuracy"]["0.3"] <= result.summary["wall_s"]
    assert not (result.folder / "snapshots").exists()


def test_a_worker_that_hangs_ends_the_job_and_is_named(tmp_path):
    result = train(
        "loss._target_=faults.FailingLoss", "+loss.how=hang", "+loss.rank=2", "epochs=null", "max_time_s=100",
        "stall_limit_s=3", ranks=4, folder=tmp_path / "run", timeout_s=90,
    )  # fmt: skip
    assert result.code == 1
    assert result.seconds < 80
    assert "stall_limit_s=3" in result.err
    assert "worker 1 (rank 2 on" in result.err
    assert "worker 0 (rank 1" not in result.err.split("stall_limit_s=3")[1].split("If an iteration")[0]
    assert result.summary["status"] == "failed"
    assert "rank 2" in result.summary["reason"]


def test_a_rank_that_hangs_while_the_job_starts_ends_it_and_is_named(tmp_path):
    result = train(
        "model._target_=faults.hanging_model", "stall_limit_s=4", ranks=4, folder=tmp_path / "run", timeout_s=90
    )  # fmt: skip
    assert result.code == 1
    assert result.seconds < 60
    assert "nothing from rank 2 on" in result.err
    assert "stall_limit_s=4" in result.err
    assert "Traceback" not in result.err
    assert not result.folder.exists()


@pytest.mark.once
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_mitigation_learns(on_three_ranks):
    result = on_three_ranks["compiled"]
    assert result.code == 0, result.err
    assert result.summary["final_accuracy"] > 0.8
    assert result.summary["penalty"]["max"] > 1


@pytest.mark.once
def test_nonfinite_gradients_can_end_the_job(tmp_path):
    result = train("optimizer.lr=1e30", "epochs=50", "nonfinite=abort", ranks=3, folder=tmp_path / "run")
    assert result.code == 1
    assert "not finite" in result.err
    assert "optimizer.lr" in result.err


@pytest.mark.once
def test_clipping_keeps_a_wild_rate_finite(on_three_ranks):
    result = on_three_ranks["clipped"]
    assert result.code == 0, result.err
    assert result.summary["rejected_gradients"] == 0
    assert result.summary["final_accuracy"] > 0.5


@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.once), 3])
def test_several_runs_in_one_start(tmp_path, ranks):
    """Hydra's multirun: one folder per item, each with a clean state, on all ranks."""
    folder = tmp_path / "runs"
    local = [] if ranks else ["transport=local", "num_workers=2"]
    result = train(
        "--multirun", "paradigm=ssp,bsp", "seed=1", "epochs=2", f"runs_dir={folder}",
        f"run_dir={folder}/${{paradigm.name}}_${{seed}}", *local, ranks=ranks, folder=tmp_path / "unused",
    )  # fmt: skip
    assert result.code == 0, result.err
    names = ["bsp_1", "ssp_1"]
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == names
    for name in names:
        assert json.loads((folder / name / "summary.json").read_text())["status"] == "done"
    alone = train("paradigm=bsp", "seed=1", "epochs=2", *local, ranks=ranks, folder=tmp_path / "alone")
    in_row, fresh = (
        torch.load(p / "weights.pt", weights_only=True) for p in (folder / "bsp_1", alone.folder)
    )
    assert all((in_row[k] == fresh[k]).all() for k in fresh)


def test_several_runs_under_a_launcher_that_is_not_known(tmp_path):
    """Every rank then reads the command line, and learns from MPI alone that it is not rank 0."""
    folder = tmp_path / "runs"
    if "--oversubscribe" not in mpirun():
        pytest.skip("only Open MPI's variables can be hidden: MPICH itself reads those that we read")
    hide = ["env", "-uOMPI_COMM_WORLD_RANK", "-uOMPI_COMM_WORLD_SIZE"]
    result = train(
        "--multirun", "seed=0,1", "epochs=1", f"runs_dir={folder}", f"run_dir={folder}/${{seed}}",
        ranks=3, folder=tmp_path / "unused", wrapper=hide, timeout_s=90,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert result.out.count("Run folder:") == 2


def test_a_mistake_in_one_of_several_runs_does_not_stop_the_others(tmp_path):
    folder = tmp_path / "runs"
    result = train(
        "--multirun", "batch_size=0,32", "epochs=1", f"runs_dir={folder}", f"run_dir={folder}/${{batch_size}}",
        ranks=3, folder=tmp_path / "unused",
    )  # fmt: skip
    assert result.code == 2
    assert "batch_size=0" in result.err
    assert (folder / "32" / "summary.json").exists()


@pytest.mark.once
def test_tensorboard_files_come_from_one_writer_and_events_can_be_left_out(on_three_ranks):
    result = on_three_ranks["tensorboard"]
    assert result.code == 0, result.err
    assert not (result.folder / "events.jsonl").exists()
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    (file,) = result.folder.glob("events.out.tfevents.*")
    assert file.stat().st_size > 500


@pytest.mark.once
def test_every_rank_reports_memory_and_processor_time(on_three_ranks):
    result = on_three_ranks["usage"]
    records = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    last = [r for r in records if r["kind"] == "progress"][-1]
    assert len(last["memory_bytes"]) == len(last["cpu_s"]) == 2
    assert min(last["memory_bytes"]) > 50e6
    assert last["server_memory_bytes"] > 50e6
    assert min(last["cpu_s"]) > 0
