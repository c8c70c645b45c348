"""Finds the user's functions by their path in the configuration."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flexmarl.core.errors import ConfigError


def load_function(path: str, *, what: str) -> Callable[..., Any]:
    """Return the function at `module:function` or `file.py:function`.

    Args:
        path: Where it is. A relative file is looked up from the working directory.
        what: The configuration key, for messages.

    Raises:
        ConfigError: it cannot be imported or found.
    """
    module_name, colon, name = path.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"{what}={path!r}: expected module:function or file.py:function")
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except ConfigError as error:
        raise ConfigError(f"{what}={path!r}: {error}") from error
    except (Exception, SystemExit) as error:  # whatever the user's module raises is the user's to see
        file = Path(f"{module_name}.py")
        hint = f"; did you mean {file}:{name}?" if file.is_file() else ""
        raise ConfigError(f"{what}={path!r}: importing {module_name} failed: {error!r}{hint}") from error
    function = getattr(module, name, None)
    if function is None:
        functions = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise ConfigError(f"{what}={path!r}: no {name!r} in {module_name}; it has: {', '.join(functions) or 'none'}")
    if not callable(function):
        raise ConfigError(f"{what}={path!r}: {name} is a {type(function).__name__}, not a function")
    found: Callable[..., Any] = function
    return found


def load_workflow(path: str) -> Callable[..., Any]:
    """Return the workflow at `workflow.path`.

    Raises:
        ConfigError: it cannot be found, or is not async.
    """
    function = load_function(path, what="workflow.path")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"workflow.path={path!r} is not async: write `async def {path.rpartition(':')[2]}(episode)`")
    return function


def _load_file(file: Path) -> Any:
    if not file.is_file():
        raise ConfigError(f"no file {file} (looked in {Path.cwd()})")
    name = f"flexmarl_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
