"""The experience store that a configuration names, and the columns that its algorithms need."""

import importlib
from pathlib import Path
from typing import Any

from flexmarl.algorithms import required_columns
from flexmarl.config import RootConfig
from flexmarl.core.errors import ConfigError, FlexMARLError
from flexmarl.core.ids import PolicyName
from flexmarl.core.protocols import ExperienceStore, PolicyColumns, Runtime
from flexmarl.store import SqliteStore


def policy_columns(config: RootConfig) -> dict[PolicyName, PolicyColumns]:
    """Return the data columns of each policy's table."""
    return {
        PolicyName(name): PolicyColumns(
            scalars=dict(config.store.columns), required=required_columns(config.algorithm_of(name))
        )
        for name in config.policies
    }


async def open_store(config: RootConfig, folder: Path, runtime: Runtime) -> ExperienceStore:
    """Open the store of a run, with the columns that it has; `folder` is where it keeps its files.

    Raises:
        ConfigError: `store.factory` cannot be used.
        StoreError: the files are in use, damaged, or of another format.
    """
    if config.store.kind == "plugin":
        return await _from_plugin(config.store.factory or "", folder, runtime)
    return await SqliteStore.open(folder if config.store.kind == "sqlite" else None, runtime.call)


async def _from_plugin(path: str, folder: Path, runtime: Runtime) -> ExperienceStore:
    factory = _factory(path)
    try:
        store: ExperienceStore | None = await factory(folder, runtime.call)
    except FlexMARLError:
        raise
    except Exception as error:  # user code: say which function it was
        raise ConfigError(
            f"store.factory={path} failed: {error!r}; it must be an async function of (folder, call) that returns a "
            "store"
        ) from error
    if store is None or not hasattr(store, "open_step"):
        raise ConfigError(f"store.factory={path} returned {store!r:.60}, expected an ExperienceStore")
    return store


def _factory(path: str) -> Any:
    module_name, colon, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name) if colon else None
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"store.factory={path}: {error}; expected module:function of an importable module") from error
    if not callable(found):
        raise ConfigError(f"store.factory={path}: expected module:function of an async function that returns a store")
    return found
