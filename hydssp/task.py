"""What is trained on what: data, model, loss, optimizer and straggler, built from plain configuration.

One job: build and check them, on every rank and in the evaluation process alike. Torch is imported here, after the
configuration has been checked. Knows no transport and no role.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hydssp import config as configuration
from hydssp.backward import Loss
from hydssp.data import EpochOrder, check_splits
from hydssp.data.augment import Augment
from hydssp.data.batches import BatchMaker, make_batches
from hydssp.data.loader import Loader
from hydssp.errors import TrainingError, UserError
from hydssp.evaluation import EvaluationTask
from hydssp.straggler import Straggler
from hydssp.update.buffers import ModuleBuffers
from hydssp.update.compression import Quantized, TopK
from hydssp.update.layout import FlatModule, ParameterLayout
from hydssp.update.mitigation import Mitigation, check_mitigation
from hydssp.update.step import MakeOptimizer, check_elementwise, check_groups
from hydssp.update.wire import Wire

CALIBRATION_SAMPLES = 10_000
"""Training samples that ``buffers=recalibrate`` computes the statistics from, at most."""


@dataclass
class Task:
    """Everything that ranks build alike.

    Attributes:
        train: Training data, map-style.
        test: Test data, map-style.
        module: The model, initialised from ``seed`` alone.
        layout: Of its trainable parameters.
        buffers: Its persistent buffers.
        loss: Mean loss of a batch.
        straggler: How slow each worker is made.
        config: What all of this was built from.
    """

    train: Any
    test: Any
    module: torch.nn.Module
    layout: ParameterLayout
    buffers: ModuleBuffers
    loss: Loss
    straggler: Straggler
    config: dict[str, Any]

    @property
    def num_samples(self) -> int:
        """Training samples of one epoch, without a last batch that is left out."""
        count, batch_size = len(self.train), int(self.config["batch_size"])
        if self.config["data"]["drop_last"] and count > batch_size:
            return count - count % batch_size
        return count

    def training_batches(self, device: str = "cpu") -> BatchMaker:
        """Batches of the training data, augmented as configured."""
        seed = self.config["seed"]
        augment = Augment.from_config(self.config["data"]["augment"], seed)
        return make_batches(self.train, self.layout.dtype, device, augment, seed)

    def order(self) -> EpochOrder:
        """In which order each epoch goes through the training data."""
        num_shards = self.config["num_workers"] if self.config["data"]["sharding"] == "static" else 1
        return EpochOrder(self.num_samples, self.config["seed"], num_shards=num_shards)

    def loader(self, device: str) -> Loader:
        """Where one worker's batches come from."""
        return Loader(self.training_batches(device), self.order(), self.config["data"]["loader_workers"])


def build_task(config: dict[str, Any]) -> Task:
    """Build data, model, loss and straggler.

    Args:
        config: Checked; ``num_workers`` is the number of workers of this run.

    Raises:
        UserError: When one of them cannot be built, or they do not fit together.
    """
    torch.manual_seed(config["seed"])
    np.random.seed(config["seed"] % 2**32)  # noqa: NPY002 - for models and data of the user's that draw from it
    random.seed(config["seed"])
    data = config["data"]
    splits = configuration.build_data(data)
    check_splits(splits)
    for key in configuration.DATA_LABELS:
        said, found = data.get(key), getattr(splits.train, key, None)
        if said is not None and found is not None and not np.array_equal(said, found):
            raise UserError(f"data.{key}={data[key]}: the data has {found}; set it to that")
    module = configuration.build("model", config["model"])
    if not isinstance(module, torch.nn.Module):
        raise UserError(
            f"model._target_={config['model']['_target_']}: gives a {type(module).__name__}, not a torch.nn.Module"
        )
    task = Task(
        train=splits.train,
        test=splits.test,
        module=module,
        layout=ParameterLayout.of(module, getattr(torch, config["dtype"])),
        buffers=ModuleBuffers(module),
        loss=configuration.build("loss", config["loss"]),
        straggler=configuration.build_straggler(config["straggler"], config["num_workers"]),
        config=config,
    )
    _try_two_samples(task)
    return task


def _try_two_samples(task: Task) -> None:
    """Find out before training whether model, data and loss fit together; in evaluation mode, so nothing changes."""
    config = task.config
    try:
        inputs, targets = make_batches(task.train).batch(np.arange(min(2, len(task.train))))
        task.module.eval()
        with torch.no_grad(), warnings.catch_warnings():
            precision = autocast_dtype(config)
            with torch.autocast("cpu", precision, enabled=precision is not None):
                outputs = task.module(inputs)
            if precision is not None:
                outputs = outputs.float()
            # Torch's losses go on after it, with the mean over all pairs of an output and another sample's target.
            warnings.filterwarnings("error", "Using a target size", UserWarning)
            value = task.loss(outputs, targets)
        task.module.train()
    except UserWarning as warning:
        raise UserError(
            f"data={_name(config['data'])}: targets have shape {list(targets.shape)} and the outputs of "
            f"model={_name(config['model'])} {list(outputs.shape)}; loss={config['loss']['_target_']} needs the same "
            "shape. Give the targets that shape, or, for class numbers, use loss._target_=torch.nn.CrossEntropyLoss"
        ) from warning
    except UserError:
        raise
    except TrainingError as error:  # not a word of the model: the data cannot be read
        raise UserError(str(error)) from error
    except Exception as error:
        raise UserError(
            f"model={_name(config['model'])} does not fit data={_name(config['data'])} with "
            f"loss={config['loss']['_target_']}: {type(error).__name__}: {error}{_said_of_data(config)}"
        ) from error
    if value.ndim != 0:
        raise UserError(
            f"loss._target_={config['loss']['_target_']}: gives a tensor of shape {list(value.shape)}; allowed is the "
            "mean loss of the batch, a scalar"
        )


def _said_of_data(config: dict[str, Any]) -> str:
    """What a model is told of the data, which a user who brings data of another shape must change."""
    said = [f"data.{key}={config['data'][key]}" for key in configuration.DATA_LABELS if key in config["data"]]
    return f". The model is told {' and '.join(said)}: set what is not so" if said else ""


def autocast_dtype(config: dict[str, Any]) -> torch.dtype | None:
    """The format of the workers' passes; None: that of the weights."""
    return {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config["precision"]]


def wires(config: dict[str, Any], layout: ParameterLayout) -> tuple[Wire, Wire]:
    """In which formats weights and gradients travel."""
    wire = config["wire"]
    push = Wire(wire["push"], layout.dtype)
    if wire["compression"] == "topk":
        push = TopK(layout.numel, wire["ratio"])
    elif wire["compression"] == "quantize":
        push = Quantized(layout.numel, wire["bits"], config["seed"])
    return Wire(wire["pull"], layout.dtype), push


def _name(node: dict[str, Any]) -> str:
    """The group's label, unless the target is no longer the group's."""
    target = str(node["_target_"])
    return str(node.get("name", target)) if target.startswith("hydssp.") else target


def describe(config: dict[str, Any], task: Task) -> str:
    """The task in words, for the first line of a run."""
    return (
        f"{_name(config['model'])} ({task.layout.numel:,} parameters) on {_name(config['data'])} "
        f"({len(task.train):,} samples)"
    )


def describe_formats(config: dict[str, Any]) -> str:
    """What computing and travelling in less than the weights' own precision there is, in words; empty: none."""
    wire = config["wire"]
    pushed = {
        "none": "" if wire["push"] == "fp32" else wire["push"],
        "topk": f"top-k, {wire['ratio']:g} of the elements",
        "quantize": f"{wire['bits']} bits",
    }[wire["compression"]]
    if pushed and wire["error_feedback"] and wire["compression"] == "none":
        pushed += " with error feedback"
    found = {
        "computed in": "" if config["precision"] == "fp32" else config["precision"],
        "pushed as": pushed,
        "pulled as": "" if wire["pull"] == "fp32" else wire["pull"],
    }
    return ", ".join(f"{what} {how}" for what, how in found.items() if how)


def batch_note(num_samples: int, batch_size: int, num_workers: int, num_batches: int = 1) -> str:
    """What to say of a batch size that the training data cannot give every worker; empty: nothing.

    Args:
        num_samples: Of the training data.
        batch_size: As configured.
        num_workers: P.
        num_batches: Batches in a full push.
    """
    if batch_size * num_batches * num_workers <= num_samples:
        return ""
    what = f"{num_batches} batches" if num_batches > 1 else "a full batch"
    found = f"{num_workers} workers share {num_samples:,} training samples, not enough for {what} for each"
    if batch_size * num_batches > num_samples:
        many = f"{num_batches} batches of a push" if num_batches > 1 else "batch"
        found = f"there are only {num_samples:,} training samples, and no {many} can hold more"
    remedies = []
    if size := num_samples // (num_workers * num_batches):
        remedies.append(f"batch_size={size} or less")
    if num_batches > 1 and (batches := num_samples // (num_workers * batch_size)):
        remedies.append(f"at most {batches} batches behind a push (accumulate x local_steps)")
    remedy = (
        " or ".join(remedies) or f"fewer workers{' and batches behind a push' if num_batches > 1 else ''}"
    )
    return f"batch_size={batch_size}: {found}; {remedy} lets all work"


def make_evaluation_task(config: dict[str, Any]) -> EvaluationTask:
    """What the evaluation process needs; called there."""
    task = build_task(config)
    model = FlatModule(task.module, task.layout)
    test = make_batches(task.test, task.layout.dtype)

    def calibration() -> list[torch.Tensor]:
        train = make_batches(task.train, task.layout.dtype)
        num_samples = min(len(task.train), CALIBRATION_SAMPLES)
        indices = EpochOrder(len(task.train), config["seed"]).indices(0, 0, num_samples)
        size = max(2, config["batch_size"])
        return [train.batch(indices[i : i + size])[0] for i in range(0, max(1, num_samples - size + 1), size)]

    return EvaluationTask(
        model,
        task.buffers,
        lambda start, count: test.batch(np.arange(start, start + count)),
        len(task.test),
        task.loss,
        calibration if config["buffers"] == "recalibrate" else None,
    )


def make_optimizer(config: dict[str, Any]) -> MakeOptimizer:
    """The optimizer's constructor with the configured arguments.

    Raises:
        UserError: When it cannot be built, is not elementwise, or does not go with the mitigation.
    """
    make: MakeOptimizer = configuration.build("optimizer", {**config["optimizer"], "_partial_": True})
    check_elementwise(make)
    groups = config["parameter_groups"]
    check_groups(make, groups)
    if config["local_steps"] > 1:
        _check_local_steps(config, make([{"params": [torch.nn.Parameter(torch.zeros(1))]}]))
    mitigation = make_mitigation(config)
    is_synchronous = configuration.build_paradigm(config).is_synchronous
    check_mitigation(
        mitigation,
        make([{"params": [torch.nn.Parameter(torch.zeros(1))]}]),
        groups,
        is_synchronous=is_synchronous,
    )
    if (
        mitigation.is_compiled and not is_synchronous
    ):  # in rounds nothing is stale, and the kernel never called
        print("hydssp: compiling the mitigation's kernel, some 20 s the first time", flush=True)
        mitigation.probe(getattr(torch, config["dtype"]))
    return make


def _check_local_steps(config: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Refuse what a worker's own steps of plain SGD would not stand for.

    Raises:
        UserError: Naming the key.
    """
    steps = f"local_steps={config['local_steps']}"
    if not isinstance(optimizer, torch.optim.SGD):
        raise UserError(
            f"{steps}: allowed with torch.optim.SGD only, and optimizer is {type(optimizer).__name__}, whose learning "
            "rate is not that of the workers' own steps, plain SGD; use optimizer=sgd or local_steps=1"
        )
    if optimizer.defaults["maximize"]:
        raise UserError(
            f"{steps}: the workers' own steps go down; set optimizer.maximize=false or local_steps=1"
        )
    if "lr" not in config["optimizer"]:
        raise UserError(f"{steps}: the workers' own steps need optimizer.lr; set it, e.g. +optimizer.lr=0.02")
    for number, group in enumerate(config["parameter_groups"]):
        if "lr" in group:
            raise UserError(
                f"{steps}: the workers' own steps have one learning rate, and parameter_groups[{number}].lr="
                f"{group['lr']} asks for another; leave it out, or set local_steps=1"
            )


def make_mitigation(config: dict[str, Any]) -> Mitigation:
    """What is done to stale gradients; not yet bound to any weights.

    Raises:
        UserError: When it cannot be built.
    """
    mitigation = configuration.build("mitigation", config["mitigation"])
    if not isinstance(mitigation, Mitigation):
        raise UserError(
            f"mitigation._target_={config['mitigation']['_target_']}: gives a {type(mitigation).__name__}; allowed is "
            "a class that derives from hydssp.update.mitigation.Mitigation"
        )
    return mitigation
