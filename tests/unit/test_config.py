from __future__ import annotations

import subprocess
import sys

import pytest
from hydra import compose, initialize_config_module

from hydssp import config as configuration
from hydssp.coordination.paradigms import ASP, BSP, DSSP, SSP
from hydssp.errors import UserError
from hydssp.straggler import ConstantFactors, Rotating
from hydssp.update.schedule import Constant, Cosine, WarmUp


def compose_plain(*overrides):
    configuration.register()
    with initialize_config_module("hydssp.conf", version_base="1.3"):
        return configuration.to_plain(compose("train", overrides=list(overrides)))


def built(*overrides):
    return configuration.build("paradigm", compose_plain(*overrides)["paradigm"])


def test_defaults_are_the_documented_ones():
    config = compose_plain()
    configuration.check(config)
    assert (config["batch_size"], config["seed"], config["async_weight"]) == (32, 0, None)
    assert config["optimizer"]["lr"] == 0.02
    assert config["optimizer"]["momentum"] == 0.9
    assert config["optimizer"]["weight_decay"] == 0
    assert config["lr_clock"] == "samples"
    assert built() == DSSP(3, 15)


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("mitigation", ["mitigation=delay_compensated", "mitigation.adaptive=off"]),
        ("mitigation", ["mitigation=gap_aware", "mitigation.compiled=maybe"]),
        ("optimizer", ["optimizer.nesterov=no"]),
    ],
)
def test_a_word_is_no_switch(key, overrides):
    with pytest.raises(UserError, match=f"^{overrides[-1]}: allowed is true or false$"):
        configuration.build(key, compose_plain(*overrides)[key])


@pytest.mark.parametrize("value", ["true", "abc", "-1"])
def test_a_strength_is_a_number(value):
    config = compose_plain("mitigation=delay_compensated", f"mitigation.strength={value}")
    with pytest.raises(UserError, match=r"mitigation.strength=.*a number of at least 0"):
        configuration.build("mitigation", config["mitigation"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], []),
        (["wire.compression=topk", "wire.ratio=0.1", "warmup.epochs=2", "warmup.start=0.5"], []),
        (["wire.ratio=0.1"], ["wire.ratio=0.1: no effect without wire.compression=topk"]),
        (
            ["wire.compression=topk", "wire.bits=8"],
            ["wire.bits=8: no effect without wire.compression=quantize"],
        ),
        (["warmup.start=0.5"], ["warmup.start=0.5: no effect without warmup.epochs"]),
        (
            ["paradigm=bsp", "mitigation=gap_aware"],
            ["mitigation=gap_aware: no effect with paradigm=bsp, in which"],
        ),
    ],
)
def test_keys_without_effect_are_told(overrides, words):
    is_synchronous = "paradigm=bsp" in overrides
    notes = configuration.notes(compose_plain(*overrides), is_synchronous=is_synchronous)
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("bsp", BSP()),
        ("asp", ASP()),
        ("ssp", SSP(3)),
        ("dssp_bounded", DSSP.bounded(3, 15)),
        ("dssp_paper", DSSP.paper(3, 15)),
    ],
)
def test_presets_are_those_of_the_code(override, expected):
    assert built(f"paradigm={override}") == expected


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["batch_size=0"], "batch_size=0: .*at least 1"),
        (["accumulate=0"], "accumulate=0: .*at least 1"),
        (["local_steps=0"], "local_steps=0: .*at least 1"),
        (["precision=bf16", "dtype=float64"], "precision=bf16.*dtype=float64"),
        (["wire.push=fp16", "dtype=float64"], "wire.push=fp16.*dtype=float64"),
        (["wire.compression=topk", "wire.push=bf16"], "wire.compression=topk.*wire.push=bf16"),
        (["wire.ratio=0"], "wire.ratio=0.*above 0"),
        (["wire.ratio=0.6"], "wire.ratio=0.6.*at most 0.5"),
        (["wire.bits=2"], "wire.bits=2.*4, 8"),
        (["wire.error_feedback=true"], "wire.error_feedback=true.*wire.push=fp32"),
        (["seed=-1"], "seed=-1"),
        (["epochs=0"], "epochs=0.*above 0"),
        (["epochs=nan"], "epochs=nan"),
        (["target_accuracy=96"], "target_accuracy=96.*at most 1"),
        (["eval.targets=[0.9,2]"], "eval.targets"),
        (["eval.every_epochs=0"], "eval.every_epochs"),
        (["transport.slots=2"], "transport.slots=2.*at least 3"),
        (["transport.name=carrier_pigeon"], "transport.name=carrier_pigeon.*rma, two_sided, local"),
        (["epochs=null"], "epochs, max_updates.*never end"),
        (["max_updates=0"], "max_updates=0"),
        (["max_time_s=-1"], "max_time_s=-1"),
        (["paradigm.s_upper=2"], "paradigm.s_upper=2"),
        (["paradigm.cap=sometimes"], "paradigm.cap='sometimes'.*run_ahead, lead, none"),
        (["paradigm=ssp", "paradigm.s=-1"], "paradigm.s=-1"),
        (["schedule=step", "schedule.milestones=[3,1]"], "schedule.milestones"),
        (["schedule=cosine", "epochs=null", "max_updates=9"], "schedule.epochs=None.*above 0"),
        (["schedule=one_cycle", "schedule.peak_at=2"], "schedule.peak_at=2"),
        (["warmup.epochs=-1"], "warmup.epochs=-1"),
        (["warmup.epochs=1", "warmup.start=3"], "warmup.start=3.*null"),
        (["parameter_groups=[{lr:1}]"], r"parameter_groups\[0\].*pattern"),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_allowed(overrides, words):
    with pytest.raises(UserError, match=words):
        configuration.check(compose_plain(*overrides))


@pytest.mark.parametrize("schedule", ["cosine", "one_cycle"])
def test_a_schedule_is_as_long_as_the_run(schedule):
    config = compose_plain(f"schedule={schedule}", "epochs=7")
    assert configuration.build_schedule(config).epochs == 7


def test_warm_up_begins_at_one_pth_of_the_rate():
    config = {**compose_plain("warmup.epochs=2", "schedule=cosine"), "num_workers": 4}
    schedule = configuration.build_schedule(config)
    assert schedule == WarmUp(Cosine(20), 2, 0.25)
    assert configuration.build_schedule(compose_plain()) == Constant()


def test_a_missing_value_is_named():
    with pytest.raises(UserError, match=r"schedule.milestones"):
        compose_plain("schedule=step")


class TestBuild:
    def test_what_the_target_refuses(self):
        with pytest.raises(UserError, match=r"straggler.*-1"):
            configuration.build_straggler(
                compose_plain("straggler=constant", "straggler.factors=[1,1,-1]")["straggler"], 3
            )

    @pytest.mark.parametrize(
        ("node", "words"),
        [
            ({"_target_": "no.such.module.Model"}, "model._target_=no.such.module.Model"),
            ({"_target_": "hydssp.models.mpl"}, "model._target_=hydssp.models.mpl"),
            ({"_target_": "hydssp.models.mlp", "hiden": [3]}, "hiden"),
            ({"hidden": [3]}, "model=.*_target_"),
            ("mlp", "model='mlp'"),
        ],
    )
    def test_what_cannot_be_built(self, node, words):
        with pytest.raises(UserError, match=words):
            configuration.build("model", node)

    def test_the_label_is_no_argument(self):
        assert (
            configuration.build("paradigm", {"name": "x", "_target_": "hydssp.coordination.paradigms.BSP"})
            == BSP()
        )

    def test_rotating_knows_the_workers(self):
        node = compose_plain("straggler=rotating")["straggler"]
        assert configuration.build_straggler(node, 7) == Rotating(
            num_workers=7, period=20, factor=4, iteration_s=0.05
        )

    def test_factors_must_fit_the_workers(self):
        node = compose_plain("straggler=constant")["straggler"]
        assert configuration.build_straggler(node, 3) == ConstantFactors((1, 1, 2.5), 0.05)
        with pytest.raises(UserError, match=r"straggler.factors.*4 workers"):
            configuration.build_straggler(node, 4)


def test_checking_imports_neither_torch_nor_mpi():
    program = (
        "import sys; sys.path.insert(0, 'tests/unit')\n"
        "from hydssp import config\n"
        "from hydra import compose, initialize_config_module\n"
        "config.register()\n"
        "with initialize_config_module('hydssp.conf', version_base='1.3'):\n"
        "    config.check(config.to_plain(compose('train')))\n"
        "loaded = {'torch', 'mpi4py'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
