"""The commands. Each reads a configuration and calls the function of `flexmarl.api` that does the work."""

import importlib.metadata
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexmarl.cli import EXIT_STOPPED
from flexmarl.core.errors import ConfigError, FlexMARLError, InvariantError

if TYPE_CHECKING:
    from flexmarl.config import RootConfig

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2

app = typer.Typer(
    name="flexmarl",
    help="Train teams of LLM agents by reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Replace values, e.g. pipeline.num_steps=5.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the final line.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, or the folder of an earlier run.")]


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=lambda on: _version(on))
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens inside.")] = False,
) -> None:
    """Train teams of LLM agents by reinforcement learning."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[_StderrHandler()],
    )


class _StderrHandler(logging.Handler):
    """Writes to whatever `sys.stderr` is at the moment: the live view replaces it, to print above its panel."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"flexmarl {importlib.metadata.version('flexmarl')}")
        raise typer.Exit


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in run.dir.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train the team of a configuration.

    Ctrl-C saves a checkpoint and stops; a second Ctrl-C stops at once.
    """
    with _reported_errors(is_resumable=True):
        resolved = read_config(config, overrides or ())
        from flexmarl import api
        from flexmarl.cli.views import make_view

        with make_view(is_quiet=quiet) as view:
            api.train(resolved, resume=resume, listener=view)
    if view.stopped_by is not None:
        raise typer.Exit(EXIT_STOPPED)


@app.command(name="eval")
def evaluate(config: ConfigFile, overrides: Overrides = None, quiet: Quiet = False) -> None:
    """Measure success on held-out queries: of a configuration's start models, or of a run's newest checkpoint."""
    with _reported_errors():
        resolved = read_config(config, overrides or ())
        from flexmarl import api
        from flexmarl.cli.text import evaluation_line
        from flexmarl.cli.views import PlainView, make_view

        with make_view(is_quiet=quiet) as view:
            report = api.evaluate(resolved, run_dir=config if config.is_dir() else None, listener=view)
        if quiet:  # otherwise the view has shown it
            PlainView().show([evaluation_line(report)])
    if report.error is not None:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def validate(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check a configuration and say what it resolves to, without training."""
    with _reported_errors():
        resolved = read_config(config, overrides or ())
        from flexmarl import api
        from flexmarl.cli.views import PlainView

        PlainView().show(api.validate(resolved).lines)


@app.command()
def inspect(
    run: Run,
    step: Annotated[int | None, typer.Option(min=0, help="Show this step; the newest one otherwise.")] = None,
    policy: Annotated[str | None, typer.Option(help="Show this policy only.")] = None,
    query: Annotated[int | None, typer.Option(min=0, help="Show the groups of this query only.")] = None,
    trajectory: Annotated[
        int | None, typer.Option(min=0, help="Show the turns of this trajectory of --step and --query.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run's store holds: versions, steps, groups, leases, seals, or one trajectory.

    The run may be live; nothing in its folder is changed.
    """
    with _reported_errors():
        from flexmarl import api
        from flexmarl.cli.tables import report_lines
        from flexmarl.cli.text import json_line
        from flexmarl.cli.views import PlainView

        report = api.inspect(run, step=step, policy=policy, query=query, trajectory=trajectory)
        PlainView().show([json_line(report)] if as_json else report_lines(report))


@app.command()
def replay(
    run: Run,
    first_step: Annotated[
        int | None, typer.Option("--from", min=0, help="First step; the oldest that can be replayed otherwise.")
    ] = None,
    last_version: Annotated[
        int | None, typer.Option("--to", min=1, help="Last version; the newest committed one otherwise.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a run's committed steps again from stored rows, and compare the weights bit for bit.

    Nothing is generated, and nothing in the run's folder is changed. Exit code 0 only when all are equal.
    """
    with _reported_errors():
        from flexmarl import api
        from flexmarl.cli.text import json_line, replay_line, replayed_step_line
        from flexmarl.cli.views import PlainView

        view = PlainView()
        result = api.replay(
            run,
            first_step=first_step,
            last_version=last_version,
            on_step=None if as_json else lambda step: view.show([replayed_step_line(step)]),
        )
        view.show([json_line(result) if as_json else replay_line(result)])
    if result.error is not None:
        typer.echo(f"error: {result.error}", err=True)
        raise typer.Exit(EXIT_FAILED)


def read_config(path: Path, overrides: Sequence[str]) -> "RootConfig":
    """Read a YAML file or, for the folder of a run, its resolved configuration with `run.dir` set to that folder.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong.
    """
    from flexmarl.config import load_config

    if not path.is_dir():
        return load_config(path, overrides)
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{path} is a folder without config.yaml, so it is not a run; give a YAML file or a run")
    return load_config(path / "config.yaml", [f"run.dir={json.dumps(str(path))}", *overrides])


@contextmanager
def _reported_errors(*, is_resumable: bool = False) -> Iterator[None]:
    """Print an error of ours as one message, without a traceback, and exit with its code.

    `is_resumable` says that what was broken off can go on with --resume.
    """
    try:
        yield
    except KeyboardInterrupt:
        rest = "; what the last checkpoint holds can be resumed with --resume" if is_resumable else ""
        typer.echo(f"aborted{rest}", err=True)
        raise typer.Exit(EXIT_STOPPED) from None
    except InvariantError:
        typer.echo("error: a bug in flexmarl; please report it with these lines:", err=True)
        raise
    except FlexMARLError as error:
        typer.echo(f"error: {error}".encode(errors="replace").decode(), err=True)
        raise typer.Exit(EXIT_BAD_INPUT if isinstance(error, ConfigError) else EXIT_FAILED) from error
    except OSError as error:
        # A file or folder that the user named, or the disk below it; where it is known which, the code above says more.
        logging.getLogger(__name__).info("the operating system refused:", exc_info=True)
        rest = "go on with --resume" if is_resumable else "try again"
        typer.echo(f"error: {error}; see to the file, the permission or the disk space, then {rest}", err=True)
        raise typer.Exit(EXIT_FAILED) from error


def run() -> None:
    """Run the command line of this process."""
    app(prog_name="flexmarl", args=sys.argv[1:])
