"""What the commands have in common: run a function on each configuration that Hydra composes of the command line.

One job: a command line that Hydra cannot compose ends in one message and exit code 2; what the function itself raises
passes through. Imports Hydra, but neither torch nor MPI.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

import hydra
from omegaconf import DictConfig

from hydssp import config
from hydssp.command_line import COMPLETION, asked_for_completion, explain, flags_first

OK, USAGE = 0, 2


def run_composed(config_name: str, run: Callable[[DictConfig], None]) -> int:
    """Compose ``conf/<config_name>.yaml`` with the overrides of ``sys.argv`` and call ``run``, once per run asked for.

    Returns:
        0, or 2 when the command line was not understood; what has become of the runs is for ``run`` to remember.
    """
    if asked_for_completion(sys.argv[1:]):
        print(COMPLETION.replace("PYTHON", sys.executable), end="")
        return OK
    config.register()
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("0", "")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, instead of printing and leaving
    sys.argv[1:] = flags_first(sys.argv[1:])
    has_composed = False

    def note_and_run(composed: DictConfig) -> None:
        nonlocal has_composed
        has_composed = True
        run(composed)

    application = hydra.main(version_base="1.3", config_path="pkg://hydssp.conf", config_name=config_name)
    try:
        application(note_and_run)()
    except SystemExit as exit_:
        return USAGE if exit_.code else OK  # only Hydra's argument parser exits here
    except Exception as error:
        if has_composed:
            raise
        if wants_traceback:
            traceback.print_exception(error)
        print(f"hydssp: {explain(error)}", file=sys.stderr)
        return USAGE
    return OK
