"""`python -m server`: serve one model over HTTP."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
import uvicorn
from rich.console import Console

from charrm.charactereval import read_profiles
from charrm.errors import CharrmError
from charrm.scorer import Scorer
from server.app import create_app
from server.dispatch import Dispatch
from server.settings import Settings

log = logging.getLogger("uvicorn.error")


def main(
    model: Annotated[
        str,
        typer.Option(
            envvar="CHARRM_MODEL",
            help="Folder in the published layout, or a hub id such as morecry/BaichuanCharRM.",
        ),
    ],
    revision: Annotated[
        str | None,
        typer.Option(envvar="CHARRM_REVISION", help="Commit of a hub id; the audited by default."),
    ] = None,
    device: Annotated[
        str, typer.Option(envvar="CHARRM_DEVICE", help="auto, cpu, cuda (all GPUs) or cuda:N.")
    ] = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(
            envvar="CHARRM_DTYPE",
            help="Cast the weights: bfloat16 or float32. float32 is not the protocol, and every "
            "result says so. By default weights must be stored as bfloat16.",
        ),
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option(
            envvar="CHARRM_PROFILES",
            help="character_profiles.json; rows may then name a role instead of a profile.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            envvar="CHARRM_HOST", help="Address to listen on. There is no authentication."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="CHARRM_PORT", min=0, max=65535)] = 8000,
) -> None:
    """Serve the exact BaichuanCharRM score of CharacterEval rows over HTTP.

    Loads the model, proves a warm-up score, then answers POST /v1/score and /v1/score/batch.
    GET /health/ready tells when; GET /docs lists every route.
    """
    settings = Settings(model, revision, device, dtype, profiles)

    def open_scorer() -> Scorer:
        loaded = None if settings.profiles is None else read_profiles(settings.profiles)
        return Scorer.open(
            settings.model,
            revision=settings.revision,
            device=settings.device,
            dtype=settings.dtype,
            profiles=loaded,
            max_text_chars=settings.max_text_chars,
        )

    dispatch = Dispatch(open_scorer, settings.max_waiting_rows)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            dispatch.begin_stop()  # before uvicorn waits for the requests that wait for rows
            super().handle_exit(sig, frame)

    app = create_app(settings, dispatch)
    server = Server(uvicorn.Config(app, host=host, port=port, timeout_graceful_shutdown=60))

    def give_up() -> None:
        server.should_exit = True

    dispatch.on_failure = give_up
    server.run()
    if dispatch.failure is not None:
        if isinstance(dispatch.failure, CharrmError):
            message = f"{dispatch.failure.kind}: {dispatch.failure.message}"
        else:
            log.error("the model cannot be opened", exc_info=dispatch.failure)
            message = repr(dispatch.failure)
        Console(stderr=True).print(message, style="red", markup=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
