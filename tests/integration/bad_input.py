"""A hundred mistakes, each with the words that its one message must contain.

Run as a program it tries all of them on 1, 3 and 5 ranks and prints a table, each in a start of its own;
``test_bad_input.py`` tries all of them in one process, those that need torch in one start on 3 ranks as well, and a few
in a start of their own.

    python tests/integration/bad_input.py
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

BEFORE_TORCH = [
    # unknown keys, groups and choices
    (["batchsize=3"], ["batchsize", "did you mean batch_size"]),
    (["foo=1"], ["foo", "no such key"]),
    (["++foo=1"], ["foo=1", "no such key"]),
    (["paradigm=nope"], ["paradigm=nope", "dssp_bounded"]),
    (["paradigm=dsp"], ["paradigm=dsp", "did you mean dssp"]),
    (["model=vgg"], ["model=vgg", "lenet"]),
    (["data=imagenet"], ["data=imagenet", "digits"]),
    (["optimizer=lamb"], ["optimizer=lamb", "sgd"]),
    (["schedule=linear"], ["schedule=linear", "step"]),
    (["mitigation=gapaware"], ["mitigation=gapaware", "did you mean gap_aware"]),
    (["mitigation.granularity=tensor"], ["mitigation.granularity", "no such key"]),
    (["straggler=slow"], ["straggler=slow", "constant"]),
    (["transport=tcp"], ["transport=tcp", "rma"]),
    (["paradigm.s=3"], ["paradigm.s", "s_lower"]),
    (["paradigm=ssp", "paradigm.s_lower=1"], ["paradigm.s_lower", "allowed is"]),
    (["paradigm=bsp", "paradigm.s=1"], ["paradigm.s"]),
    (["eval.every=2"], ["eval.every", "every_epochs"]),
    (["clip.max=2"], ["clip.max", "norm"]),
    (["data.rot=x"], ["data.rot", "no such key"]),
    (["transport.slot=5"], ["transport.slot", "did you mean slots"]),
    (["transport=local", "transport.request_based=true"], ["transport.request_based"]),
    (["hydra.foo=1"], ["hydra.foo"]),
    # what is no override at all
    (["a b"], ["a b", "key=value"]),
    (["batch_size=[1"], ["batch_size=[1", "not an override"]),
    (["batch_size"], ["batch_size"]),
    (["=3"], ["override"]),
    (["--no-such-flag"], ["--no-such-flag"]),
    (["+batch_size=3"], ["batch_size"]),
    (["~nothing"], ["nothing"]),
    (["~epochs"], ["epochs", "deleted"]),
    (["~paradigm"], ["paradigm"]),
    (["epochs=1,2"], ["epochs=1,2"]),
    (["paradigm=[bsp,asp]"], ["paradigm"]),
    # wrong types
    (["batch_size=abc"], ["batch_size=abc", "Integer"]),
    (["batch_size=1.5"], ["batch_size=1.5", "Integer"]),
    (["batch_size=null"], ["batch_size"]),
    (["seed=x"], ["seed=x", "Integer"]),
    (["epochs=many"], ["epochs=many", "Float"]),
    (["epochs="], ["epochs="]),
    (["max_updates=1.5"], ["max_updates=1.5"]),
    (["num_workers=2.5"], ["num_workers=2.5"]),
    (["threads=all"], ["threads=all"]),
    (["device=tpu"], ["device=tpu", "cuda"]),
    (["dtype=float16"], ["dtype=float16", "float32"]),
    (["events=some"], ["events=some", "sample"]),
    (["buffers=mean"], ["buffers=mean", "average"]),
    (["nonfinite=ignore"], ["nonfinite=ignore", "reject"]),
    (["eval.where=elsewhere"], ["eval.where=elsewhere", "after"]),
    (["lr_clock=time"], ["lr_clock=time", "samples"]),
    (["async_weight=half"], ["async_weight=half", "per_worker"]),
    (["tensorboard=maybe"], ["tensorboard=maybe"]),
    (["paradigm.s_upper=1.5"], ["paradigm.s_upper=1.5"]),
    (["eval.targets=high"], ["eval.targets"]),
    (["clip.norm=big"], ["clip.norm=big"]),
    (["batch_size=${oops}"], ["oops"]),
    (["data.num_classes=${nothing.there}"], ["nothing"]),
    # values out of range
    (["batch_size=0"], ["batch_size=0", "at least 1"]),
    (["batch_size=-4"], ["batch_size=-4"]),
    (["accumulate=0"], ["accumulate=0", "at least 1"]),
    (["local_steps=0"], ["local_steps=0", "at least 1"]),
    (["precision=fp8"], ["precision=fp8", "bf16"]),
    (["precision=fp16", "dtype=float64"], ["precision=fp16", "dtype=float64"]),
    (["wire.push=int8"], ["wire.push=int8", "bf16"]),
    (["wire=bf16"], ["wire"]),
    (["wire.pull=bf16", "dtype=float64"], ["wire.pull=bf16", "dtype=float64"]),
    (["wire.compression=zip"], ["wire.compression=zip", "topk"]),
    (["wire.compression=quantize", "dtype=float64"], ["wire.compression=quantize", "dtype=float64"]),
    (["wire.ratio=2"], ["wire.ratio=2", "at most 0.5"]),
    (["wire.bits=16"], ["wire.bits=16", "4, 8"]),
    (["wire.error_feedback=true"], ["wire.error_feedback=true", "wire.push=fp32"]),
    (["seed=-1"], ["seed=-1"]),
    (["epochs=0"], ["epochs=0"]),
    (["epochs=-1"], ["epochs=-1"]),
    (["epochs=nan"], ["epochs=nan"]),
    (["epochs=inf"], ["epochs=inf"]),
    (["max_updates=0"], ["max_updates=0"]),
    (["max_time_s=0"], ["max_time_s=0"]),
    (["max_time_s=-5"], ["max_time_s=-5"]),
    (["target_accuracy=96"], ["target_accuracy=96", "at most 1"]),
    (["target_accuracy=0"], ["target_accuracy=0"]),
    (["num_workers=0"], ["num_workers=0"]),
    (["threads=0"], ["threads=0"]),
    (["progress_s=0"], ["progress_s=0"]),
    (["stall_limit_s=0"], ["stall_limit_s=0"]),
    (["nonfinite_limit=0"], ["nonfinite_limit=0"]),
    (["transport.slots=2"], ["transport.slots=2", "at least 3"]),
    (["transport.slots=1000"], ["transport.slots=1000"]),
    (["transport.name=pigeon"], ["transport.name=pigeon", "two_sided"]),
    (["eval.every_epochs=0"], ["eval.every_epochs=0"]),
    (["eval.targets=[2]"], ["eval.targets"]),
    (["clip.norm=0"], ["clip.norm=0"]),
    (["clip.value=-1"], ["clip.value=-1"]),
    (["data.sharding=random"], ["data.sharding=random", "static"]),
    (["data.drop_last=3"], ["data.drop_last=3"]),
    (["paradigm.s_lower=-1"], ["paradigm.s_lower=-1"]),
    (["paradigm.s_upper=2"], ["paradigm.s_upper=2", "s_lower"]),
    (["paradigm.grant=maybe"], ["paradigm.grant='maybe'", "exact"]),
    (["paradigm.release=never"], ["paradigm.release='never'"]),
    (["paradigm.ask=nobody"], ["paradigm.ask='nobody'"]),
    (["paradigm.cap=sky"], ["paradigm.cap='sky'", "run_ahead"]),
    (["paradigm.late=yes"], ["paradigm.late"]),
    (["paradigm.interval=mean"], ["paradigm.interval='mean'"]),
    (["paradigm=ssp", "paradigm.s=-2"], ["paradigm.s=-2"]),
    (["schedule=step"], ["schedule.milestones"]),
    (["schedule=step", "schedule.milestones=[]"], ["schedule.milestones"]),
    (["schedule=step", "schedule.milestones=[2,1]"], ["schedule.milestones"]),
    (["schedule=step", "schedule.milestones=[1]", "schedule.gamma=2"], ["schedule.gamma=2"]),
    (["schedule=cosine", "epochs=null", "max_updates=9"], ["schedule.epochs=None", "above 0"]),
    (["warmup.epochs=-1"], ["warmup.epochs=-1"]),
    (["parameter_groups=[{lr:1}]"], ["parameter_groups[0]", "pattern"]),
    (["--multirun", "paradigm=bsp,asp", "run_dir=x"], ["run_dir=x", "runs_dir"]),
    # combinations without a meaning
    (["epochs=null"], ["never end"]),
    (["eval.where=after", "target_accuracy=0.9"], ["eval.where=after", "target_accuracy"]),
]
AFTER_TORCH = [
    (
        ["mitigation=gap_aware", "mitigation.granularity=row"],
        ["mitigation.granularity=row", "element, tensor, scalar"],
    ),
    (["mitigation=dana", "paradigm=bsp"], ["mitigation=dana", "optimizer.nesterov=true"]),
    (["mitigation=dana", "optimizer=adamw"], ["mitigation=dana optimizer=AdamW", "momentum above 0"]),
    (["mitigation=dana_gap_aware", "optimizer.momentum=0"], ["mitigation=dana_gap_aware", "momentum=0"]),
    (
        [
            "mitigation=gap_aware",
            "optimizer._target_=torch.optim.RMSprop",
            "~optimizer.nesterov",
            "~optimizer.fused",
        ],
        ["mitigation=gap_aware", "RMSprop", "staleness_aware"],
    ),
    (["mitigation=delay_compensated", "mitigation.strength=-1"], ["mitigation.strength=-1"]),
    (["model=lenet"], ["model=lenet", "8x8"]),
    (["model._target_=torch.nn.Nothing"], ["model._target_=torch.nn.Nothing"]),
    (["model._target_=nowhere.Net"], ["model._target_=nowhere.Net"]),
    (["model.hidden=[0]"], ["hidden"]),
    (["model.hidden=x"], ["model"]),
    (["+model.depth=3"], ["depth"]),
    (["model=resnet", "model.depth=21"], ["depth", "21"]),
    (["data=fashion_mnist", "data.root=nowhere", "model=lenet"], ["nowhere", "t10k-labels-idx1-ubyte"]),
    (["data=cifar10", "data.root=nowhere", "model=resnet"], ["nowhere", "cifar-10-batches-py"]),
    (["data=cifar10", "model=resnet"], ["data.root"]),
    (["data=synthetic", "data.num_samples=0", "model=resnet"], ["num_samples"]),
    (["data.num_classes=11"], ["data.num_classes=11", "10"]),
    (["data.shape=[1,9,9]"], ["data.shape", "8"]),
    (["data.augment={pad: -1}"], ["pad"]),
    (["data.loader_workers=-1"], ["data.loader_workers"]),
    (["optimizer._target_=torch.optim.LBFGS"], ["optimizer", "LBFGS"]),
    (["optimizer._target_=torch.optim.Adafactor"], ["optimizer", "Adafactor"]),
    (["local_steps=2", "optimizer=adamw"], ["local_steps=2", "SGD", "AdamW"]),
    (["local_steps=2", "+optimizer.maximize=true"], ["local_steps=2", "optimizer.maximize"]),
    (["local_steps=2", "~optimizer.lr"], ["local_steps=2", "optimizer.lr"]),
    (
        ['parameter_groups=[{pattern:"*.bias",lr:1}]', "local_steps=2"],
        ["local_steps=2", "parameter_groups[0].lr"],
    ),
    (["optimizer.lr=-1"], ["optimizer", "-1"]),
    (["+optimizer.beta=3"], ["optimizer", "beta"]),
    (["loss._target_=torch.nn.NoLoss"], ["loss._target_=torch.nn.NoLoss"]),
    (["loss._target_=torch.nn.MSELoss"], ["loss=torch.nn.MSELoss"]),
    (["+loss.reduction=none"], ["scalar"]),
    (["straggler=constant", "straggler.factors=[1]"], ["straggler.factors"]),
    (["straggler=constant", "straggler.iteration_s=-1"], ["straggler.iteration_s"]),
    (["straggler=random", "straggler.probability=2"], ["straggler.probability"]),
    (["straggler=stall", "straggler.worker=9"], ["straggler.worker"]),
    (["parameter_groups=[{pattern:head,lr:1}]"], ["head"]),
    (['parameter_groups=[{pattern:"*.bias",weight_dcay:0}]'], ["weight_dcay", "weight_decay"]),
    (['parameter_groups=[{pattern:"*.bias"}]'], ["no option"]),
    (["optimizer.lr=inf"], ["optimizer", "lr"]),
    (["optimizer.nesterov=no"], ["optimizer.nesterov=no", "true or false"]),
    (
        ["mitigation=delay_compensated", "mitigation.adaptive=off"],
        ["mitigation.adaptive=off", "true or false"],
    ),
    (["device=cuda"], ["device=cuda"]),
    (["run_dir=/proc/run"], ["run_dir"]),
]
"""These need two workers to be complete otherwise; ``device`` assumes a machine without a GPU."""
ON_RANKS = [
    (["data._target_=faults.data_of_one_rank_missing"], ["nowhere", "(on rank 2)"]),
    (["model._target_=faults.model_of_another_size"], ["rank 2 has another model"]),
    (["device=cuda"], ["device=cuda", "rank 1"]),
    (["straggler=constant", "straggler.factors=[1,2,3]"], ["straggler.factors", "2 workers"]),
]
"""These need 3 ranks."""
A_FEW = [*BEFORE_TORCH[::16], AFTER_TORCH[0], AFTER_TORCH[15]]


def fault(result, words) -> str:
    """What is wrong with the answer to a mistake; empty: nothing."""
    if result.code != 2:
        return f"exit code {result.code}"
    missing = [word for word in words if word not in result.err]
    if missing:
        return f"does not say {missing}: {result.err[-300:]!r}"
    if result.err.count("hydssp:") + result.err.count("train.py: error:") != 1:
        return "not one message"
    if "Traceback" in result.err:
        return "a traceback"
    if result.folder.exists():
        return "left a run folder"
    return ""


def main() -> None:
    from launching import train

    outcomes: Counter[int] = Counter()
    slowest = 0.0
    for ranks in (0, 3, 5):
        for overrides, words in BEFORE_TORCH + AFTER_TORCH:
            local = (
                ["transport=local", "num_workers=2"]
                if not ranks and (overrides, words) in AFTER_TORCH
                else []
            )
            with tempfile.TemporaryDirectory() as temporary:
                result = train(*local, *overrides, ranks=ranks, folder=Path(temporary) / "run")
                problem = fault(result, words)
            slowest = max(slowest, result.seconds)
            outcomes[ranks] += not problem
            if problem:
                print(f"{ranks or 1} ranks, {overrides}: {problem}", flush=True)
    total = len(BEFORE_TORCH) + len(AFTER_TORCH)
    for ranks, good in outcomes.items():
        print(f"{ranks or 1} rank(s): {good} of {total} mistakes gave one right message and exit code 2")
    print(f"slowest answer {slowest:.1f} s")
    sys.exit(any(good != total for good in outcomes.values()))


if __name__ == "__main__":
    main()
