"""Complaints about a command line, in one line that names key, value and what is allowed.

One job: words. Reads the exceptions that Hydra and omegaconf raise while they compose a configuration, and what was
chosen; composes nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from hydssp.errors import UserError

GROUPS = ("paradigm", "data", "model", "optimizer", "schedule", "mitigation", "transport", "straggler")


def check_choices() -> None:
    """Refuse several choices for one group, which Hydra would merge into one configuration, or none.

    Raises:
        UserError: Naming the group.
    """
    hydra = HydraConfig.get()
    for group in GROUPS:
        if not isinstance(hydra.runtime.choices.get(group), str):
            given = [o for o in hydra.overrides.task if group in o]
            raise UserError(
                f"{' '.join(given) or group}: allowed is exactly one choice for {group}; to compare several, write "
                f"--multirun {group}=A,B"
            )


def names_group(group: str) -> bool:
    """Whether the command line chooses or changes something of ``group``."""
    given = (override.lstrip("+~") for override in HydraConfig.get().overrides.task)
    return any(override.split("=")[0].split(".")[0].split("@")[0] == group for override in given)


def flags_first(arguments: list[str]) -> list[str]:
    """The command line with flags that take no value before the overrides, as Hydra's parser wants it."""
    flags = {"--multirun", "-m", "--help", "-h", "--hydra-help", "--version", "--resolve"}
    return [a for a in arguments if a in flags] + [a for a in arguments if a not in flags]


def check_run_dir_of_several() -> None:
    """Refuse a series of runs into one folder, of which all but the first would fail.

    Raises:
        UserError: Naming run_dir.
    """
    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        return
    for override in hydra.overrides.task:
        if override.startswith("run_dir=") and "$" not in override and override != "run_dir=null":
            raise UserError(
                f"{override}: every run of --multirun needs a folder of its own; set runs_dir instead, or e.g. "
                "'run_dir=runs/${paradigm.name}_${seed}'"
            )


COMPLETION = """\
_hydssp_complete() {
    local module
    for module in hydssp.train hydssp.simulate; do
        [[ $COMP_LINE == *"-m $module "* ]] || continue
        local line="python $module ${COMP_LINE#*-m $module }"
        local choices
        choices=$(COMP_LINE=$line COMP_POINT=${#line} PYTHON -m $module -sc query=bash 2>/dev/null)
        local IFS=$'\\n '
        COMPREPLY=($(compgen -W "$choices" -- "$2"))
        return
    done
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _hydssp_complete python python3 mpirun mpiexec srun
"""
"""For bash, and for zsh with bashcompinit. Hydra's own script knows no ``python -m`` and no launcher before it."""


def asked_for_completion(arguments: list[str]) -> bool:
    """Whether the command line asks for the script that completes command lines."""
    flag, *value = arguments[:2] or [""]
    return flag in ("-sc", "--shell-completion") and value in (["install=bash"], ["install=zsh"])


def explain(error: BaseException) -> str:
    """One message for what composing a configuration has raised."""
    text = str(error)
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and (
        found := re.search(r"Could not find '([^']+)/([^/']+)'", text)
    ):
        group, choice = found.groups()
        return f"{group}={choice}: allowed is {_listed(error.options or ())}{_meant(choice, error.options or ())}"
    if isinstance(error, OverrideParseException):
        reason = text.split("\n")[0]
        return f"{error.override}: not an override; write key=value, and quote special characters ({reason})"
    if (found := re.match(r"Could not override '(.+)'", text)) and isinstance(cause, OmegaConfBaseException):
        key = found.group(1)
        parent, _, last = key.rpartition(".")
        siblings = [str(k) for k in cause.parent_node] if isinstance(cause.parent_node, DictConfig) else []
        where = f"in {parent}" if parent else "at the top level"
        return (
            f"{key}: there is no such key{_meant(last, siblings)}; {where} allowed is {_listed(siblings)}. An argument "
            f"that a _target_ of your own takes is added with +{key}=..."
        )
    if (found := re.match(r"Error merging override (.+)", text)) and cause is not None:
        if missing := re.search(r"Interpolation key '([^']+)' not found", str(cause)):
            return (
                f"{found.group(1)}: refers to {missing.group(1)}, which an override before it has deleted; write it "
                f"before ~{missing.group(1)}"
            )
        return f"{found.group(1)}: {_first_line(cause)}"
    return " ".join(
        line.strip() for line in text.split("\n") if line.strip() and not line.startswith("See http")
    )


def _first_line(error: BaseException) -> str:
    """What went wrong, without omegaconf's list of internal names."""
    return str(error).split("\n    full_key")[0].replace("\n", " ")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _meant(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
