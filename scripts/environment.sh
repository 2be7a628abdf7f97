# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: makes the virtual environments and sets what their mpirun needs.
#
#   PYTHON=python3.12 ./scripts/quickstart.sh         another Python (3.10 or newer)
#   PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, ...           pip's own variables: a mirror, or PyTorch's index of CPU builds,
#                                                     which are much smaller than those for GPUs
#
# An environment carries two kinds of marks. `made-by-hydssp` says for which Python and folder it was made, or that it
# is incomplete: then it is made anew. `installed-NAME` is written last and holds a checksum of what was asked for.

repository=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
constraints=$repository/scripts/constraints.txt

# A site's Python modules set these, and other packages would come before those of the environments.
unset PYTHONPATH PYTHONHOME

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# ensure_environment FOLDER NAME REQUIREMENT...: make the environment if it is not there and install into it, once.
ensure_environment() {
    local folder=$1 name=$2 python=${PYTHON:-python3} version made_for wanted before
    shift 2
    version=$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null) ||
        die "there is no '$python': install Python 3.10 or newer, or name one: PYTHON=/path/to/python3 $0"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$python is Python $version, and 3.10 or newer is needed: name one with PYTHON=/path/to/python3 $0"
    made_for="Python $version in $folder"
    wanted="$* $(cat "$repository/pyproject.toml" "$constraints" | cksum)"

    before=$(cat "$folder/made-by-hydssp" 2>/dev/null || true)
    if [[ $before != "$made_for" ]] || ! "$folder/bin/python" -c '' 2>/dev/null; then
        [[ ! -e $folder || -n $before ]] || die "$folder was not made by this script: move it away"
        rm -rf "$folder"
        mkdir "$folder"
        before=incomplete
        echo "$before" >"$folder/made-by-hydssp"
        echo "Making $folder with Python $version"
        "$python" -m venv "$folder" ||
            die "'$python -m venv' failed: install venv (on Debian the package python3-venv), or name another PYTHON"
    fi
    if [[ $(cat "$folder/installed-$name" 2>/dev/null) != "$wanted" ]]; then
        echo "Installing into $folder: $* (takes minutes the first time)"
        echo incomplete >"$folder/made-by-hydssp"
        if ! (cd "$repository" && "$folder/bin/python" -m pip install -qq --constraint "$constraints" "$@"); then
            # A pip that ends by itself has changed nothing that it cannot mend; one that is killed may have.
            echo "$before" >"$folder/made-by-hydssp"
            die "pip could not install: $*. Its reason stands above; without a network, or for another package index," \
                "set PIP_INDEX_URL or PIP_FIND_LINKS. Then start this again"
        fi
        echo "$wanted" >"$folder/installed-$name"
        echo "$made_for" >"$folder/made-by-hydssp"
    fi
}

# mpi_settings NUM_RANKS: what mpirun needs to start that many ranks here. MPICH's takes no notice of Open MPI's.
mpi_settings() {
    export PRTE_MCA_rmaps_default_mapping_policy=${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}
    # UCX cannot be had in Open MPI's wheel, and each rank would print a line about it.
    export OMPI_MCA_osc=${OMPI_MCA_osc:-^ucx}
    if ((EUID == 0)); then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
    if (($1 > $(nproc))); then
        export OMP_NUM_THREADS=1
    fi
}
