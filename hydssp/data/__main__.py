"""``python -m hydssp.data``: look at a data set, or make it ready, before a job needs it.

One job: say what is found where, in the words that a job would use. For login nodes: imports neither torch nor MPI
nor Hydra, unless a data set of the user's does.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hydssp.data import (
    ArrayDataset,
    array_cache,
    check_splits,
    cifar,
    cifar10,
    cifar100,
    digits,
    fashion,
    fashion_mnist,
    synthetic,
)
from hydssp.data.samples import item_of
from hydssp.errors import TrainingError, UserError

OK, USAGE = 0, 2

BUILT_IN: dict[str, Callable[..., Any]] = {
    "digits": digits,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "synthetic": synthetic,
}
CIFAR = {spec.name: spec for spec in (cifar.CIFAR10, cifar.CIFAR100)}

Rows = list[tuple[str, str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hydssp.data",
        description="Look at a data set before a job needs it. Nothing is downloaded.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="list | check | prepare")
    commands.add_parser("list", help="the built-in data sets and their keys")
    for name, what in (
        ("check", "find and describe a data set, and read of it; writes nothing"),
        ("prepare", "the same, and write the files that a job would write first (cifar10, cifar100)"),
    ):
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument(
            "name", metavar="NAME", help=f"{', '.join(BUILT_IN)}, or module.function of your own"
        )
        command.add_argument(
            "settings", metavar="key=value", nargs="*", help="as in a job, with or without data. before it"
        )
    given = parser.parse_args(arguments)
    if given.command == "list":
        for name, function in BUILT_IN.items():
            print(f"{name:14} {_summary(function)}\n{'':14} keys: {', '.join(_keys(function)) or 'none'}")
        return OK
    try:
        function = _find(given.name)
        parsed = _parse(given.settings, function)
        try:
            rows = _describe(given.name, function, parsed, given.command == "prepare")
        except (UserError, TrainingError):
            raise
        except Exception as error:
            settings = ", ".join(given.settings) or "no settings"
            raise UserError(f"data: {given.name} with {settings} failed with {_said(error)}") from error
    except (UserError, TrainingError) as error:
        print(f"hydssp: {error}", file=sys.stderr)
        return USAGE
    print(f"{given.name}: found and readable")
    for label, value in rows:
        print(f"  {label:9} {value}")
    return OK


def _summary(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").split("\n")[0]


def _keys(function: Callable[..., Any]) -> list[str]:
    return [*inspect.signature(function).parameters]


def _find(name: str) -> Callable[..., Any]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, _, attribute = name.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), attribute) if module else None
    except Exception as error:
        raise UserError(f"data: {name} cannot be imported: {_said(error)}") from error
    if not callable(found):
        raise UserError(
            f"data: there is no data set {name}; allowed is {', '.join(BUILT_IN)}, or module.function"
        )
    try:
        inspect.signature(found)
    except ValueError as error:
        raise UserError(
            f"data: {name} does not say what arguments it takes; wrap it in a function"
        ) from error
    checked: Callable[..., Any] = found
    return checked


def _said(error: BaseException) -> str:
    """An exception in one line, with the place of the user's that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = os.path.dirname(__file__)
    is_ours = not frames or frames[-1].filename.startswith((ours, "<frozen"))
    place = "" if is_ours else f" ({frames[-1].filename}:{frames[-1].lineno})"
    return f"{type(error).__name__}: {error}{place}"


def _parse(settings: Sequence[str], function: Callable[..., Any]) -> dict[str, Any]:
    """``key=value`` to arguments; values as in YAML as far as JSON goes, everything else is text."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.removeprefix("data.")
        if not equals or (key not in parameters and not takes_any):
            raise UserError(
                f"data: {setting!r} is no setting; allowed is key=value with one of the keys"
                f" {', '.join(parameters) or '(it has none)'}"
            )
        if value.lower() in ("true", "false", "null"):
            value = value.lower()
        try:
            parsed[key] = json.loads(value)
        except ValueError:
            parsed[key] = value
    try:
        inspect.signature(function).bind(**parsed)
    except TypeError as error:
        raise UserError(f"data: {error}; the keys are {', '.join(parameters)}") from error
    return parsed


def _describe(name: str, function: Callable[..., Any], given: dict[str, Any], may_write: bool) -> Rows:
    rows: Rows = []
    if name in CIFAR:
        spec = CIFAR[name]
        loaded = cifar.load(spec, **{"root": None, **given}, may_write=may_write)
        splits: Any = loaded.splits
        rows.append(("in", str(loaded.folder.absolute())))
        for file, published in spec.files.items():
            found = loaded.md5[file]
            sums = "MD5 as published" if found == published else f"MD5 {found}, published is {published}"
            rows.append(("file", f"{file}, {_size(loaded.folder / file)}, {sums}"))
    elif name == "fashion_mnist":
        splits = fashion_mnist(**given)
        folder = fashion.find(given.get("root"))
        sums = "SHA-256 as published" if given.get("verify", True) else "SHA-256 not compared"
        rows.append(("in", str(folder.absolute())))
        for path in fashion.paths(folder):
            rows.append(("file", f"{path.name}, {_size(path)}, {sums}"))
    else:
        splits = function(**given)
    check_splits(splits)
    for part in ("train", "test"):
        rows.append((part, _part(getattr(splits, part))))
    if name in CIFAR:
        where = f"{loaded.cache}, {_size(loaded.cache)}" if loaded.cache else None
        rows.append(
            (
                "cache",
                where or f"none yet: the first job, or prepare instead of check, writes {array_cache.FOLDER}",
            )
        )
    return rows


def _part(part: Any) -> str:
    if not isinstance(part, ArrayDataset):
        first, last = (_item(part, index) for index in (0, len(part) - 1))
        items = f"each {first}" if first == last else f"the first {first}, the last {last}"
        return f"{len(part):,} samples, {type(part).__name__}: {items}"
    counts = np.bincount(part.labels, minlength=part.num_classes)
    each = f"{counts.min():,}" if counts.min() == counts.max() else f"{counts.min():,} to {counts.max():,}"
    return f"{len(part):,} images of shape {list(part.shape)}, {part.num_classes} classes with {each} each"


def _item(part: Any, index: int) -> str:
    """What an item consists of; reads it."""
    return " and ".join(_kind(value) for value in item_of(part, index))


def _kind(value: Any) -> str:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _size(path: Path) -> str:
    files = path.iterdir() if path.is_dir() else [path]
    return f"{sum(file.stat().st_size for file in files):,} bytes"


if __name__ == "__main__":
    sys.exit(main())
