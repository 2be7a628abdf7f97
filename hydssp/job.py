"""One training run on one rank, from plain configuration to exit code.

One job: agree with the other ranks that everything could be built, connect the parts by role, and write down what came
out. This is the only place that knows every part; it holds no algorithm.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
import torch

from hydssp import config as configuration
from hydssp import evaluation, task
from hydssp import server as server_role
from hydssp import worker as worker_role
from hydssp.backward import Backward, Clip, Plan
from hydssp.coordination.paradigms import Paradigm
from hydssp.data.loader import Loader
from hydssp.device import Placement, RankFacts, place
from hydssp.errors import TrainingError, UserError
from hydssp.evaluator import Evaluator
from hydssp.observe import environment, logs
from hydssp.observe.progress import Progress, print_summary
from hydssp.observe.recorder import Recorder
from hydssp.observe.run_folder import RunFolder, write_atomically
from hydssp.observe.tensorboard import open_board
from hydssp.recorded import check_repeatable
from hydssp.session import Session
from hydssp.signals import StopRequest
from hydssp.simulation.forced import ForcedOrder, make_coordinator
from hydssp.straggler import Straggler
from hydssp.transport.backoff import Backoff, choose_backoff
from hydssp.transport.local import LocalFabric
from hydssp.transport.opening import open_server, open_worker
from hydssp.transport.protocol import ServerTransport, WorkerTransport
from hydssp.update.buffers import BufferPolicy, ModuleBuffers, WorkersBuffers
from hydssp.update.layout import FlatModule
from hydssp.update.schedule import LrClock
from hydssp.update.step import ChunkedOptimizer, MakeOptimizer, group_ranges

OK, USAGE = 0, 2

_log = logging.getLogger(__name__)


class _Ranks:
    """The ranks of this run: a session under MPI, or this process alone."""

    def __init__(self, session: Session | None) -> None:
        self.session = session
        self.rank = session.rank if session else 0

    def gather(self, value: Any) -> list[Any]:
        return self.session.gather(value) if self.session else [value]

    def broadcast(self, value: Any = None) -> Any:
        return self.session.broadcast(value) if self.session else value

    def agree(self, work: Callable[[], Any]) -> Any:
        """Do ``work`` on every rank; a UserError on any of them becomes one on all.

        Raises:
            UserError: On every rank, with the first message, and the ranks that it came from unless all agree.
        """
        result, message = None, None
        try:
            result = work()
        except UserError as error:
            message = str(error)
        messages = self.gather(message)
        failed = [rank for rank, m in enumerate(messages) if m is not None]
        if failed:
            where = "" if len(failed) == len(messages) else f" (on rank {', '.join(map(str, failed[:8]))})"
            raise UserError(f"{messages[failed[0]]}{where}")
        return result

    def agree_on_server(self, work: Callable[[], Any]) -> Any:
        """``agree`` on work that only rank 0 does; None on the others."""
        return self.agree(lambda: work() if self.rank == 0 else None)


@dataclass
class Ends:
    """The ends of the transport in this process: the server's, one worker's, or all of them."""

    server: ServerTransport | None
    workers: list[WorkerTransport]

    def close(self) -> None:
        """Collective."""
        for worker in self.workers:
            worker.close()
        if self.server:
            self.server.close()


@dataclass
class Run:
    """What this rank knows when everything is agreed on."""

    config: dict[str, Any]
    facts: list[RankFacts]
    placement: Placement
    task: task.Task
    loaders: list[Loader]
    make_optimizer: MakeOptimizer | None
    ranges: list[tuple[int, int, dict[str, Any]]]
    ends: Ends
    folder: RunFolder
    stop: StopRequest

    @functools.cached_property
    def paradigm(self) -> Paradigm:
        """Who may go on."""
        return configuration.build_paradigm(self.config)

    @property
    def async_weight(self) -> str:
        """``per_worker`` or ``one``: as configured, else what the mitigation wants."""
        return self.config["async_weight"] or task.make_mitigation(self.config).async_weight

    @property
    def push_weight(self) -> float:
        """Factor on the learning rate of a step from single pushes."""
        if self.paradigm.is_synchronous or self.async_weight == "one":
            return 1.0
        return 1.0 / int(self.config["num_workers"])

    @property
    def headline(self) -> str:
        """What is trained how, in one line."""
        config = self.config
        rate = config["optimizer"].get("lr")
        if rate is None:
            step = "learning rate: the optimizer's own default"
        elif self.paradigm.is_synchronous:
            step = f"learning rate {rate:g} per round"
        else:
            per_push = f"{rate * self.push_weight:.3g} (async_weight={self.async_weight})"
            step = (
                f"learning rate {rate:g}, per push {per_push}, mitigation {task.make_mitigation(config).name}"
            )
        pieces = f" x {config['accumulate']}" if config["accumulate"] > 1 else ""
        if config["local_steps"] > 1:
            pieces += f", {config['local_steps']} local steps"
        formats = task.describe_formats(config)
        return (
            f"hydssp: {config['paradigm']['name']}, {config['num_workers']} workers, "
            f"{task.describe(config, self.task)}, batch {config['batch_size']}{pieces} per worker, {step}"
            f"{', ' if formats else ''}{formats}"
        )

    def describe(self, worker: int) -> str:
        """A worker with rank and host."""
        if len(self.facts) == 1:
            return f"worker {worker}"
        return f"worker {worker} (rank {worker + 1} on {self.facts[worker + 1].host})"

    def backoff(self) -> Backoff:
        """How a waiting rank of this node sleeps."""
        mine = self.facts[0 if self.ends.server else self.ends.workers[0].worker + 1]
        neighbours = [f for f in self.facts if f.host == mine.host]
        return choose_backoff(len(neighbours), len({core for f in neighbours for core in f.affinity}))


def run(config: dict[str, Any], session: Session | None) -> int:
    """Train once.

    Args:
        config: The checked configuration, the same on every rank.
        session: The ranks; None: server and workers all in this process.

    Returns:
        The exit code, the same on every rank.
    """
    ranks = _Ranks(session)
    config = {**config, "num_workers": session.size - 1 if session else config["num_workers"]}
    if session:
        session.limit_s = config["stall_limit_s"] or math.inf
    with StopRequest() as stop:
        try:
            this = _prepare(config, ranks, stop)
        except (UserError, _StoppedEarlyError) as error:
            # A signal to a whole process group ends the compiler of a mitigation, too, which is no mistake then.
            code = max(ranks.gather(stop.code))
            if ranks.rank == 0:
                print(f"hydssp: {_StoppedEarlyError() if code else error}", file=sys.stderr)
            return code or USAGE
        try:
            logs.configure_logging(ranks.rank, this.folder.log(ranks.rank))
            _announce(this, ranks)
            code = _train(this)
            this.ends.close()
        finally:
            for loader in this.loaders:
                loader.close()
            logs.remove_logging()
    return int(ranks.broadcast(code))


class _StoppedEarlyError(Exception):
    """A signal came before there was a run."""

    def __str__(self) -> str:
        return "stopped by a signal before training began; nothing was written"


def _prepare(config: dict[str, Any], ranks: _Ranks, stop: StopRequest) -> Run:
    """Build everything and open the transport; the run folder comes last, so that a mistake leaves nothing behind.

    Raises:
        UserError: The same on every rank, with nothing allocated.
        _StoppedEarlyError: Likewise, when a signal has come to one of them.
    """
    facts = ranks.gather(own_facts())
    if ranks.session:
        ranks.session.hosts = [f.host for f in facts]
    placement = place_rank(facts, config, ranks.rank if ranks.session else None)
    if "OMP_NUM_THREADS" not in os.environ or config["threads"]:
        torch.set_num_threads(placement.num_threads)
    ranks.agree_on_server(lambda: _check_paradigm(config))
    built = ranks.agree(lambda: task.build_task(config))
    ranks.agree(lambda: _check_alike(ranks, built))
    make = ranks.agree_on_server(lambda: task.make_optimizer(config))
    ranges = ranks.agree(lambda: group_ranges(built.layout, config["parameter_groups"]))
    ranks.agree_on_server(lambda: open_board(config["tensorboard"], None))
    if placement.device != "cpu":
        torch.cuda.set_device(placement.device)
    if any(ranks.gather(stop.code)):
        raise _StoppedEarlyError
    loaders = ranks.agree(lambda: _start_loaders(config, built, placement, ranks))
    try:
        ends = _open(config, built, ranks.session)
        try:
            folder = ranks.agree_on_server(lambda: configuration.claim_run_folder(config, datetime.now()))
        except UserError:
            ends.close()
            raise
    except UserError:
        for loader in loaders:
            loader.close()
        raise
    return Run(config, facts, placement, built, loaders, make, ranges, ends, ranks.broadcast(folder), stop)


def _check_paradigm(config: dict[str, Any]) -> None:
    recording = configuration.build_paradigm(config).recording
    if recording is not None:
        check_repeatable(recording, config)


def _start_loaders(
    config: dict[str, Any], built: task.Task, placement: Placement, ranks: _Ranks
) -> list[Loader]:
    """The loaders of this process's workers, their processes ready: an interpreter takes seconds to start."""
    num_workers = config["num_workers"] if ranks.session is None else int(ranks.rank > 0)
    loaders = [built.loader(placement.device) for _ in range(num_workers)]
    for loader in loaders:
        loader.start()
    return loaders


def place_rank(facts: list[RankFacts], config: dict[str, Any], rank: int | None) -> Placement:
    """What this rank uses; None: a process that is alone, which is a worker too and may use the GPU of one."""
    if rank is None:
        return place(facts * 2, config["device"], config["threads"])[1]
    return place(facts, config["device"], config["threads"])[rank]


def own_facts() -> RankFacts:
    """What this rank knows of itself."""
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return RankFacts(socket.gethostname(), tuple(sorted(affinity)), num_cuda)


def _check_alike(ranks: _Ranks, built: task.Task) -> None:
    """Refuse ranks that see different models or data."""
    seen = ranks.gather((built.layout.digest, built.buffers.numel, len(built.train)))
    different = [rank for rank, s in enumerate(seen) if s != seen[0]]
    if different:
        raise UserError(
            f"model, data: rank {different[0]} has another model or another data set than rank 0 (layout, buffers and "
            f"samples {seen[different[0]]} against {seen[0]}); give every node the same files"
        )


def _open(config: dict[str, Any], built: task.Task, session: Session | None) -> Ends:
    options = {k: v for k, v in config["transport"].items() if k != "name"}
    options["num_buffers"] = built.buffers.numel
    pull_wire, push_wire = task.wires(config, built.layout)
    options["pull_dtype"], options["push_dtype"] = pull_wire.numpy_dtype, push_wire.numpy_dtype
    options["push_numel"] = push_wire.size(built.layout.numel)
    sizes = (built.layout.numel, built.layout.numpy_dtype)
    if session is None:
        fabric = LocalFabric(config["num_workers"], *sizes, clock=time.monotonic, **options)
        return Ends(fabric.server, list(fabric.workers))
    name = config["transport"]["name"]
    if session.rank == 0:
        return Ends(open_server(name, session.comm, *sizes, **options), [])
    return Ends(None, [open_worker(name, session.comm, *sizes, **options)])


def _announce(this: Run, ranks: _Ranks) -> None:
    """Write environment.json and print what the run is, before it starts. Collective."""
    placement = this.placement
    role = "worker" if ranks.rank else "server"
    described = ranks.gather(environment.rank_facts(ranks.rank, role, placement.device))
    if placement.shares_device:
        _log.warning("several workers of this node share %s: it has more workers than GPUs", placement.device)
    if ranks.rank != 0:
        return
    library = ranks.session.library if ranks.session else None
    facts = environment.collect(sys.argv, mpi_vendor=library, mpi_library=library, ranks=described)
    write_atomically(this.folder.environment, json.dumps(facts, indent=1) + "\n")
    print(
        f"{this.headline}\n"
        f"{library or 'one process, no MPI'}; {torch.get_num_threads()} compute thread(s) per rank\n"
        f"{environment.rank_map(described).text}\n"
        f"run folder: {this.folder.path}",
        flush=True,
    )
    config = this.config
    usable = min(len(facts.affinity) for facts in this.facts)
    if torch.get_num_threads() > usable:
        _log.warning("%d compute threads, but a rank may use %d cores", torch.get_num_threads(), usable)
    for note in configuration.notes(config, is_synchronous=this.paradigm.is_synchronous):
        _log.warning("%s", note)
    num_batches = configuration.samples_per_push(config) // config["batch_size"]
    if note := task.batch_note(
        this.task.num_samples, config["batch_size"], config["num_workers"], num_batches
    ):
        _log.warning("%s", note)


def _train(this: Run) -> int:
    """Play the roles that this process has; returns the exit code, which counts on rank 0."""
    # Each worker of a local run needs a module of its own, made before the server binds the first one.
    modules = [
        copy.deepcopy(this.task.module) if this.ends.server else this.task.module for _ in this.ends.workers
    ]
    side = ServerSide(this, _make_evaluator(this)) if this.ends.server else None
    # What dropout and the like draw differs from worker to worker, and is the same in the next run.
    torch.manual_seed(this.config["seed"] + 1 + (this.ends.workers[0].worker if this.ends.workers else -1))
    workers = [
        make_worker(
            this.config, this.task, module, end, loader, this.placement.device, lambda: this.stop.code
        )
        for end, module, loader in zip(this.ends.workers, modules, this.loaders, strict=True)
    ]
    if side is None:
        (worker,) = workers
        limit = this.config["stall_limit_s"]
        worker_role.run(worker, this.backoff(), patience_s=2 * limit + 60 if limit else math.inf)
        return OK
    if workers:
        return side.serve(lambda server: _step_in_turn(server, workers))
    return side.serve(lambda server: server_role.run(server, this.backoff()))


def make_worker(
    config: dict[str, Any],
    built: task.Task,
    module: torch.nn.Module,
    end: WorkerTransport,
    batches: worker_role.Batches,
    device: str,
    stop_code: Callable[[], int],
    straggler: Straggler | None = None,
) -> worker_role.Worker:
    """A worker that computes with ``module``; ``straggler`` in place of the configured one, if given."""
    buffers = ModuleBuffers(module)
    model = FlatModule(module, built.layout, device)
    model.module.train()
    backward = Backward(
        model,
        built.loss.to(device) if isinstance(built.loss, torch.nn.Module) else built.loss,
        Clip(**config["clip"]),
        Plan(
            config["batch_size"],
            config["accumulate"],
            config["local_steps"],
            lr=float(config["optimizer"].get("lr", 0.0)) if config["local_steps"] > 1 else 0.0,
            precision=task.autocast_dtype(config),
        ),
    )
    return worker_role.Worker(
        end,
        model,
        batches,
        backward,
        straggler or built.straggler,
        buffers,
        *task.wires(config, built.layout),
        config["wire"]["error_feedback"] or config["wire"]["compression"] != "none",
        stop_code,
    )


def _step_in_turn(server: server_role.Server, workers: list[worker_role.Worker]) -> None:
    """Drive all roles of a local run in this process."""
    server.start()
    active = list(workers)
    while active:
        has_advanced = server.step()
        for worker in list(active):
            progress = worker.step()
            has_advanced |= progress is worker_role.Progress.ADVANCED
            if progress is worker_role.Progress.DONE:
                active.remove(worker)
        if not has_advanced:
            padded = [w.padding_left_s for w in active if w.doing is worker_role.Progress.PADDING]
            time.sleep(min([*padded, 1e-3]))


def _make_evaluator(this: Run) -> Evaluator:
    """Evaluates in a process beside this one, during training or after it."""
    built = this.task
    sizes = (built.layout.numel, built.layout.numpy_dtype, built.buffers.numel)
    make_child = functools.partial(
        evaluation.ChildEvaluator, functools.partial(task.make_evaluation_task, this.config), *sizes
    )
    if this.config["eval"]["where"] == "after":
        return evaluation.SnapshotEvaluator(make_child, this.folder.path / "snapshots", *sizes)
    return make_child()


class ServerSide:
    """The server with everything that it writes to."""

    def __init__(self, this: Run, evaluator: Evaluator) -> None:
        assert this.ends.server is not None
        assert this.make_optimizer is not None
        self._this, self._transport = this, this.ends.server
        config, built = this.config, this.task
        self._coordinator = make_coordinator(this.paradigm, config["num_workers"])
        limits = configuration.build_limits(config)
        if (recording := this.paradigm.recording) is not None:
            self._transport = ForcedOrder(self._transport, recording)
            limits = replace(
                limits, max_updates=min(limits.max_updates or sys.maxsize, len(recording.apply_s))
            )
        self._model = FlatModule(built.module, built.layout)
        self._evaluator = evaluator
        target = config["target_accuracy"]
        pull_wire, push_wire = task.wires(config, built.layout)
        self._recorder = Recorder(
            this.folder,
            paradigm=config["paradigm"]["name"],
            seed=config["seed"],
            data_size=len(built.train),
            events=config["events"],
            targets=sorted({*config["eval"]["targets"], *([target] if target is not None else [])}),
            progress_s=config["progress_s"],
            progress=Progress(progress_s=config["progress_s"]),
            controller=lambda: self._coordinator.controller_figures,
            board=open_board(config["tensorboard"], this.folder.path),
            pull_bytes=built.layout.numel * pull_wire.numpy_dtype.itemsize,
            push_bytes=push_wire.size(built.layout.numel) * push_wire.numpy_dtype.itemsize
            + 8 * built.buffers.numel,
        )
        initial = np.zeros(built.buffers.numel)
        built.buffers.read(initial)
        self._server = server_role.Server(
            transport=self._transport,
            coordinator=self._coordinator,
            dealer=configuration.build_dealer(config, built.num_samples, this.paradigm.is_synchronous),
            optimizer=ChunkedOptimizer(
                self._model.weights,
                this.make_optimizer,
                this.ranges,
                mitigation=task.make_mitigation(config),
                num_workers=config["num_workers"],
                tensors=[(span.start, span.stop) for span in built.layout.spans],
                wire=push_wire,
            ),
            step_rule=server_role.StepRule(
                schedule=configuration.build_schedule(config),
                lr_clock=LrClock[config["lr_clock"]],
                push_weight=this.push_weight,
                is_mean=this.paradigm.is_synchronous,
                batch_size=configuration.samples_per_push(config),
                num_samples=len(built.train),
            ),
            evaluator=self._evaluator,
            evaluate_every=config["eval"]["every_epochs"] * len(built.train),
            recorder=self._recorder,
            limits=limits,
            buffers=WorkersBuffers(
                initial, config["num_workers"], BufferPolicy[config["buffers"]], built.buffers.is_integer
            ),
            encode=pull_wire.encode,
            stop_code=lambda: this.stop.code,
            describe=this.describe,
        )

    def serve(self, drive: Callable[[server_role.Server], None]) -> int:
        """Train by ``drive``, evaluate the final weights, and save everything; returns the exit code."""
        config, server = self._this.config, self._server
        try:
            self._wait_for_evaluator()
            self._recorder.started(
                self._transport.now(),
                config["num_workers"],
                rules={k: v for k, v in config["paradigm"].items() if k != "_target_"},
                batch_size=config["batch_size"],
            )
            self._recorder.write_summary(
                self._transport.now(), "running", "the run has not ended", is_durable=False
            )
            drive(server)
            if not server.exit_code:  # a job that is about to be ended has no time for an evaluation
                server.check_learned()
                server.evaluate_final()
                self._this.task.buffers.write(self._evaluator.buffers)
            else:
                self._this.task.buffers.write(server.combined_buffers())
        except BaseException as error:
            self._this.task.buffers.write(server.combined_buffers())
            with contextlib.suppress(TrainingError):  # the first failure is the one to be told
                self._save("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            self._evaluator.close()
        if server.evaluations_skipped:
            _log.warning(
                "%d evaluations were left out, each because the one before was still under way; for exact times to an "
                "accuracy use eval.where=after or a larger eval.every_epochs",
                server.evaluations_skipped,
            )
        status = {0: "done", 75: "preempted", 130: "interrupted"}[server.exit_code]
        summary = self._save(status, f"reached {server.ended_by or 'epochs'}")
        print_summary(summary, self._this.folder.path)
        return server.exit_code

    def _wait_for_evaluator(self) -> None:
        """Begin training when the evaluation process is there: else the first epochs would not be evaluated."""
        while not self._evaluator.is_ready and not self._this.stop.code:
            time.sleep(5e-3)

    def _save(self, status: str, reason: str) -> dict[str, Any]:
        """Write weights and summary; the one is not given up for the other."""
        file = io.BytesIO()
        state = self._model.module.state_dict()
        torch.save({name: tensor.detach().clone() for name, tensor in state.items()}, file)
        failure = None
        try:
            write_atomically(self._this.folder.weights, file.getvalue())
        except OSError as error:
            failure, status = f"the weights could not be saved ({error})", "failed"
            reason = f"{reason}; {failure}"
        try:
            summary = self._recorder.write_summary(self._transport.now(), status, reason)
        except OSError as error:
            failure = f"the summary could not be saved ({error})" + (f", and {failure}" if failure else "")
        self._recorder.close()
        if failure:
            raise TrainingError(f"{failure}; make room for {self._this.folder.path}, and use events=off")
        return summary
