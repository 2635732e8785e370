"""The command line: one module per verb.

Data goes to standard output, talk to standard error. Reading verbs work from the files alone and never import torch.
"""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from ckpt_service.cli import bench, doctor, drain, latest, logs, ls, pin, prune, run, show, status, stop, verify, wait
from ckpt_service.cli.common import Exit, complain
from ckpt_service.errors import CkptError, from_os_error

app = typer.Typer(
    name="ckpt-service",
    help="Asynchronous checkpoints for PyTorch training: the writer daemon, and what its files say.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("status")(status.status)
app.command("ls")(ls.ls)
app.command("latest")(latest.latest)
app.command("show")(show.show)
app.command("wait")(wait.wait)
app.command("verify")(verify.verify)
app.command("pin")(pin.pin)
app.command("unpin")(pin.unpin)
app.command("prune")(prune.prune)
app.command("logs")(logs.logs)
app.command("drain")(drain.drain)
app.command("stop")(stop.stop)
app.command("doctor")(doctor.doctor)
app.command("bench")(bench.bench)


def _version_line() -> str:
    from ckpt_service import __version__
    from ckpt_service.messages import PROTOCOL
    from ckpt_service.records import FORMAT_VERSION

    return f"ckpt-service {__version__} (protocol {PROTOCOL}, format {FORMAT_VERSION})"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(_version_line())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Asynchronous checkpoints for PyTorch training: the writer daemon, and what its files say."""


@app.command("version")
def version() -> None:
    """Print the version, the wire protocol and the file format."""
    typer.echo(_version_line())


@app.command("demo", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def demo(context: typer.Context) -> None:
    """Train a small GPT, kill it in the middle of a write, resume, and compare bit for bit (--help for its options)."""
    import importlib.util
    import os

    if importlib.util.find_spec("torch") is None:
        complain(f"the demo trains with PyTorch, which {sys.executable} does not have: pip install torch")
        sys.exit(Exit.FAILED)
    no_numpy = "ignore:Failed to initialize NumPy:UserWarning"  # torch says so where it is missing; nothing needs it
    os.execv(sys.executable, [sys.executable, "-W", no_numpy, "-m", "trainer_hooks.demo", *context.args])


def main() -> NoReturn:
    """Run the command line and exit with the code that the verb gives."""
    try:
        app()
    except CkptError as error:
        complain(str(error))
        sys.exit(Exit.FAILED)
    except ValueError as error:
        complain(str(error))
        sys.exit(Exit.USAGE)
    except BrokenPipeError:
        sys.exit(Exit.FAILED)
    except OSError as error:
        complain(str(from_os_error(error, op="this", kind=CkptError)))
        sys.exit(Exit.FAILED)
    sys.exit(Exit.OK)
