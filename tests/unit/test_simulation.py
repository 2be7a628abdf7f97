"""The cluster in virtual time: its times, its order of events, and what is read from a recorded one."""

from __future__ import annotations

import itertools
import json
import math
import statistics

import pytest

from hydssp.coordination import ASP, BSP, DSSP, SSP, Coordinator, RangeDealer
from hydssp.errors import TrainingError, UserError
from hydssp.observe.recorder import Recorder
from hydssp.observe.run_folder import RunFolder
from hydssp.server import Limits
from hydssp.simulation.advice import advise, saturation
from hydssp.simulation.clocks import run_clocks
from hydssp.simulation.cluster import Cluster, Crash, Network, ServerCosts
from hydssp.simulation.prediction import Figures, cluster_of, predict
from hydssp.simulation.recording import read_recording
from hydssp.simulation.replay import replay
from hydssp.simulation.times import Gamma, Grouped, Machines, Measured
from hydssp.straggler import ConstantFactors

PARADIGMS = {
    "bsp": BSP(),
    "asp": ASP(),
    "ssp": SSP(2),
    "dssp": DSSP(1, 4),
    "dssp_bounded": DSSP.bounded(1, 4),
    "dssp_paper": DSSP.paper(1, 4),
}


def first(times, worker, count, seed=0):
    return list(itertools.islice(times.stream(worker, seed), count))


def simulate(cluster, paradigm, *, pushes=None, limits=None, folder=None, label="test"):
    """Run clocks; returns the summary."""
    limits = limits or Limits()
    coordinator = Coordinator(paradigm, cluster.num_workers)
    recorder = Recorder(folder, paradigm=label)
    recorder.started(0.0, cluster.num_workers)
    dealer = RangeDealer(pushes or 1 << 40, 1, 1, rounds=paradigm.is_synchronous)
    try:
        ended = run_clocks(cluster, coordinator, dealer, limits, recorder)
        return recorder.write_summary(ended.at, "done", ended.by)
    finally:
        recorder.close()


class TestTimes:
    def test_gamma_has_the_mean_and_the_variation_that_were_asked_for(self):
        times = first(Gamma(2.0, 0.3, [1, 5]), 1, 20_000)
        assert statistics.fmean(times) == pytest.approx(10, rel=0.02)
        assert statistics.stdev(times) / statistics.fmean(times) == pytest.approx(0.3, rel=0.05)
        assert first(Gamma(2.0, 0.0), 0, 3) == [2.0, 2.0, 2.0]

    def test_a_worker_sees_the_same_times_whoever_else_asks(self):
        times = Gamma(1.0, 0.5)
        alone = first(times, 3, 1000)
        streams = [times.stream(worker, 0) for worker in range(4)]
        assert [[next(s) for s in streams][3] for _ in range(1000)] == alone
        assert first(times, 3, 10, seed=1) != alone[:10]
        assert first(times, 2, 10) != alone[:10]

    def test_machines_differ_as_much_as_was_asked_for(self):
        times = Machines(1.0, machine_cv=0.6, iteration_cv=0.1)
        means = [times.mean_s(worker, 0) for worker in range(3000)]
        assert statistics.fmean(means) == pytest.approx(1, rel=0.05)
        assert statistics.stdev(means) == pytest.approx(0.6, rel=0.08)
        assert statistics.fmean(first(times, 7, 5000)) == pytest.approx(means[7], rel=0.02)

    def test_a_group_takes_its_slowest_members_time(self):
        members = Measured([[1.0, 5.0], [2.0, 3.0], [9.0], [0.5]])
        grouped = Grouped(members, 2, allreduce_s=0.25)
        grouped.check(2)
        assert first(grouped, 0, 3) == [2.25, 5.25, 2.25]
        assert first(grouped, 1, 2) == [9.25, 9.25]
        with pytest.raises(UserError, match="4 workers"):
            grouped.check(3)

    @pytest.mark.parametrize(
        ("build", "words"),
        [
            (lambda: Gamma(-1.0), "cluster.iteration_s=-1.0"),
            (lambda: Gamma(cv=math.nan), "cluster.cv"),
            (lambda: Cluster(3, Gamma(factors=[1, 2])), "2 factors for 3 workers"),
            (lambda: Cluster(2, Gamma(), crashes=(Crash(2, 0),)), "worker=2"),
            (lambda: Crash(0, -1), "at_iteration=-1"),
            (lambda: Network(bandwidth=0), "bandwidth=0"),
            (lambda: ServerCosts(apply_s=-1), "apply_s=-1"),
            (lambda: Measured([[1.0], []]), "worker 1"),
        ],
    )
    def test_what_has_no_meaning_is_refused(self, build, words):
        with pytest.raises(UserError, match=words):
            build()


class TestOrderOfEvents:
    def test_pushes_come_when_the_iterations_end(self, tmp_path):
        folder = new_folder(tmp_path)
        cluster = Cluster(2, Measured([[1.0], [2.5]]), network=Network(0.125, 0.25, 0.5, 1.0))
        simulate(cluster, ASP(), limits=Limits(max_time_s=10), folder=folder)
        pushes = [e for e in events(folder) if e["e"] == "push"]
        # grant 0.25, pull 0.5, computing, push 1, clock message 0.125
        assert [(p["w"], p["t"]) for p in pushes[:3]] == [(0, 2.875), (1, 4.375), (0, 5.75)]
        first_push = pushes[0]
        assert (first_push["granted"], first_push["at"]) == (0.25, 2.75)
        assert (first_push["pull"], first_push["compute"], first_push["push"]) == (0.5, 1.0, 1.0)

    def test_staleness_counts_the_updates_in_between(self):
        summary = simulate(Cluster(2, Measured([[1.0], [3.3001]])), ASP(), pushes=400)
        # Worker 1's gradient is 3 or 4 updates old, worker 0's 0 or 1.
        assert summary["by_worker"][1]["staleness_mean"] == pytest.approx(3.3, abs=0.1)
        assert summary["by_worker"][0]["staleness_mean"] == pytest.approx(1 / 3.3, abs=0.05)

    def test_a_busy_server_is_the_limit(self):
        cluster = Cluster(50, Gamma(0.01, 0.1), server=ServerCosts(handle_s=0.001, apply_s=0.003))
        summary = simulate(cluster, ASP(), limits=Limits(max_time_s=5))
        assert summary["updates_per_s"] < 1 / 0.003
        assert summary["server"]["busy_fraction"] > 0.98
        idle = simulate(Cluster(50, Gamma(0.01, 0.1)), ASP(), limits=Limits(max_time_s=1))
        assert idle["pushes_per_s"] == pytest.approx(5000, rel=0.03)

    def test_pushes_that_wait_for_the_server_are_handled_together(self, tmp_path):
        folder = new_folder(tmp_path)
        cluster = Cluster(3, Measured([[0.95], [1.1], [1.2]]), server=ServerCosts(poll_s=0.5))
        simulate(cluster, ASP(), limits=Limits(max_time_s=1.6), folder=folder)
        pushes = [e for e in events(folder) if e["e"] == "push"]
        # Pauses of 1/32, 1/16, 1/8, 1/4 and then 1/2 end at 0.46875, 0.96875; after a look they are short again.
        assert [(p["w"], p["t"]) for p in pushes[:3]] == [(0, 0.96875), (1, 1.1875), (2, 1.21875)]
        busy = Cluster(3, Measured([[0.95], [1.1], [1.2]]), server=ServerCosts(handle_s=0.4, poll_s=0.5))
        folder = new_folder(tmp_path / "busy")
        simulate(busy, ASP(), limits=Limits(max_time_s=3), folder=folder)
        pushes = [e for e in events(folder) if e["e"] == "push"]
        assert len({p["g"] for p in pushes}) < len(pushes)

    def test_transfers_share_the_servers_link(self, tmp_path):
        folder = new_folder(tmp_path)
        cluster = Cluster(3, Measured([[1.0]] * 3), network=Network(bandwidth=10.0), model_bytes=5)
        simulate(cluster, BSP(), pushes=3, folder=folder)
        pushes = [e for e in events(folder) if e["e"] == "push"]
        # Three pulls of half a second one after the other; the pushes find the link free.
        assert [p["pull"] for p in pushes] == [0.5, 1.0, 1.5]
        assert [p["t"] for p in pushes] == [2.0, 2.5, 3.0]

    def test_a_slow_pull_reads_the_newest_version_when_its_own_is_overwritten(self, tmp_path):
        folder = new_folder(tmp_path)
        cluster = Cluster(
            2, Measured([[0.01], [0.01]]), network=Network(bandwidth=1.0), model_bytes=1, slots=4
        )
        simulate(cluster, ASP(), pushes=40, folder=folder)
        for push in (e for e in events(folder) if e["e"] == "push"):
            assert push["v"] >= 0
        many = Cluster(9, Measured([[0.01]] * 9), network=Network(bandwidth=1.0), model_bytes=1, slots=4)
        summary = simulate(many, ASP(), pushes=90)
        assert summary["staleness"]["max"] <= 9

    def test_straggler_pads_as_on_real_ranks(self):
        cluster = Cluster(3, Gamma(0.001, 0.0), straggler=ConstantFactors((1, 1, 2.5), 0.05))
        summary = simulate(cluster, ASP(), limits=Limits(max_time_s=10.01))
        assert [w["updates"] for w in summary["by_worker"]] == [200, 200, 80]

    def test_a_crash_is_survived_once_it_is_detected(self):
        cluster = Cluster(3, Gamma(1.0, 0.0), crashes=(Crash(1, 5, detected_after_s=20.0),))
        summary = simulate(cluster, BSP(), limits=Limits(max_time_s=100.5))
        assert [w["updates"] for w in summary["by_worker"]] == [81, 5, 81]
        assert summary["failures"][0]["worker"] == 1
        assert summary["failures"][0]["t"] == pytest.approx(25)

    def test_a_crash_that_nobody_notices_ends_at_the_stall_limit(self, tmp_path):
        cluster = Cluster(2, Gamma(1.0, 0.0), crashes=(Crash(1, 5, detected_after_s=1e6),))
        folder = new_folder(tmp_path)
        with pytest.raises(TrainingError, match="stall_limit_s=30"):
            simulate(cluster, ASP(), limits=Limits(stall_s=30.0), folder=folder)
        summary = json.loads(folder.summary.read_text())
        assert (summary["status"], summary["wall_s"] > 30) == ("failed", True)

    @pytest.mark.parametrize("paradigm", PARADIGMS.values(), ids=PARADIGMS)
    def test_every_sample_is_used_and_nobody_waits_for_ever(self, paradigm):
        cluster = Cluster(
            7,
            Machines(),
            network=Network(1e-3, 1e-3, bandwidth=1e6),
            server=ServerCosts(1e-4, 1e-3),
            model_bytes=100,
        )
        summary = simulate(cluster, paradigm, pushes=1001)
        assert summary["samples"] == 1001

    def test_nothing_depends_on_chance(self):
        cluster = Cluster(5, Gamma(0.05, 0.3), seed=3)
        assert simulate(cluster, DSSP(), pushes=500) == simulate(cluster, DSSP(), pushes=500)


class TestRecordedRuns:
    @pytest.mark.parametrize("paradigm", PARADIGMS.values(), ids=PARADIGMS)
    def test_a_replay_decides_as_the_run_did(self, tmp_path, paradigm):
        recording = recorded(tmp_path, paradigm, crashes=(Crash(2, 40, 1.0),))
        result = replay(recording, Coordinator(paradigm, 4))
        assert not result.differences
        assert result.num_pushes > 500
        assert result.num_releases > 500

    def test_a_replay_notices_another_decision(self, tmp_path):
        recording = recorded(tmp_path, DSSP())
        releases = [call for call in recording.calls if call.releases]
        releases[100].releases[0]["lead"] += 1
        assert len(replay(recording, Coordinator(DSSP(), 4)).differences) == 1
        assert replay(recording, Coordinator(SSP(1), 4)).differences

    def test_a_run_that_was_cut_off_replays_as_far_as_it_goes(self, tmp_path):
        recorded(tmp_path, SSP(1))
        path = RunFolder(tmp_path).events
        text = path.read_text()
        path.write_text(text[: len(text) // 2])
        recording = read_recording("replay", str(tmp_path))
        assert not replay(recording, Coordinator(SSP(1), 4)).differences

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("config.yaml", None, "not a run folder"),
            ("config.yaml", "events: sample\n", "events=sample"),
            ("events.jsonl", None, "events.jsonl cannot be read"),
            ("events.jsonl", '{"e":"start"}\n', "events.jsonl cannot be read"),
        ],
    )
    def test_a_folder_without_a_whole_record_is_refused(self, tmp_path, name, content, words):
        recorded(tmp_path, ASP())
        (tmp_path / name).unlink()
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=words):
            read_recording("replay", str(tmp_path))

    def test_what_one_paradigm_recorded_predicts_another(self, tmp_path):
        cluster = Cluster(
            4,
            Gamma(0.05, 0.1, [1, 1, 1, 2.5]),
            network=Network(1e-3, 1e-3, 2e-3, 3e-3),
            server=ServerCosts(5e-4, 1e-3),
        )
        seen = cluster_of(recorded(tmp_path, BSP(), cluster))
        for paradigm in (ASP(), SSP(3), DSSP()):
            real = Figures.of(predict(cluster, paradigm, 60.0))
            predicted = Figures.of(predict(seen, paradigm, 60.0))
            assert predicted.pushes_per_s == pytest.approx(real.pushes_per_s, rel=0.03)
            assert predicted.staleness_mean == pytest.approx(real.staleness_mean, rel=0.05)


class TestAdvice:
    def test_equal_workers_need_nothing_but_bsp(self):
        advice = advise(Cluster(4, Gamma(0.05, 0.01)), 20.0)
        assert advice.recommended == "paradigm=bsp"
        assert advice.reason.startswith("nothing beats BSP")

    def test_unequal_workers_are_not_held_to_the_slowest(self):
        advice = advise(Cluster(4, Gamma(0.05, 0.1, [1, 1, 1, 2.5])), 30.0)
        assert advice.recommended.startswith("paradigm=dssp ")
        speedups = [entry.speedup for entry in advice.ranking]
        assert speedups == sorted(speedups, reverse=True)
        assert speedups[0] == pytest.approx(3.4 / 1.6, rel=0.03)
        chosen = next(entry for entry in advice.ranking if entry.override == advice.recommended)
        assert chosen.figures.staleness_p99 <= advice.ranking[0].figures.staleness_p99

    def test_saturation_names_what_is_exhausted_first(self):
        server = saturation(Cluster(2, Gamma(), server=ServerCosts(1e-3, 4e-3)), 20.0)
        assert (server.pushes_per_s, server.num_workers) == pytest.approx((200, 20))
        assert "server's work" in server.limit
        link = saturation(Cluster(2, Gamma(), network=Network(bandwidth=1e6), model_bytes=2e4), 20.0)
        assert (link.pushes_per_s, link.num_workers) == pytest.approx((50, 5))
        assert "link" in link.limit
        assert saturation(Cluster(2, Gamma()), 20.0).num_workers == math.inf


def new_folder(path):
    path.mkdir(exist_ok=True)
    return RunFolder(path)


def events(folder):
    return [json.loads(line) for line in folder.events.read_text().splitlines()]


def recorded(path, paradigm, cluster=None, crashes=()):
    """A simulated run as it is read back from its folder."""
    cluster = cluster or Cluster(
        4,
        Gamma(0.05, 0.2, [1, 1, 1.7, 3]),
        network=Network(1e-4, 2e-4),
        server=ServerCosts(1e-4, 1e-3, 1e-3),
        crashes=crashes,
    )
    folder = new_folder(path)
    simulate(cluster, paradigm, pushes=1000, folder=folder)
    folder.config.write_text("events: full\ntransport: {slots: 4}\n")
    return read_recording("replay", str(path))
