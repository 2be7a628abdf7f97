"""What each module may import, and a few things that no module may be: the layers of CONTRIBUTING.md.

Each module is read (imports inside functions count, those for type checking do not) and, because a module can
also be reached through another, imported in a fresh interpreter.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hydssp"

HYDRA = {"hydra", "omegaconf"}
CLOCKS_AND_CHANCE = {"time", "datetime", "random", "secrets", "uuid"}

# A module, or a package with all that is in it: what it must not import, and what must not be loaded after it
# has been imported. The longest name that fits counts; `hydssp` is its __init__ alone, so all need a row.
FORBIDDEN = {
    "hydssp": {"torch", "mpi4py", "numpy"} | HYDRA,
    "hydssp.abort": {"torch", "numpy"} | HYDRA,
    "hydssp.application": {"torch", "mpi4py"},
    "hydssp.backward": {"mpi4py"} | HYDRA | CLOCKS_AND_CHANCE,
    "hydssp.command_line": {"torch", "mpi4py", "numpy"},
    "hydssp.config": {"torch", "mpi4py"},
    "hydssp.coordination": {"torch", "mpi4py", "numpy"} | HYDRA | CLOCKS_AND_CHANCE,
    "hydssp.data": {"mpi4py", "torchvision"} | HYDRA,
    "hydssp.device": {"torch", "mpi4py"} | HYDRA,
    "hydssp.errors": {"torch", "mpi4py", "numpy"} | HYDRA,
    "hydssp.evaluation": {"mpi4py"} | HYDRA,
    "hydssp.evaluator": {"torch", "mpi4py"} | HYDRA,
    "hydssp.job": {"mpi4py"},
    "hydssp.launcher": {"torch", "mpi4py", "numpy"} | HYDRA,
    "hydssp.models": {"mpi4py", "torchvision"} | HYDRA,
    "hydssp.observe": {"mpi4py", "torch"} | HYDRA,
    "hydssp.observe.tensorboard": {"mpi4py"} | HYDRA,
    "hydssp.recorded": {"torch", "mpi4py"},
    "hydssp.server": {"torch", "mpi4py"} | HYDRA,
    "hydssp.session": {"torch"} | HYDRA,
    "hydssp.signals": {"torch", "mpi4py", "numpy"} | HYDRA,
    "hydssp.simulate": {"mpi4py"},
    "hydssp.simulation": {"torch", "mpi4py"} | HYDRA | CLOCKS_AND_CHANCE,
    "hydssp.simulation.gradients": {"mpi4py"} | HYDRA | CLOCKS_AND_CHANCE,
    "hydssp.straggler": {"torch", "mpi4py"} | HYDRA | CLOCKS_AND_CHANCE,
    "hydssp.task": {"mpi4py"},
    "hydssp.train": {"torch", "mpi4py", "numpy"},
    "hydssp.transport": {"torch", "mpi4py", "hydssp.coordination"} | HYDRA,
    "hydssp.transport.mpi": {"torch", "hydssp.coordination"} | HYDRA,
    "hydssp.transport.rma": {"torch", "hydssp.coordination"} | HYDRA,
    "hydssp.transport.two_sided": {"torch", "hydssp.coordination"} | HYDRA,
    "hydssp.update": {"mpi4py"} | HYDRA,
    "hydssp.update.schedule": {"torch", "mpi4py"} | HYDRA,
    "hydssp.update.updater": {"torch", "mpi4py"} | HYDRA,
    "hydssp.worker": {"mpi4py"} | HYDRA,
}
# The module may import these inside functions, but importing the module must not load them.
NOT_AT_IMPORT = {
    "hydssp.observe.tensorboard": {"torch"},
    "hydssp.abort": {"mpi4py"},
    "hydssp.simulate": {"torch"} | HYDRA,
    "hydssp.train": HYDRA,
    "hydssp.job": {"hydssp.transport.rma"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): ast.parse(path.read_text(), str(path)) for path in sorted(PACKAGE.rglob("*.py"))
}


def is_for_typing(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run: not those under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if is_for_typing(node):
            for other in node.orelse:
                yield other
                yield from nodes(other)
        else:
            yield node
            yield from nodes(node)


def imports(name: str) -> set[str]:
    """The modules that the source of ``name`` imports, ours by their whole names."""
    found = set()
    for node in nodes(MODULES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: import it by its whole name"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else str(node.module))
    return found


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def rule(name: str) -> set[str]:
    rows = [row for row in FORBIDDEN if is_within(name, row) and (row != "hydssp" or row == name)]
    assert rows, f"{name} has no row in FORBIDDEN of {__file__}: say there what it must not import"
    return FORBIDDEN[max(rows, key=len)]


@pytest.mark.parametrize("name", MODULES)
def test_source_imports_nothing_forbidden(name):
    broken = [
        f"{name} imports {found}" for found in imports(name) for bad in rule(name) if is_within(found, bad)
    ]
    assert not broken


LOAD = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps([*sys.modules]))
"""


def test_importing_loads_nothing_forbidden():
    """One fresh interpreter for all modules under the same rule."""
    groups: dict[frozenset[str], list[str]] = {}
    for name in MODULES:
        # The standard library may load a clock for itself.
        forbidden = (rule(name) | NOT_AT_IMPORT.get(name, set())) - CLOCKS_AND_CHANCE
        groups.setdefault(frozenset(forbidden), []).append(name)
    broken = []
    for forbidden, names in groups.items():
        # In the root, so that the working tree is what is imported.
        command = [sys.executable, "-c", LOAD, *names]
        process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        assert process.returncode == 0, process.stderr
        loaded = set(json.loads(process.stdout))
        broken += [f"importing {' or '.join(names)} loads {bad}" for bad in sorted(forbidden & loaded)]
    assert not broken


def test_coordination_stands_alone():
    allowed = sys.stdlib_module_names | {"hydssp"}
    for name in MODULES:
        if is_within(name, "hydssp.coordination"):
            found = imports(name)
            assert {module.split(".")[0] for module in found} <= allowed
            ours = {module for module in found if is_within(module, "hydssp")}
            assert all(m == "hydssp.errors" or is_within(m, "hydssp.coordination") for m in ours), (
                name,
                ours,
            )


def test_no_import_cycle():
    graph = {name: imports(name) & MODULES.keys() - {name} for name in MODULES}
    while leaves := [name for name, targets in graph.items() if not targets]:
        for leaf in leaves:
            del graph[leaf]
        for targets in graph.values():
            targets.difference_update(leaves)
    assert not graph, f"a cycle among {sorted(graph)}"


def test_no_module_is_named_for_nothing():
    names = {part for name in MODULES for part in name.split(".")}
    assert not names & {"util", "utils", "helper", "helpers", "common", "misc", "manager"}


FILES = {path.stem for path in (ROOT / "conf" / "paradigm").glob("*.yaml")}
PARADIGMS = FILES | {name.upper() for name in FILES}
"""The names that configurations use, and those of the classes."""


def paradigm_tests(tree: ast.AST) -> list[int]:
    """Lines that compare with a paradigm's name or class, match on one, or ask for an instance of one."""
    lines = []
    for node in ast.walk(tree):
        is_test = isinstance(node, ast.Compare | ast.MatchValue) or (
            isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
        )
        fields = ("value", "id", "attr")  # of a constant, a name, an attribute
        if is_test and PARADIGMS & {getattr(n, field, None) for n in ast.walk(node) for field in fields}:
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("name", MODULES)
def test_no_decision_on_the_name_of_a_paradigm(name):
    assert not paradigm_tests(MODULES[name])


@pytest.mark.parametrize(
    "code",
    [
        "if name == 'bsp': ...",
        "name in ('x', 'dssp')",
        "isinstance(p, paradigms.SSP)",
        "match n:\n case 'asp': ...",
    ],
)
def test_such_a_decision_is_found(code):
    assert {"bsp", "asp", "ssp", "dssp"} <= PARADIGMS
    assert paradigm_tests(ast.parse(code))
