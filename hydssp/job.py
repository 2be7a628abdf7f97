"""One training run on one rank, from plain configuration to exit code.

One job: build the objects that the configuration names, agree with the other ranks that all could, connect them by
role, and write down what came out. This is the only place that knows every part; it holds no algorithm. Torch is
imported here, after the configuration has been checked.
"""

from __future__ import annotations

import functools
import io
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import torch

from hydssp import config as configuration
from hydssp import evaluation
from hydssp import server as server_role
from hydssp import worker as worker_role
from hydssp.coordination.coordinator import Coordinator
from hydssp.coordination.paradigms import Paradigm
from hydssp.coordination.ranges import RangeDealer
from hydssp.data import EpochOrder, Splits
from hydssp.data.batches import Batches
from hydssp.device import Placement, RankFacts, place
from hydssp.errors import UserError
from hydssp.observe import environment, logs
from hydssp.observe.progress import Progress, print_summary
from hydssp.observe.recorder import Recorder
from hydssp.observe.run_folder import RunFolder, create_run_folder, write_atomically
from hydssp.session import Session
from hydssp.straggler import Straggler
from hydssp.transport import local
from hydssp.update.layout import FlatModule, ParameterLayout
from hydssp.update.schedule import LrClock
from hydssp.update.step import ChunkedOptimizer, MakeOptimizer, check_elementwise, group_ranges

OK, USAGE = 0, 2


@dataclass
class Task:
    """What is trained on what, built from the configuration; alike on every rank."""

    splits: Splits
    module: torch.nn.Module
    layout: ParameterLayout
    loss: worker_role.Loss
    straggler: Straggler


def build_task(config: dict[str, Any], num_workers: int) -> Task:
    """Build data, model, loss and straggler.

    The model is initialised from ``seed`` alone, so that every rank has the same one.

    Raises:
        UserError: When one of them cannot be built, or the model does not fit the data.
    """
    torch.manual_seed(config["seed"])
    np.random.seed(config["seed"] % 2**32)  # noqa: NPY002 - for models and data of the user's that draw from it
    random.seed(config["seed"])
    data = config["data"]
    labels = (
        "shape",
        "num_classes",
    )  # said once in the data group, for the models; not arguments of the loader
    splits = configuration.build("data", {k: v for k, v in data.items() if k not in labels})
    for key in labels:
        found = getattr(splits.train, key)
        if data.get(key) is not None and list(np.atleast_1d(data[key])) != list(np.atleast_1d(found)):
            raise UserError(f"data.{key}={data[key]}: the data has {found}; set it to that")
    module = configuration.build("model", config["model"])
    if not isinstance(module, torch.nn.Module):
        raise UserError(
            f"model._target_={config['model']['_target_']}: gives a {type(module).__name__}, not a Module"
        )
    if any(buffer.is_floating_point() for buffer in module.buffers()):
        raise UserError(
            f"model._target_={config['model']['_target_']}: the model has running statistics in buffers (batch norm); "
            "this version does not train them; use a model without, e.g. with GroupNorm or LayerNorm"
        )
    layout = ParameterLayout.of(module, getattr(torch, config["dtype"]))
    loss = configuration.build("loss", config["loss"])
    task = Task(splits, module, layout, loss, configuration.build_straggler(config["straggler"], num_workers))
    _try_one_sample(task, config)
    return task


def _try_one_sample(task: Task, config: dict[str, Any]) -> None:
    """Find out before training whether model, data and loss fit together."""
    try:
        batch = Batches(task.splits.train, torch.get_default_dtype()).batch(np.arange(2))
        task.module.eval()
        with torch.no_grad():
            value = task.loss(task.module(batch[0]), batch[1])
        task.module.train()
    except Exception as error:
        raise UserError(
            f"model={config['model'].get('name', config['model']['_target_'])} does not fit "
            f"data={config['data'].get('name', config['data']['_target_'])} of shape {list(task.splits.train.shape)} "
            f"with loss={config['loss']['_target_']}: {type(error).__name__}: {error}"
        ) from error
    if value.ndim != 0:
        raise UserError(
            f"loss._target_={config['loss']['_target_']}: gives a tensor of shape {list(value.shape)}, not a scalar"
        )


def make_evaluation_task(config: dict[str, Any]) -> evaluation.EvaluationTask:
    """What the evaluation process needs; called there."""
    task = build_task(config, num_workers=config["num_workers"])
    model = FlatModule(task.module, task.layout)
    data = Batches(task.splits.test, task.layout.dtype)
    return (
        model,
        lambda start, count: data.batch(np.arange(start, start + count)),
        len(task.splits.test),
        task.loss,
    )


def make_optimizer(config: dict[str, Any]) -> MakeOptimizer:
    """The optimizer's constructor with the configured arguments; refuses one that is not elementwise."""
    make: MakeOptimizer = configuration.build("optimizer", {**config["optimizer"], "_partial_": True})
    check_elementwise(make)
    return make


class _Ranks:
    """The ranks of this run: a session under MPI, or this process alone."""

    def __init__(self, session: Session | None) -> None:
        self._session = session
        self.rank = session.rank if session else 0

    def gather(self, value: Any) -> list[Any]:
        return self._session.gather(value) if self._session else [value]

    def broadcast(self, value: Any = None) -> Any:
        return self._session.broadcast(value) if self._session else value

    def agree(self, work: Callable[[], Any]) -> Any:
        """Do ``work`` on every rank; a UserError on any of them becomes one on all, before anything is allocated.

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


def run(config: dict[str, Any], session: Session | None) -> int:
    """Train once.

    Args:
        config: The checked configuration, the same on every rank.
        session: The ranks; None: server and workers all in this process.

    Returns:
        The exit code, the same on every rank.
    """
    ranks = _Ranks(session)
    num_workers = session.size - 1 if session else config["num_workers"]
    config = {**config, "num_workers": num_workers}
    try:
        facts = ranks.gather(_facts())
        placement = place(facts, config["device"], config["threads"])[ranks.rank]
        if "OMP_NUM_THREADS" not in os.environ or config["threads"]:
            torch.set_num_threads(placement.num_threads)
        task = ranks.agree(lambda: build_task(config, num_workers))
        optimizer = ranks.agree(lambda: make_optimizer(config) if ranks.rank == 0 else None)
        ranges = ranks.agree(lambda: group_ranges(task.layout, config["parameter_groups"]))
        ranks.agree(lambda: _check_alike(ranks, task))
        folder = ranks.agree(lambda: _make_folder(config) if ranks.rank == 0 else None)
    except UserError as error:
        if ranks.rank == 0:
            print(f"hydssp: {error}", file=sys.stderr)
        return USAGE
    folder = ranks.broadcast(folder)
    logs.configure_logging(ranks.rank, folder.log(ranks.rank))
    described = ranks.gather(
        environment.rank_facts(ranks.rank, "worker" if ranks.rank else "server", placement.device)
    )
    if ranks.rank == 0:
        _announce(config, folder, task, described, placement, session)
    # What dropout and the like draw differs from worker to worker, and is the same in the next run.
    torch.manual_seed(config["seed"] + 1 + ranks.rank)
    try:
        if session is None:
            _run_local(config, task, optimizer, ranges, folder)
        elif ranks.rank == 0:
            _run_server(config, task, optimizer, ranges, folder, session)
        else:
            _run_worker(config, task, session, placement)
    finally:
        logs.remove_logging()
    return int(ranks.broadcast(OK))


def _facts() -> RankFacts:
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return RankFacts(socket.gethostname(), tuple(sorted(os.sched_getaffinity(0))), num_cuda)


def _check_alike(ranks: _Ranks, task: Task) -> None:
    """Refuse ranks that see different models or data."""
    seen = ranks.gather((task.layout.digest, len(task.splits.train)))
    different = [rank for rank, s in enumerate(seen) if s != seen[0]]
    if different:
        raise UserError(
            f"model, data: rank {different[0]} has another model or another data set than rank 0 "
            f"(layout and samples {seen[different[0]]} against {seen[0]}); give every node the same files"
        )


def _make_folder(config: dict[str, Any]) -> RunFolder:
    from omegaconf import OmegaConf

    folder = create_run_folder(
        config["run_dir"], config["runs_dir"], config["paradigm"]["name"], datetime.now()
    )
    write_atomically(folder.config, OmegaConf.to_yaml(config))
    return folder


def _announce(
    config: dict[str, Any],
    folder: RunFolder,
    task: Task,
    described: list[dict[str, Any]],
    placement: Placement,
    session: Session | None,
) -> None:
    """Write environment.json and print what the run is, before it starts."""
    library = session.library if session else None
    facts = environment.collect(sys.argv, mpi_vendor=library, mpi_library=library, ranks=described)
    write_atomically(folder.environment, json.dumps(facts, indent=1) + "\n")
    paradigm = configuration.build("paradigm", config["paradigm"])
    rate, weight = config["optimizer"].get("lr"), _push_weight(config, paradigm)
    step = (
        f"learning rate {rate:g} per round"
        if paradigm.is_synchronous
        else (f"learning rate {rate:g}, per push {rate * weight:.3g} (async_weight={config['async_weight']})")
        if rate is not None
        else "learning rate: the optimizer's own default"
    )
    data = config["data"].get("name", config["data"]["_target_"])
    model = config["model"].get("name", config["model"]["_target_"])
    print(
        f"hydssp: {config['paradigm']['name']}, {config['num_workers']} workers, {model} "
        f"({task.layout.numel:,} parameters) on {data} ({len(task.splits.train):,} samples), "
        f"batch {config['batch_size']} per worker, {step}\n"
        f"{library or 'one process, no MPI'}; {placement.num_threads} compute thread(s) per rank\n"
        f"{environment.rank_map(described).text}\n"
        f"run folder: {folder.path}",
        flush=True,
    )


def _push_weight(config: dict[str, Any], paradigm: Paradigm) -> float:
    if paradigm.is_synchronous or config["async_weight"] == "one":
        return 1.0
    return 1.0 / int(config["num_workers"])


class _ServerSide:
    """The server with everything that it writes to, for either transport."""

    def __init__(
        self,
        config: dict[str, Any],
        task: Task,
        make: MakeOptimizer,
        ranges: list[tuple[int, int, dict[str, Any]]],
        folder: RunFolder,
    ) -> None:
        self.config, self.task, self.folder = config, task, folder
        self.paradigm: Paradigm = configuration.build("paradigm", config["paradigm"])
        self.model = FlatModule(task.module, task.layout)
        self.optimizer = ChunkedOptimizer(self.model.weights, make, ranges)
        self.coordinator = Coordinator(self.paradigm, config["num_workers"])
        self.evaluator = evaluation.ChildEvaluator(
            functools.partial(make_evaluation_task, config), task.layout.numel, task.layout.numpy_dtype
        )
        target = config["target_accuracy"]
        targets = sorted({*config["eval"]["targets"], *([target] if target is not None else [])})
        self.recorder = Recorder(
            folder,
            paradigm=config["paradigm"]["name"],
            seed=config["seed"],
            data_size=len(task.splits.train),
            events=config["events"],
            targets=targets,
            progress_s=config["progress_s"],
            progress=Progress(progress_s=config["progress_s"]),
            controller=self._controller_figures,
        )
        self.now: Callable[[], float] = time.monotonic

    def _controller_figures(self) -> dict[str, Any]:
        coordinator = self.coordinator
        return {
            "calls": coordinator.num_controller_calls,
            "extension_histogram": {str(r): n for r, n in sorted(coordinator.extension_histogram.items())},
        }

    def serve(self, transport: Any, drive: Callable[[server_role.Server], None]) -> None:
        """Train through ``transport``, evaluate the final weights, and save everything, early ends included."""
        config, num_samples = self.config, len(self.task.splits.train)
        self.now = transport.now
        server = server_role.Server(
            transport=transport,
            coordinator=self.coordinator,
            dealer=RangeDealer(
                num_samples, config["batch_size"], config["epochs"], rounds=self.paradigm.is_synchronous
            ),
            optimizer=self.optimizer,
            step_rule=server_role.StepRule(
                schedule=configuration.build("schedule", config["schedule"]),
                lr_clock=LrClock[config["lr_clock"]],
                push_weight=_push_weight(config, self.paradigm),
                is_mean=self.paradigm.is_synchronous,
                batch_size=config["batch_size"],
                num_samples=num_samples,
            ),
            evaluator=self.evaluator,
            evaluate_every=config["eval"]["every_epochs"] * num_samples,
            recorder=self.recorder,
            limits=server_role.Limits(config["max_updates"], config["max_time_s"], config["target_accuracy"]),
        )
        self.recorder.started(
            transport.now(),
            config["num_workers"],
            rules={k: v for k, v in config["paradigm"].items() if k != "_target_"},
            batch_size=config["batch_size"],
        )
        try:
            drive(server)
            server.evaluate_final()
        except BaseException as error:
            self._save("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            self.evaluator.close()
        summary = self._save("done", f"reached {server.ended_by or 'epochs'}")
        print_summary(summary, self.folder.path)

    def _save(self, status: str, reason: str) -> dict[str, Any]:
        buffer = io.BytesIO()
        state = self.model.module.state_dict()
        torch.save({name: tensor.detach().clone() for name, tensor in state.items()}, buffer)
        write_atomically(self.folder.weights, buffer.getvalue())
        summary = self.recorder.write_summary(self.now(), status, reason)
        self.recorder.close()
        return summary


def _make_worker(
    config: dict[str, Any], task: Task, transport: Any, module: torch.nn.Module, device: str
) -> worker_role.Worker:
    model = FlatModule(module, task.layout, device)
    model.module.train()
    order = EpochOrder(len(task.splits.train), config["seed"])
    data = Batches(task.splits.train, task.layout.dtype, device)
    return worker_role.Worker(
        transport,
        model,
        lambda epoch, start, count: data.batch(order.indices(epoch, start, count)),
        task.loss.to(device) if isinstance(task.loss, torch.nn.Module) else task.loss,
        task.straggler,
    )


def _run_server(
    config: dict[str, Any],
    task: Task,
    make: MakeOptimizer,
    ranges: list[tuple[int, int, dict[str, Any]]],
    folder: RunFolder,
    session: Session,
) -> None:
    from hydssp.transport import rma

    side = _ServerSide(config, task, make, ranges, folder)
    backoff = rma.node_backoff(session.comm)
    transport = rma.RmaServer(
        session.comm, task.layout.numel, task.layout.numpy_dtype, slots=config["transport"]["slots"]
    )

    def drive(server: server_role.Server) -> None:
        server_role.run(server, backoff)

    side.serve(transport, drive)
    transport.close()


def _run_worker(config: dict[str, Any], task: Task, session: Session, placement: Placement) -> None:
    from hydssp.transport import rma

    if placement.device != "cpu":
        torch.cuda.set_device(placement.device)
    backoff = rma.node_backoff(session.comm)
    transport = rma.RmaWorker(
        session.comm, task.layout.numel, task.layout.numpy_dtype, slots=config["transport"]["slots"]
    )
    worker = _make_worker(config, task, transport, task.module, placement.device)
    worker_role.run(worker, backoff)
    transport.close()


def _run_local(
    config: dict[str, Any],
    task: Task,
    make: MakeOptimizer,
    ranges: list[tuple[int, int, dict[str, Any]]],
    folder: RunFolder,
) -> None:
    """All roles in this process, stepped in turn."""
    import copy

    fabric = local.LocalFabric(
        config["num_workers"],
        task.layout.numel,
        task.layout.numpy_dtype,
        slots=config["transport"]["slots"],
        clock=time.monotonic,
    )
    workers = [
        _make_worker(config, task, transport, copy.deepcopy(task.module), "cpu")
        for transport in fabric.workers
    ]
    side = _ServerSide(config, task, make, ranges, folder)

    def drive(server: server_role.Server) -> None:
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

    side.serve(fabric.server, drive)
    fabric.server.close()
