"""``python -m hydssp.simulate``: a run in virtual time, in this one process.

One job: build the simulated cluster and what runs on it from the configuration, and write down and print what came out.
Torch is imported only where something is trained.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Any

from hydssp.abort import guard
from hydssp.errors import TrainingError, UserError
from hydssp.launcher import Launch
from hydssp.signals import INTERRUPTED, PREEMPTED, StopRequest

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from hydssp.coordination.coordinator import Coordinator
    from hydssp.coordination.paradigms import Paradigm
    from hydssp.observe.recorder import Recorder
    from hydssp.observe.run_folder import RunFolder
    from hydssp.simulation.cluster import Cluster
    from hydssp.simulation.prediction import Figures
    from hydssp.simulation.recording import Recording

OK, ERROR, USAGE = 0, 1, 2


class Simulations:
    """Runs each composed configuration.

    Attributes:
        code: The exit code so far: the first that is not 0.
    """

    def __init__(self) -> None:
        self.code = OK

    def run(self, composed: DictConfig) -> None:
        """Check one configuration and simulate it."""
        from hydssp import config
        from hydssp.command_line import check_choices, check_run_dir_of_several, names_group

        try:
            check_choices()
            check_run_dir_of_several()
            plain = config.to_plain(composed)
            config.check(plain)
            if plain["replay"] is not None and plain["advise"] is not None:
                raise UserError(
                    f"replay={plain['replay']} advise={plain['advise']}: allowed is one of the two"
                )
            if config.build_paradigm(plain).recording is not None:
                raise UserError(
                    f"paradigm={plain['paradigm']['name']}: a recorded order is forced on real ranks, and a simulation "
                    "has its own; look at the run with replay=FOLDER, or take its times with cluster=measured"
                )
            if plain["replay"] is not None and names_group("num_workers"):
                raise UserError(
                    f"num_workers={plain['num_workers']}: replay={plain['replay']} has the workers that were recorded; "
                    "leave num_workers out"
                )
            code = _choose(plain, names_group("paradigm"))(plain)
        except UserError as error:
            print(f"hydssp: {error}", file=sys.stderr)
            code = USAGE
        self.code = self.code or code


def _choose(config: dict[str, Any], has_paradigm: bool) -> Callable[[dict[str, Any]], int]:
    """What the configuration asks for."""
    if config["advise"] is not None:
        return advise
    if config["replay"] is not None:
        return what_if if has_paradigm else replay
    return train if config["simulate"]["train"] else simulate_clocks


def _push_bytes(wire: dict[str, Any], numel: int, itemsize: int) -> float:
    """Of a gradient as it travels, up to the last block of a quantised one; needs no torch."""
    if wire["compression"] == "topk":
        return 8.0 * max(1, math.floor(float(wire["ratio"]) * numel))
    if wire["compression"] == "quantize":
        return numel * (int(wire["bits"]) / 8 + 4 / 64)
    return numel * (itemsize if wire["push"] == "fp32" else 2)


def build_cluster(config: dict[str, Any], numel: int, itemsize: int = 4) -> Cluster:
    """The simulated cluster that ``config`` describes, for ``numel`` weights of ``itemsize`` bytes each."""
    from hydssp.config import build, build_straggler
    from hydssp.simulation.cluster import Cluster, Crash, Network, ServerCosts
    from hydssp.simulation.times import Grouped

    described = config["simulate"]
    times = build("cluster", config["cluster"])
    if described["group_size"] > 1:
        times = Grouped(times, described["group_size"], described["allreduce_s"])
    crashes = []
    for number, crash in enumerate(described["crashes"]):
        known = {f.name for f in fields(Crash)}
        if not isinstance(crash, dict) or not {"worker", "at_iteration"} <= set(crash) <= known:
            allowed = "{worker: 2, at_iteration: 100, detected_after_s: 10}"
            raise UserError(f"simulate.crashes[{number}]={crash}: allowed is a mapping such as {allowed}")
        crashes.append(Crash(**crash))
    return Cluster(
        config["num_workers"],
        times,
        seed=config["seed"],
        straggler=build_straggler(config["straggler"], config["num_workers"]),
        network=Network(**described["network"]),
        server=ServerCosts(**described["server"]),
        model_bytes=numel * (itemsize if config["wire"]["pull"] == "fp32" else 2),
        push_bytes=_push_bytes(config["wire"], numel, itemsize),
        slots=config["transport"]["slots"],
        crashes=tuple(crashes),
    )


def _new_recorder(config: dict[str, Any], folder: RunFolder, coordinator: Coordinator) -> Recorder:
    from hydssp.observe.recorder import Recorder

    return Recorder(
        folder,
        paradigm=config["paradigm"]["name"],
        seed=config["seed"],
        data_size=config["simulate"]["num_samples"],
        events=config["events"],
        progress_s=config["progress_s"],
        summary_s=math.inf,
        controller=lambda: coordinator.controller_figures,
    )


def simulate_clocks(config: dict[str, Any]) -> int:
    """Clocks alone, without weights and gradients."""
    from hydssp import config as configuration
    from hydssp.coordination.coordinator import Coordinator
    from hydssp.observe.progress import print_summary
    from hydssp.simulation.clocks import run_clocks

    described = config["simulate"]
    if config["target_accuracy"] is not None:
        raise UserError(
            f"target_accuracy={config['target_accuracy']}: nothing is trained, so that it is never reached; set "
            "simulate.train=true, or leave it out"
        )
    cluster = build_cluster(config, described["num_parameters"])
    paradigm = configuration.build_paradigm(config)
    group_batch = {**config, "batch_size": config["batch_size"] * described["group_size"]}
    dealer = configuration.build_dealer(group_batch, described["num_samples"], paradigm.is_synchronous)
    limits = configuration.build_limits(config)
    folder = configuration.claim_run_folder(config, datetime.now())
    coordinator = Coordinator(paradigm, cluster.num_workers)
    recorder = _new_recorder(config, folder, coordinator)
    print(
        f"hydssp: {config['paradigm']['name']}, {cluster.num_workers} workers, clocks only, in virtual time",
        flush=True,
    )
    recorder.started(
        0.0,
        cluster.num_workers,
        rules={k: v for k, v in config["paradigm"].items() if k != "_target_"},
        batch_size=config["batch_size"],
        simulated=True,
    )
    recorder.write_summary(0.0, "running", "the run has not ended", is_durable=False)
    began_at = time.monotonic()
    try:
        with StopRequest() as stop:
            ended = run_clocks(cluster, coordinator, dealer, limits, recorder, lambda: stop.code)
    except TrainingError:
        recorder.close()
        raise
    spent_s = time.monotonic() - began_at
    reason = f"reached {ended.by or 'epochs'}, in virtual time, computed in {spent_s:.1f} s"
    status = {OK: "done", PREEMPTED: "preempted", INTERRUPTED: "interrupted"}[ended.exit_code]
    summary = recorder.write_summary(ended.at, status, reason)
    recorder.close()
    print_summary(summary, folder.path)
    return ended.exit_code


def train(config: dict[str, Any]) -> int:
    """Clocks and gradients: the real server and worker, in the order of simulated events."""
    import copy

    import torch

    from hydssp import job
    from hydssp import task as tasks
    from hydssp.config import claim_run_folder, notes
    from hydssp.simulation.fabric import Fabric
    from hydssp.simulation.gradients import Gradients, ImmediateEvaluator
    from hydssp.update.buffers import ModuleBuffers
    from hydssp.update.step import group_ranges

    config = {**config, "batch_size": config["batch_size"] * config["simulate"]["group_size"]}
    facts = [job.own_facts()]
    placement = job.place_rank(facts, config, None)
    torch.set_num_threads(config["threads"] or 1)  # sums in another order would be other weights
    built = tasks.build_task(config)
    make_optimizer = tasks.make_optimizer(config)
    ranges = group_ranges(built.layout, config["parameter_groups"])
    numel, num_buffers = built.layout.numel, built.buffers.numel
    pull_wire, push_wire = tasks.wires(config, built.layout)
    cluster = build_cluster(config, numel, built.layout.numpy_dtype.itemsize)
    evaluator = ImmediateEvaluator(tasks.make_evaluation_task(config))
    module = copy.deepcopy(built.module)  # the workers' own, before the server binds the first one
    with StopRequest() as stop:
        gradients = Gradients(
            lambda end, straggler: job.make_worker(
                config,
                built,
                module,
                end,
                built.loader(placement.device),
                placement.device,
                lambda: 0,
                straggler,
            ),
            numel,
            ModuleBuffers(module),
            cluster.num_workers,
        )
        fabric = gradients.fabric = Fabric(
            cluster,
            gradients,
            numel,
            pull_wire.numpy_dtype,
            num_buffers,
            push_wire.numpy_dtype,
            push_wire.size(numel),
        )
        ends = job.Ends(fabric, [])
        folder = claim_run_folder(config, datetime.now())
        this = job.Run(config, facts, placement, built, [], make_optimizer, ranges, ends, folder, stop)
        print(f"{this.headline}, in virtual time", flush=True)
        for note in notes(config, is_synchronous=this.paradigm.is_synchronous):
            print(f"hydssp: {note}", file=sys.stderr)
        side = job.ServerSide(this, evaluator)
        torch.manual_seed(config["seed"] + 1)
        return side.serve(lambda server: fabric.run(server, config["max_time_s"]))


def replay(config: dict[str, Any]) -> int:
    """A recorded run through the coordinator: every release must come again."""
    from hydssp import config as configuration
    from hydssp.simulation.forced import make_coordinator
    from hydssp.simulation.recording import read_recording
    from hydssp.simulation.replay import replay as run_replay

    recording = read_recording("replay", config["replay"])
    paradigm = configuration.build_paradigm(recording.config)
    result = run_replay(recording, make_coordinator(paradigm, recording.num_workers))
    print(
        f"{recording.path}: {recording.config['paradigm']['name']}, {recording.num_workers} workers: "
        f"{result.num_calls} calls with {result.num_pushes} pushes replayed, {result.num_releases} releases and "
        f"{result.num_holds} holds compared{_cut_off(recording)}"
    )
    if result.differences:
        print("\n".join(result.differences[:10]))
        print(f"{len(result.differences)} differences: this version of the coordinator decides otherwise")
        return ERROR
    print("every one the same")
    return OK


def what_if(config: dict[str, Any]) -> int:
    """The computing times of a recorded run under another paradigm."""
    from hydssp import config as configuration
    from hydssp.observe.progress import print_table
    from hydssp.simulation.prediction import Figures, cluster_of, predict
    from hydssp.simulation.recording import read_recording, read_summary

    recording = read_recording("replay", config["replay"])
    cluster, duration_s = cluster_of(recording), recording.duration_s

    def simulated(paradigm: Paradigm) -> Figures:
        return Figures.of(predict(cluster, paradigm, duration_s))

    label, own = config["paradigm"]["name"], recording.config["paradigm"]["name"]
    # The summary of a run whose log is cut off tells of another span of time.
    recorded = [Figures.of(read_summary(recording))] if recording.is_complete else []
    rows = [
        *((f"{own}, as recorded", figures) for figures in recorded),
        (f"{own}, simulated", simulated(configuration.build_paradigm(recording.config))),
        (f"{label}, simulated", simulated(configuration.build_paradigm(config))),
    ]
    print(
        f"{recording.path}: {recording.num_workers} workers, {duration_s:.1f} s, {len(recording.pushes)} pushes"
        f"{_cut_off(recording)}\n"
    )
    print_table((*HEAD, "paradigm"), [(*figures_in_words(figures), name) for name, figures in rows])
    if recorded:
        print("\nHow far the first two rows differ tells how far the third can be trusted.")
    return OK


def _cut_off(recording: Recording) -> str:
    return "" if recording.is_complete else "; its log is cut off and does not go to the end of the run"


HEAD = ("pushes/s", "waiting", "staleness", "99 %", "max")


def figures_in_words(figures: Figures) -> tuple[str, ...]:
    """The cells of a table under ``HEAD``."""
    return (
        f"{figures.pushes_per_s:.2f}",
        f"{figures.wait_share:.0%}",
        f"{figures.staleness_mean:.2f}",
        str(figures.staleness_p99),
        str(figures.staleness_max),
    )


def advise(config: dict[str, Any]) -> int:
    """Rank the paradigms for a recorded run, or for the cluster that the configuration describes."""
    from hydssp.observe.progress import print_table
    from hydssp.simulation import advice
    from hydssp.simulation.prediction import cluster_of
    from hydssp.simulation.recording import read_recording

    if config["advise"] == "cluster":
        cluster = build_cluster(config, config["simulate"]["num_parameters"])
        duration_s = config["max_time_s"] or math.inf
        what = "the cluster described"
    else:
        recording = read_recording("advise", config["advise"])
        cluster, duration_s = cluster_of(recording), recording.duration_s
        what = f"{recording.path} ({recording.config['paradigm']['name']}){_cut_off(recording)}"
    result = advice.advise(cluster, duration_s)
    print(f"{what}: {cluster.num_workers} workers, every paradigm simulated\n")
    rows = [(*figures_in_words(r.figures), f"{r.speedup:.2f}", r.override) for r in result.ranking]
    print_table((*HEAD, "x bsp", "override"), rows)
    fastest = max(result.ranking, key=lambda r: r.figures.pushes_per_s)
    limit = advice.saturation(cluster, fastest.figures.pushes_per_s)
    print(
        f"\nOne server can take {limit.pushes_per_s:.3g} pushes/s, about {limit.num_workers:.0f} workers like these; "
        f"what is exhausted first is {limit.limit}."
    )
    print(f"\nRecommended: {result.recommended}\n  {result.reason}")
    return OK


def main() -> int:
    """Returns the exit code."""
    launch = Launch.from_environment(os.environ)
    if launch.is_launched:
        if launch.rank == 0:
            print(
                f"hydssp: {launch.launcher} started {launch.size} processes, but a simulation runs in one; start it as "
                "python -m hydssp.simulate",
                file=sys.stderr,
            )
        return USAGE
    from hydssp.application import run_composed

    simulations = Simulations()
    return run_composed("simulate", simulations.run) or simulations.code


if __name__ == "__main__":
    guard(main)
