"""``run``: the daemon."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from ckpt_service import naming, ownership
from ckpt_service.cli.common import Postfix, checked_postfix, complain
from ckpt_service.config import ServiceConfig, load_config, unknown_variables
from ckpt_service.storage import make_directories


def run(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="The directory that the trainer saves to.")],
    postfix: Postfix = None,
    socket: Annotated[str | None, typer.Option(help="Listen at this path instead of one that clients find.")] = None,
    config: Annotated[str | None, typer.Option(help="A TOML file with settings.")] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when it serves; it leaves by itself once no trainer needs it.")
    ] = False,
) -> None:
    """Serve a run directory: take snapshots from its trainers and commit them.

    ROOT must be there, unless --detach is given, as trainers do, who have made it.
    """
    from ckpt_service import daemon  # here, so that no reading verb waits for it

    if not detach and not os.path.isdir(root):
        raise ValueError(f"ROOT={root}: there is no such directory; make it (mkdir -p) if it is spelled right")
    root = os.path.realpath(root)
    postfix = checked_postfix(postfix)
    socket = socket and os.path.abspath(socket)  # the status names it to clients, who may be anywhere
    settings = load_config(os.environ, _content(config))
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=daemon.LOG_FORMAT, datefmt=daemon.LOG_DATE_FORMAT)

    def serve(ready: Callable[[], None], *, stays: bool) -> int:
        return daemon.serve(root, postfix, settings, os.environ, socket=socket, stays=stays, ready=ready)

    if not detach:
        for message in unknown_variables(os.environ):
            complain(message)
        _say_settings(settings)
        daemon.leave(serve(lambda: None, stays=True))
    service = ownership.service_path(root, postfix)
    make_directories(service)
    log = os.path.join(service, naming.daemon_log(ownership.host_name(os.environ)))
    sys.exit(daemon.detach(log, lambda ready: serve(ready, stays=False)))


def _content(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from error


def _say_settings(settings: ServiceConfig) -> None:
    logging.getLogger(__name__).info("settings: %s", settings.model_dump_json())
