"""The command ``python -m hydssp.simulate``, in this process and from the outside."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hydra import compose, initialize_config_module

from hydssp import config as configuration
from hydssp import simulate


def command(monkeypatch, capsys, *overrides):
    """Run the command in this process; returns exit code, output and error."""
    monkeypatch.setattr(sys, "argv", ["simulate", *overrides])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    code = simulate.main()
    said = capsys.readouterr()
    return code, said.out, said.err


def weights(folder):
    return torch.load(folder / "weights.pt", weights_only=True)


def are_equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_its_configuration_is_that_of_training_and_more():
    configuration.register()
    with initialize_config_module("hydssp.conf", version_base="1.3"):
        train = configuration.to_plain(compose("train"))
        ours = configuration.to_plain(compose("simulate"))
    assert {key: ours[key] for key in train} == {**train, "num_workers": 4}
    assert set(ours) - set(train) == {"cluster", "simulate", "replay", "advise"}


def test_clocks_alone_need_no_torch(tmp_path):
    code = (
        "import sys; sys.argv[1:] = ['epochs=0.01', 'run_dir=run']\n"
        "from hydssp import simulate; code = simulate.main()\n"
        "print(code, {'torch', 'mpi4py'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "0 set()"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["samples"] == 500


def test_a_recorded_run_replays_and_answers_what_if(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    cluster = "cluster.factors=[1,1,1,2.5]"
    code, _, err = command(monkeypatch, capsys, "paradigm=bsp", cluster, "epochs=1", f"run_dir={run}")
    assert (code, err) == (0, "")
    code, out, _ = command(monkeypatch, capsys, f"replay={run}")
    assert code == 0
    assert out.endswith("every one the same\n")
    code, out, _ = command(monkeypatch, capsys, f"replay={run}", "paradigm=ssp", "paradigm.s=4")
    assert code == 0
    recorded, again, other = [line.split() for line in out.splitlines()[3:6]]
    assert float(again[0]) == pytest.approx(float(recorded[0]), rel=0.02)
    assert (recorded[2], float(other[2]) > 0.5) == ("0.00", True)
    code, out, _ = command(monkeypatch, capsys, f"advise={run}")
    assert code == 0
    assert "Recommended: paradigm=dssp " in out
    assert "One server can take" in out


def test_measured_times_make_a_cluster(tmp_path, monkeypatch, capsys):
    run, again = tmp_path / "run", tmp_path / "again"
    options = ("paradigm=asp", "epochs=0.2", "num_workers=3")
    command(monkeypatch, capsys, *options, "cluster=machines", f"run_dir={run}")
    measured = ("cluster=measured", f"cluster.run={run}")
    assert command(monkeypatch, capsys, *options, *measured, f"run_dir={again}")[0] == 0
    rates = [json.loads((folder / "summary.json").read_text())["pushes_per_s"] for folder in (run, again)]
    assert rates[1] == pytest.approx(rates[0], rel=0.02)
    code, _, err = command(monkeypatch, capsys, "num_workers=4", *measured)
    assert (code, "had 3 workers" in err) == (2, True)


def test_a_cluster_can_be_asked_for_advice_before_anything_ran(monkeypatch, capsys):
    code, out, _ = command(monkeypatch, capsys, "advise=cluster", "cluster.cv=0.01", "max_time_s=20")
    assert code == 0
    assert "nothing beats BSP" in out


def test_a_replay_that_differs_says_so(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    command(monkeypatch, capsys, "paradigm=ssp", "epochs=0.1", f"run_dir={run}")
    lines = (run / "events.jsonl").read_text().splitlines()
    release = next(number for number, line in enumerate(lines) if '"e":"release"' in line and number > 50)
    lines[release] = lines[release].replace('"cause":"lead"', '"cause":"extension"')
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    code, out, _ = command(monkeypatch, capsys, f"replay={run}")
    assert code == 1
    assert "1 difference" in out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["num_workers=3", "cluster.factors=[1,2]"], "2 factors for 3 workers"),
        (["cluster.iteration_s=-1"], "cluster.iteration_s=-1"),
        (["cluster=gama"], "cluster=gama: allowed is constant, gamma, machines"),
        (["simulate.group_size=0"], "simulate.group_size=0"),
        (["simulate.network.bandwidth=0"], "bandwidth=0"),
        (["simulate.crashes=[{worker:9,at_iteration:1}]"], "worker=9"),
        (["simulate.crashes=[3]"], "simulate.crashes[0]=3"),
        (["simulate.crashes=[{worker:2}]"], "at_iteration"),
        (["replay=run", "num_workers=3"], "leave num_workers out"),
        (["replay=/nowhere"], "replay=/nowhere: not a run folder"),
        (["replay=a", "advise=b"], "allowed is one of the two"),
        (["target_accuracy=0.9"], "simulate.train=true"),
        (["simulate.trains=true"], "there is no such key (did you mean train?)"),
    ],
)
def test_a_mistake_is_one_message(tmp_path, monkeypatch, capsys, overrides, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = command(monkeypatch, capsys, *overrides)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("hydssp:") == 1
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_a_recorded_order_is_not_for_simulations(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    command(monkeypatch, capsys, "epochs=0.01", f"run_dir={run}")
    for train in ("false", "true"):
        options = ("paradigm=recorded", f"paradigm.run={run}", f"simulate.train={train}")
        code, _, err = command(monkeypatch, capsys, *options, f"run_dir={tmp_path / 'again'}")
        assert (code, "forced on real ranks" in err) == (2, True)


def test_a_log_that_is_cut_off_is_told_so(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    command(monkeypatch, capsys, "paradigm=asp", "epochs=0.5", f"run_dir={run}")
    text = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text(text[: len(text) // 2])
    for options in ((), ("paradigm=ssp",)):
        code, out, _ = command(monkeypatch, capsys, f"replay={run}", *options)
        assert (code, "its log is cut off" in out, "as recorded" in out) == (0, True, False)
    assert "its log is cut off" in command(monkeypatch, capsys, f"advise={run}")[1]
    (run / "events.jsonl").write_text("")
    code, _, err = command(monkeypatch, capsys, f"replay={run}")
    assert (code, "it is empty" in err) == (2, True)


def test_an_interrupted_simulation_ends_in_order(tmp_path):
    options = ["epochs=1000", "num_workers=64", "events=off", "run_dir=run"]
    code = (
        "import os, signal, sys, threading, time\n"
        f"sys.argv[1:] = {options}\n"
        "from hydssp import simulate\n"
        "def interrupt():\n"
        "    while not os.path.exists('run/summary.json'): time.sleep(0.05)\n"  # it has begun
        "    time.sleep(1)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt, daemon=True).start()\n"
        "sys.exit(simulate.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"


def test_several_processes_are_refused(monkeypatch, capsys):
    for rank, said in (("0", "a simulation runs in one"), ("1", "")):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
        code, _, err = command(monkeypatch, capsys)
        assert code == 2
        assert said in err


class TestTraining:
    def test_the_same_seed_gives_the_same_weights(self, tmp_path, monkeypatch, capsys):
        def train(name, *overrides):
            options = (
                "simulate.train=true",
                "num_workers=5",
                "paradigm=dssp",
                "epochs=2",
                "cluster=machines",
            )
            folder = tmp_path / name
            assert command(monkeypatch, capsys, *options, *overrides, f"run_dir={folder}")[0] == 0
            return weights(folder)

        first = train("first")
        assert are_equal(first, train("again"))
        assert not are_equal(first, train("other", "seed=1"))

    @pytest.mark.parametrize(
        "extra",
        [
            (),
            ("wire.pull=fp16", "wire.push=bf16", "wire.error_feedback=true", "local_steps=2"),
            ("wire.compression=topk", "wire.ratio=0.1"),
            ("wire.compression=quantize", "wire.bits=4"),
        ],
        ids=["plain", "short", "topk", "quantized"],
    )
    def test_a_round_in_virtual_time_is_a_round_of_the_real_server_and_workers(
        self, tmp_path, monkeypatch, capsys, extra
    ):
        options = ("paradigm=bsp", "num_workers=3", "epochs=2", *extra)
        folder = tmp_path / "simulated"
        assert command(monkeypatch, capsys, "simulate.train=true", *options, f"run_dir={folder}")[0] == 0
        real = [sys.executable, "-m", "hydssp.train", "transport=local", *options, "threads=1"]
        subprocess.run([*real, "run_dir=real"], cwd=tmp_path, capture_output=True, check=True, timeout=200)
        assert are_equal(weights(folder), weights(tmp_path / "real"))

    def test_what_is_recorded_is_true_of_the_training(self, tmp_path, monkeypatch, capsys):
        folder = tmp_path / "run"
        options = ("simulate.train=true", "num_workers=4", "paradigm=asp", "epochs=12", "eval.targets=[0.5]")
        assert command(monkeypatch, capsys, *options, f"run_dir={folder}")[0] == 0
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["final_accuracy"] > 0.9
        assert 0 < summary["time_to_accuracy"]["0.5"] < summary["wall_s"]
        assert summary["samples"] == 12 * 1437
        code, out, _ = command(monkeypatch, capsys, f"replay={folder}")
        assert (code, "every one the same" in out) == (0, True)

    def test_batch_norm_keeps_each_workers_statistics(self, tmp_path, monkeypatch, capsys):
        folder = tmp_path / "run"
        options = (
            "simulate.train=true", "num_workers=3", "paradigm=asp", "model=resnet", "model.depth=8", "data=synthetic",
            "data.shape=[3,8,8]", "data.num_samples=192", "data.num_test=64", "epochs=1",
        )  # fmt: skip
        assert command(monkeypatch, capsys, *options, f"run_dir={folder}")[0] == 0
        # Six pushes of 3 workers: each has seen 2 of them, as the average of the counters says.
        counters = [value for name, value in weights(folder).items() if name.endswith("num_batches_tracked")]
        assert counters
        assert all(counter == 2 for counter in counters)

    def test_few_versions_are_kept(self, tmp_path):
        import numpy as np

        from hydssp.coordination import ASP, Coordinator, RangeDealer
        from hydssp.observe.recorder import Recorder
        from hydssp.server import Limits, Server, StepRule
        from hydssp.simulation.cluster import Cluster
        from hydssp.simulation.fabric import Fabric, clock_of
        from hydssp.simulation.times import Gamma
        from hydssp.update.schedule import Constant, LrClock
        from hydssp.update.step import ChunkedOptimizer

        class Ones:
            """A gradient of ones, whatever the weights."""

            def compute(self, iteration):
                seen.append(float(fabric.weights(iteration.version)[0]) + iteration.version)
                return clock_of(iteration), np.ones(3, np.float32), None

        seen = []
        fabric = Fabric(Cluster(8, Gamma(1.0, 0.3)), Ones(), 3)
        recorder = Recorder(None, paradigm="asp")
        recorder.started(0.0, 8)
        server = Server(
            transport=fabric,
            coordinator=Coordinator(ASP(), 8),
            dealer=RangeDealer(500, 1, 1),
            optimizer=ChunkedOptimizer(
                torch.zeros(3), lambda groups: torch.optim.SGD(groups, lr=1.0), [(0, 3, {})], 2
            ),
            step_rule=StepRule(
                Constant(), LrClock.samples, 1.0, is_mean=False, batch_size=1, num_samples=500
            ),
            evaluator=None,
            evaluate_every=float("inf"),
            recorder=recorder,
            limits=Limits(),
        )
        fabric.run(server)
        # Each version v has the weights -v, so that every worker has read what it says that it has read.
        assert seen == [0.0] * 500
        assert 2 <= fabric.versions_kept_max <= 9
