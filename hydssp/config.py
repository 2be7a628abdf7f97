"""The configuration: its schema, its checks, and the building of what it names.

One job: turn what Hydra composed into checked plain data on rank 0, and plain data into objects on every rank. The
schema holds types and defaults of the keys; the meaning of a group's keys is checked by the class that the group
builds. Does not import torch or MPI, so that a mistake is reported before either is loaded.
"""

from __future__ import annotations

import inspect
import math
import os
import traceback
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import Enum
from importlib.resources import files
from typing import Any, Optional

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from hydssp.coordination.paradigms import DSSP, Paradigm
from hydssp.coordination.ranges import Dealer, RangeDealer, ShardDealer
from hydssp.errors import UserError
from hydssp.observe.run_folder import RunFolder, create_run_folder, write_atomically
from hydssp.server import Limits
from hydssp.update.schedule import LrClock, Schedule, WarmUp

# omegaconf reads these annotations at run time and wants Optional[...] in them.
# ruff: noqa: UP045


class Device(Enum):
    """Where the workers compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class ElementType(Enum):
    """Of weights and gradients."""

    float32 = "float32"
    float64 = "float64"


class Format(Enum):
    """A floating-point format: of the workers' passes, of what travels; fp32 means as ``dtype`` says."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Buffers(Enum):
    """Whose buffers are evaluated and saved; the names of ``update.buffers.BufferPolicy``, which needs torch."""

    average = "average"
    worker0 = "worker0"
    recalibrate = "recalibrate"


class NonFinite(Enum):
    """What happens to a gradient that contains inf or nan."""

    reject = "reject"
    abort = "abort"


class AsyncWeight(Enum):
    """Learning rate of a step made from single pushes: 1/P of the configured one, or the full one."""

    per_worker = "per_worker"
    one = "one"


class Events(Enum):
    """How much of the run goes to events.jsonl."""

    full = "full"
    sample = "sample"
    off = "off"


class Compression(Enum):
    """How pushes are made shorter than one element for each weight."""

    none = "none"
    topk = "topk"
    quantize = "quantize"


@dataclass
class ParadigmConfig:
    """Any paradigm: a name for logs and folders, and the class that is built."""

    name: str = MISSING
    _target_: str = MISSING


@dataclass
class SSPConfig(ParadigmConfig):
    """See ``coordination.paradigms.SSP``."""

    s: int = 3


@dataclass
class DSSPConfig(ParadigmConfig):
    """See ``coordination.paradigms.DSSP``."""

    s_lower: int = 3
    s_upper: int = 15
    grant: str = DSSP.grant
    release: str = DSSP.release
    ask: str = DSSP.ask
    cap: str = DSSP.cap
    late: str = DSSP.late
    interval: str = DSSP.interval


@dataclass
class RecordedConfig(ParadigmConfig):
    """See ``recorded.Recorded``."""

    run: str = MISSING


@dataclass
class TransportConfig:
    """How server and workers talk: ``rma`` or ``two_sided`` under mpirun, ``local`` in one process."""

    name: str = MISSING
    slots: int = 4


@dataclass
class RmaConfig(TransportConfig):
    """One-sided windows."""

    request_based: bool = False


class Where(Enum):
    """Where evaluations of the run run: beside the server, or after training from stored snapshots."""

    server = "server"
    after = "after"


@dataclass
class EvalConfig:
    """When the weights are evaluated on the test data; always at the end of the run."""

    every_epochs: float = 1.0
    targets: list[float] = field(default_factory=list)
    where: Where = Where.server


@dataclass
class ClipConfig:
    """Bounds on each worker's gradient before its push."""

    value: Optional[float] = None
    norm: Optional[float] = None


@dataclass
class WarmupConfig:
    """See ``update.schedule.WarmUp``."""

    epochs: float = 0.0
    start: Optional[float] = None


@dataclass
class WireConfig:
    """In which format vectors travel."""

    push: Format = Format.fp32
    pull: Format = Format.fp32
    error_feedback: bool = False
    compression: Compression = Compression.none
    ratio: float = 0.01
    bits: int = 4


@dataclass
class TrainConfig:
    """All top-level keys of ``conf/train.yaml``; that file says what each means."""

    seed: int = 0
    epochs: Optional[float] = 20
    max_updates: Optional[int] = None
    max_time_s: Optional[float] = None
    target_accuracy: Optional[float] = None
    batch_size: int = 32
    accumulate: int = 1
    local_steps: int = 1
    num_workers: Optional[int] = None
    device: Device = Device.auto
    dtype: ElementType = ElementType.float32
    precision: Format = Format.fp32
    wire: WireConfig = field(default_factory=WireConfig)
    threads: Optional[int] = None
    async_weight: Optional[AsyncWeight] = None
    lr_clock: LrClock = LrClock.samples
    buffers: Buffers = Buffers.average
    clip: ClipConfig = field(default_factory=ClipConfig)
    nonfinite: NonFinite = NonFinite.reject
    nonfinite_limit: int = 100
    stall_limit_s: Optional[float] = 600.0
    tensorboard: Optional[bool] = None
    events: Events = Events.full
    progress_s: float = 5.0
    run_dir: Optional[str] = None
    runs_dir: str = "runs"
    paradigm: ParadigmConfig = MISSING
    transport: TransportConfig = MISSING
    eval: EvalConfig = field(default_factory=EvalConfig)
    model: Any = MISSING
    data: Any = MISSING
    optimizer: Any = MISSING
    parameter_groups: list[Any] = field(default_factory=list)
    schedule: Any = MISSING
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    mitigation: Any = MISSING
    straggler: Any = MISSING
    loss: Any = MISSING


@dataclass
class NetworkConfig:
    """See ``simulation.cluster.Network``."""

    clock_s: float = 2e-5
    grant_s: float = 2e-5
    pull_s: float = 0.0
    push_s: float = 0.0
    bandwidth: Optional[float] = None


@dataclass
class ServerCostsConfig:
    """See ``simulation.cluster.ServerCosts``."""

    handle_s: float = 5e-5
    apply_s: float = 1e-4
    poll_s: float = 0.0


@dataclass
class SimulationConfig:
    """What is simulated beside the computing times."""

    train: bool = False
    num_samples: int = 50_000
    num_parameters: int = 1_000_000
    group_size: int = 1
    allreduce_s: float = 0.0
    network: NetworkConfig = field(default_factory=NetworkConfig)
    server: ServerCostsConfig = field(default_factory=ServerCostsConfig)
    crashes: list[Any] = field(default_factory=list)


@dataclass
class SimulateConfig(TrainConfig):
    """All top-level keys of ``conf/simulate.yaml``."""

    cluster: Any = MISSING
    simulate: SimulationConfig = field(default_factory=SimulationConfig)
    replay: Optional[str] = None
    advise: Optional[str] = None


def register() -> None:
    """Put the schemas where ``conf/`` refers to them."""
    OmegaConf.register_new_resolver("choices", _choices, replace=True)
    store = ConfigStore.instance()
    # In a group of their own, so that they are not offered as paradigms and transports.
    for name, node in (
        ("train", TrainConfig),
        ("simulate", SimulateConfig),
        ("paradigm", ParadigmConfig),
        ("ssp", SSPConfig),
        ("dssp", DSSPConfig),
        ("recorded", RecordedConfig),
        ("transport", TransportConfig),
        ("rma", RmaConfig),
    ):
        store.store(group="schema", name=name, node=node)


def _choices(*, _root_: DictConfig) -> str:
    """For ``--help``: what each group of the configuration offers, a line each."""
    conf = files("hydssp.conf")
    groups = sorted(group for group in _root_.hydra.runtime.choices if "/" not in str(group))
    offered = {
        group: sorted(
            f.name.removesuffix(".yaml") for f in (conf / group).iterdir() if f.name.endswith(".yaml")
        )
        for group in groups
    }
    return "\n".join(f"{group}: {', '.join(names)}" for group, names in offered.items())


def to_plain(config: DictConfig) -> dict[str, Any]:
    """The configuration as nested dicts, lists, strings and numbers, all interpolations resolved.

    Raises:
        UserError: When a mandatory value is missing or an interpolation leads nowhere.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True, enum_to_str=True)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key}: has no value; give one, {error.full_key}=...") from error
    except Exception as error:
        raise UserError(f"configuration: {' '.join(str(error).split())}") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def build(key: str, node: dict[str, Any], /, **arguments: Any) -> Any:
    """Build what ``node`` names with ``_target_``.

    Args:
        key: The configuration key, for messages.
        node: ``_target_`` and its arguments; a ``name`` beside them is only a label and is left out unless the target
            takes it.
        **arguments: Further arguments.

    Raises:
        UserError: When the target cannot be imported, does not take the arguments, or refuses them.
    """
    if not isinstance(node, dict) or "_target_" not in node:
        raise UserError(f"{key}={node!r}: allowed is a group of conf/{key} or a mapping with _target_")
    node = {k: v for k, v in node.items() if k != "name"}
    _check_switches(key, node)
    try:
        return hydra.utils.instantiate(node, **arguments, _convert_="all")
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, UserError):
                raise cause from None
            innermost, cause = cause, cause.__cause__
        where = traceback.extract_tb(innermost.__traceback__)
        place = f" ({where[-1].filename}:{where[-1].lineno})" if where else ""
        if os.path.join("hydra", "_internal") in place:
            place = ""  # the call itself was refused: the user's code has not been reached
        given = [k for k in node if not k.startswith("_")]
        removal = f"; the keys given are {', '.join(given)}, take one out with ~{key}.KEY" if given else ""
        raise UserError(
            f"{key}._target_={node['_target_']}: building it failed with {type(innermost).__name__}: "
            f"{innermost}{place}{removal}"
        ) from error


def _check_switches(key: str, node: dict[str, Any]) -> None:
    """Refuse words for arguments whose default is true or false: any word, "off" too, would count as true.

    Raises:
        UserError: Naming the key.
    """
    try:
        parameters = inspect.signature(hydra.utils.get_object(node["_target_"])).parameters
    except Exception:  # whatever is wrong with the target, building it says so in full
        return
    for name, value in node.items():
        is_switch = name in parameters and isinstance(parameters[name].default, bool)
        _require(not (is_switch and isinstance(value, str)), f"{key}.{name}", value, "true or false")


DATA_LABELS = ("shape", "num_classes")
"""Said once in the data group, for the models to refer to."""
_DATA_USE = ("sharding", "drop_last", "augment", "loader_workers")
"""Keys of the data group that say how the data are used, not which they are."""


def build_data(node: dict[str, Any]) -> Any:
    """The data set, without the keys that are not for its constructor; labels go to one that takes them."""
    taken: set[str] = set()
    if isinstance(node, dict) and "_target_" in node:
        try:
            taken = set(inspect.signature(hydra.utils.get_object(node["_target_"])).parameters)
        except Exception:  # whatever is wrong with the target, building it says so in full
            taken = set()
    left_out = {key for key in (*DATA_LABELS, *_DATA_USE) if key not in taken}
    return build("data", {key: value for key, value in node.items() if key not in left_out})


def build_straggler(node: dict[str, Any], num_workers: int) -> Any:
    """The straggler of a run with ``num_workers`` workers; one that takes turns among them is told their number."""
    target = hydra.utils.get_class(node["_target_"])
    knows_number = "num_workers" in inspect.signature(target).parameters
    straggler = build("straggler", node, **({"num_workers": num_workers} if knows_number else {}))
    straggler.check(num_workers)
    return straggler


def build_paradigm(config: dict[str, Any]) -> Paradigm:
    """The paradigm of the run."""
    paradigm: Paradigm = build("paradigm", config["paradigm"])
    return paradigm


def build_schedule(config: dict[str, Any]) -> Schedule:
    """The learning-rate schedule of the run, with its warm-up."""
    schedule: Schedule = build("schedule", config["schedule"])
    epochs, start = config["warmup"]["epochs"], config["warmup"]["start"]
    # Before the ranks are counted there may be no number of workers; the checks do not depend on it.
    warm = WarmUp(schedule, epochs, 1.0 / (config["num_workers"] or 1) if start is None else start)
    return warm if epochs else schedule


def samples_per_push(config: dict[str, Any]) -> int:
    """Samples of a full batch range."""
    return int(config["batch_size"] * config["accumulate"] * config["local_steps"])


def build_dealer(config: dict[str, Any], num_samples: int, is_synchronous: bool) -> Dealer:
    """What deals ``num_samples`` an epoch to ``num_workers`` workers, in rounds if the paradigm is synchronous."""
    stock = (num_samples, samples_per_push(config), config["epochs"])
    if config["data"]["sharding"] == "static":
        return ShardDealer(*stock, config["num_workers"], rounds=is_synchronous)
    return RangeDealer(*stock, rounds=is_synchronous, lookahead=config["data"]["loader_workers"] > 0)


def build_limits(config: dict[str, Any]) -> Limits:
    """When the run ends besides running out of epochs."""
    return Limits(
        max_updates=config["max_updates"],
        max_time_s=config["max_time_s"],
        target_accuracy=config["target_accuracy"],
        rejected_in_a_row=1 if config["nonfinite"] == "abort" else config["nonfinite_limit"],
        stall_s=config["stall_limit_s"],
    )


def claim_run_folder(config: dict[str, Any], now: datetime) -> RunFolder:
    """Make the run's folder and write the configuration into it.

    Raises:
        UserError: When the folder is taken or cannot be written to.
    """
    folder = create_run_folder(config["run_dir"], config["runs_dir"], config["paradigm"]["name"], now)
    try:
        write_atomically(folder.config, OmegaConf.to_yaml(config))
    except OSError as error:
        raise UserError(
            f"run_dir={folder.path}: cannot be written to ({error}); choose another folder"
        ) from error
    return folder


def _require(is_right: bool, key: str, value: Any, allowed: str) -> None:
    if not is_right:
        raise UserError(f"{key}={value}: allowed is {allowed}")


def _check_formats(config: dict[str, Any]) -> None:
    wire = config["wire"]
    formats = {"precision": config["precision"], "wire.push": wire["push"], "wire.pull": wire["pull"]}
    for key, value in formats.items():
        if config["dtype"] == "float64" and value != "fp32":
            raise UserError(
                f"{key}={value}: would throw away what dtype=float64 is for; use dtype=float32, or {key}=fp32"
            )
    compression = wire["compression"]
    if compression != "none" and (wire["push"] != "fp32" or config["dtype"] == "float64"):
        raise UserError(
            f"wire.compression={compression}: compresses gradients of dtype=float32, and wire.push={wire['push']} and "
            f"dtype={config['dtype']} are another form; set wire.push=fp32 and dtype=float32, or wire.compression=none"
        )
    most = "a number above 0 and at most 0.5 (each element travels with its place, 8 bytes in place of 4)"
    _require(0 < wire["ratio"] <= 0.5, "wire.ratio", wire["ratio"], most)
    _require(wire["bits"] in (4, 8), "wire.bits", wire["bits"], "4, 8")
    if wire["error_feedback"] and wire["push"] == "fp32" and compression == "none":
        raise UserError(
            "wire.error_feedback=true: wire.push=fp32 rounds nothing, so that there is no error to feed back; set "
            "wire.push=bf16 or fp16, or wire.error_feedback=false"
        )


def notes(config: dict[str, Any], *, is_synchronous: bool) -> list[str]:
    """What of a right configuration has no effect, in words: keys that belong to a choice that was not made.

    No mistakes: several runs with one of them on and off are a usual thing to ask for.

    Args:
        config: Checked.
        is_synchronous: Whether the paradigm makes updates of whole rounds.
    """
    wire, defaults = config["wire"], WireConfig()
    found = []
    for key, choice in (("ratio", "topk"), ("bits", "quantize")):
        if wire["compression"] != choice and wire[key] != getattr(defaults, key):
            found.append(f"wire.{key}={wire[key]}: no effect without wire.compression={choice}")
    if config["warmup"]["start"] is not None and not config["warmup"]["epochs"]:
        found.append(f"warmup.start={config['warmup']['start']}: no effect without warmup.epochs")
    mitigation = config["mitigation"].get("name", "none")
    if mitigation != "none" and is_synchronous:
        paradigm = config["paradigm"]["name"]
        found.append(
            f"mitigation={mitigation}: no effect with paradigm={paradigm}, in which nothing is stale"
        )
    return found


def check(config: dict[str, Any]) -> None:
    """Check everything that needs neither torch nor MPI.

    Raises:
        UserError: Naming the key, its value and what is allowed.
    """
    is_simulation = "simulate" in config
    known = {f.name for f in fields(SimulateConfig if is_simulation else TrainConfig)}
    for key in set(config) - known:
        raise UserError(f"{key}={config[key]}: there is no such key; allowed is {', '.join(sorted(known))}")
    for key in known - set(config):
        raise UserError(
            f"{key}: deleted from the configuration; leave it in, null means none where that is allowed"
        )

    def check_number(key: str, least: float, *, exclusive: bool = False, most: float = math.inf) -> None:
        value: Any = config
        for part in key.split("."):
            value = value[part]
        if value is None:
            return
        above = value > least if exclusive else value >= least
        words = f"a number {'above' if exclusive else 'of at least'} {least}"
        if most != math.inf:
            words += f" and at most {most}"
        _require(math.isfinite(value) and above and value <= most, key, value, words)

    check_number("seed", 0, most=2**63 - 1)
    check_number("epochs", 0, exclusive=True)
    check_number("max_updates", 1)
    check_number("max_time_s", 0, exclusive=True)
    check_number("target_accuracy", 0, exclusive=True, most=1)
    check_number("batch_size", 1)
    check_number("accumulate", 1)
    check_number("local_steps", 1)
    check_number("num_workers", 1)
    check_number("threads", 1)
    check_number("progress_s", 0, exclusive=True)
    check_number("transport.slots", 3, most=64)
    check_number("eval.every_epochs", 0, exclusive=True)
    check_number("clip.value", 0, exclusive=True)
    check_number("clip.norm", 0, exclusive=True)
    check_number("nonfinite_limit", 1)
    check_number("stall_limit_s", 1)
    if is_simulation:
        for key in ("num_samples", "num_parameters", "group_size"):
            check_number(f"simulate.{key}", 1)
        check_number("simulate.allreduce_s", 0)
    _check_formats(config)
    data = config["data"]
    _require(data["sharding"] in ("dynamic", "static"), "data.sharding", data["sharding"], "dynamic, static")
    _require(isinstance(data["drop_last"], bool), "data.drop_last", data["drop_last"], "true, false")
    if config["eval"]["where"] == "after" and config["target_accuracy"] is not None:
        raise UserError(
            "eval.where=after: nothing is evaluated during the run, so target_accuracy="
            f"{config['target_accuracy']} would never end it; use eval.where=server, or eval.targets"
        )
    for target in config["eval"]["targets"]:
        _require(
            0 < target <= 1, "eval.targets", config["eval"]["targets"], "a list of accuracies above 0 up to 1"
        )
    ends = ("epochs", "max_updates", "max_time_s", "target_accuracy")
    if all(config[key] is None for key in ends):
        raise UserError(f"{', '.join(ends)} are all null: the run would never end; set at least one")
    name, names = config["transport"]["name"], ("rma", "two_sided", "local")
    _require(name in names, "transport.name", name, ", ".join(names))
    build("paradigm", config["paradigm"])
    build_schedule(config)
    for number, group in enumerate(config["parameter_groups"]):
        if not isinstance(group, dict) or not isinstance(group.get("pattern"), str):
            raise UserError(
                f"parameter_groups[{number}]={group!r}: allowed is a mapping with a pattern (of parameter names) and "
                'options of the optimizer, e.g. {pattern:"*.bias",weight_decay:0}'
            )
