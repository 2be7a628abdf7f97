from __future__ import annotations

import dataclasses
import math
import re

import pytest
from coordination_worlds import PRESETS

from hydssp.coordination import ASP, BSP, DSSP, SSP, Rules
from hydssp.errors import UserError


def test_defaults():
    assert SSP() == SSP(s=3)
    assert DSSP() == DSSP(
        s_lower=3,
        s_upper=15,
        grant="exact",
        release="next_push",
        ask="any",
        cap="run_ahead",
        late="clamp",
        interval="processing",
    )
    assert DSSP().rules.r_max == 12


def test_presets_are_dssp_with_other_switches():
    assert DSSP.bounded() == DSSP(release="gap", cap="lead")
    assert DSSP.paper() == DSSP(ask="fastest", cap="none", interval="push_to_push", late="none")
    assert DSSP.bounded(2, 5) == DSSP(2, 5, release="gap", cap="lead")


def test_rules_of_the_simple_paradigms():
    assert ASP().rules.s_lower == math.inf
    assert ASP().rules.r_max == 0
    assert ASP().rules.cap == "none"
    assert (SSP(4).rules.s_lower, SSP(4).rules.r_max, SSP(4).rules.release) == (4, 0, "gap")
    assert dataclasses.replace(BSP().rules, apply="per_push") == SSP(0).rules


@pytest.mark.parametrize("paradigm", PRESETS, ids=str)
def test_synchronous_is_who_applies_per_round(paradigm):
    assert paradigm.is_synchronous is (paradigm.rules.apply == "per_round")
    assert paradigm.is_synchronous is isinstance(paradigm, BSP)


@pytest.mark.parametrize("paradigm", PRESETS, ids=str)
def test_frozen_and_comparable(paradigm):
    assert paradigm == dataclasses.replace(paradigm)
    assert hash(paradigm) == hash(dataclasses.replace(paradigm))
    with pytest.raises(dataclasses.FrozenInstanceError):
        paradigm.s_lower = 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SSP(-1), "paradigm.s=-1: must be an integer >= 0"),
        (lambda: SSP(1.5), "paradigm.s=1.5: must be an integer >= 0"),
        (lambda: SSP(True), "paradigm.s=True: must be an integer >= 0"),
        (lambda: SSP(math.inf), "paradigm.s=inf: must be an integer >= 0"),
        (lambda: DSSP(s_lower=-1), "paradigm.s_lower=-1: must be an integer >= 0"),
        (lambda: DSSP(s_upper="15"), "paradigm.s_upper='15': must be an integer >= 0"),
        (lambda: DSSP(s_upper=math.inf), "paradigm.s_upper=inf: must be an integer >= 0"),
        (lambda: DSSP(4, 3), "paradigm.s_upper=3: must be an integer >= paradigm.s_lower (4)"),
        (lambda: DSSP(grant="x"), "paradigm.grant='x': must be one of exact, literal"),
        (lambda: DSSP(release="x"), "paradigm.release='x': must be one of next_push, gap"),
        (lambda: DSSP(ask="x"), "paradigm.ask='x': must be one of any, fastest"),
        (lambda: DSSP(cap="x"), "paradigm.cap='x': must be one of run_ahead, lead, none"),
        (lambda: DSSP(late="x"), "paradigm.late='x': must be one of clamp, none"),
        (lambda: DSSP(interval="x"), "paradigm.interval='x': must be one of processing, push_to_push"),
        (lambda: Rules(0, 0, apply="x"), "paradigm.apply='x': must be one of per_push, per_round"),
        (
            lambda: Rules(0, 2, release="gap", apply="per_round"),
            "paradigm.apply=per_round: allowed only with",
        ),
        (lambda: Rules(0, 0, apply="per_round"), "paradigm.apply=per_round: allowed only with"),
        (lambda: Rules(3, math.inf), "paradigm.s_upper=inf: must be an integer >= paradigm.s_lower (3)"),
        (lambda: Rules(math.inf, 3), "paradigm.s_upper=3: must be an integer >= paradigm.s_lower (inf)"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(make, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        make()
