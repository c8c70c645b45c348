"""Reads the queries of a configuration."""

import json
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from flexmarl.config import RootConfig
from flexmarl.core.errors import ConfigError, FlexMARLError
from flexmarl.workflow.load import load_function

Query = dict[str, Any]
Split = Literal["train", "held_out"]


def load_train_queries(config: RootConfig) -> list[Query]:
    """Return the training queries.

    Raises:
        ConfigError: they cannot be read, are not dicts of plain data, or are fewer than a step needs.
    """
    queries = _load(config, "train", config.data.train_file, "data.train_file", config.data.num_train)
    needed = config.pipeline.queries_per_step
    if len(queries) < needed:
        raise ConfigError(
            f"the training data has {len(queries)} queries, pipeline.queries_per_step={needed} needs as many: "
            "give more data, or lower it"
        )
    return queries


def load_held_out_queries(config: RootConfig) -> list[Query]:
    """Return the queries of evaluations; none when evaluation is off.

    Raises:
        ConfigError: they cannot be read, are not dicts of plain data, or there are none.
    """
    if not config.eval.at_ends and config.eval.every is None:
        return []
    queries = _load(config, "held_out", config.data.held_out_file, "data.held_out_file", config.eval.num_queries)
    if not queries:
        raise ConfigError("there is no held-out query: give some, or set eval.at_ends=false and eval.every=null")
    return queries


def query_place(config: RootConfig, split: Split, number: int) -> str:
    """Return where the query at place `number` of a split comes from: `file:line`, or its place in `data.source`."""
    file = config.data.train_file if split == "train" else config.data.held_out_file
    if file is None:
        return f"{split} query {number} of data.source={config.data.source}"
    with Path(file).open(encoding="utf-8") as lines:
        filled = [line_number for line_number, line in enumerate(lines, start=1) if line.strip()]
    return f"{file}:{filled[number]}"


def _load(config: RootConfig, split: Split, file: str | None, key: str, num_queries: int | None) -> list[Query]:
    if file is not None:
        queries = _read_lines(Path(file), key)[:num_queries]
    else:
        queries = _call_source(config, split, num_queries)
    for number, query in enumerate(queries):
        _check_plain(query, f"{split} query {number}")
    return queries


def _read_lines(path: Path, key: str) -> list[Query]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={path}: cannot be read: {error}") from error
    queries = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            query = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(query, dict):
            raise ConfigError(f"{path}:{number}: expected an object, got {type(query).__name__}")
        queries.append(query)
    if not queries:
        raise ConfigError(f"{key}={path}: the file has no query")
    return queries


def _call_source(config: RootConfig, split: str, num_queries: int | None) -> list[Query]:
    data = config.data
    assert data.source is not None
    function = load_function(data.source, what="data.source")
    try:
        queries = function(split=split, num_queries=num_queries, seed=data.seed, **data.options)
    except FlexMARLError:
        raise
    except Exception as error:  # user code: say which function it was
        raise ConfigError(
            f"data.source={data.source!r} failed for split {split!r}: {error!r} at {_innermost_line(error)}"
        ) from error
    if not isinstance(queries, list):
        raise ConfigError(f"data.source={data.source!r} returned {type(queries).__name__}, expected a list of dicts")
    return queries


def _innermost_line(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _check_plain(value: object, where: str, *, depth: int = 0) -> None:
    """Queries travel to workers as plain data."""
    if depth == 0 and not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a dict, got {type(value).__name__} {value!r:.60}")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{where}: key {key!r} is not text")
            _check_plain(item, f"{where}, field {key!r}", depth=depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_plain(item, where, depth=depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ConfigError(f"{where}: {value:.6g} does not fit into 64 bits; give it as text")
    elif value is not None and not isinstance(value, (str, int, float, bool)):
        raise ConfigError(f"{where}: a {type(value).__name__} is not plain data (text, numbers, lists, dicts)")
