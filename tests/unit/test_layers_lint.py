"""The contracts of import-linter hold, and each of them sees a wrong import planted in each layer."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
LAYERS = [
    layer.strip("() ")
    for line in next(each for each in CONTRACTS if each["id"] == "layers")["layers"]
    for layer in line.split("|")
]


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--config", folder / "pyproject.toml", "--no-cache"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    return tmp_path


def plant(folder: Path, layer: str, statement: str) -> None:
    with (folder / "src" / "flexmarl" / layer / "planted.py").open("a") as file:
        file.write(f"{statement}\n")


def test_contracts_hold(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


def test_an_upward_import_is_seen_in_each_layer(copy: Path) -> None:
    existing = [layer for layer in LAYERS if (copy / "src" / "flexmarl" / layer / "__init__.py").exists()]
    assert len(existing) >= 14
    above = dict(zip(existing[1:], existing, strict=False)) | {"rollout": "training", "training": "rollout"}
    for layer, forbidden in above.items():
        plant(copy, layer, f"import flexmarl.{forbidden}")
    result = lint(copy)
    assert result.returncode != 0
    for layer, forbidden in above.items():
        assert f"flexmarl.{layer}.planted -> flexmarl.{forbidden}" in result.stdout


def test_forbidden_libraries_and_packages_are_seen(copy: Path) -> None:
    planted = [
        (layer, module)
        for contract in CONTRACTS
        if contract["type"] == "forbidden"
        for source in contract["source_modules"]
        for module in contract["forbidden_modules"]
        if (layer := source.removeprefix("flexmarl").strip("."))
    ]
    planted += [("objects", "ray"), ("orchestrator", "ray"), ("api", "ray")]
    for layer, module in planted:
        plant(copy, layer, f"import {module}")
    result = lint(copy)
    assert result.returncode != 0
    for layer, module in planted:
        assert f"flexmarl.{layer}.planted -> {module}" in result.stdout, (layer, module)
