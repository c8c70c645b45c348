"""What every benchmark reports beside its figures: spreads, versions, hardware, and a hash of its configuration."""

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def parser_of(description: str, *, quick: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has; `quick` says what --quick leaves out."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object in the last line")
    parser.add_argument("--quick", action="store_true", help=f"{quick}: under a minute")
    return parser


def with_setting(figures: Mapping[str, Any], config: Mapping[str, Any], *, is_quick: bool) -> dict[str, Any]:
    """Return the figures with what they were measured under."""
    plain = json.dumps(config, sort_keys=True)
    return {
        **figures,
        "is_quick": is_quick,
        "config": dict(config),
        "config_hash": hashlib.sha256(plain.encode()).hexdigest()[:12],
        "environment": environment(),
    }


def environment() -> dict[str, Any]:
    """Return commit, versions and hardware."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
