"""`python -m server`: serve one model over HTTP."""

from __future__ import annotations

import logging
import sys
from enum import Enum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
import uvicorn
from rich.console import Console

from charrm.cli import TREE, AttentionMib, BlockTokens, Minutes, PackTokens, Revision, Sample
from charrm.engines import TreeSettings
from charrm.errors import CharrmError
from server.app import create_app
from server.dispatch import Dispatch
from server.opening import open_scorer
from server.settings import Settings

log = logging.getLogger("uvicorn.error")


class EngineName(str, Enum):
    """How rows are computed; the numbers are the same."""

    eager = "eager"
    tree = "tree"


def main(
    model: Annotated[
        str,
        typer.Option(
            envvar="CHARRM_MODEL",
            help="Folder in the published layout, or a hub id such as morecry/BaichuanCharRM.",
        ),
    ],
    revision: Revision = None,
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
    engine: Annotated[
        EngineName,
        typer.Option(
            envvar="CHARRM_ENGINE",
            help="eager: the official order, row by row. tree: rows of a request share prefixes; "
            "only with a certificate of the same bits (`charrm certify`, or --certify).",
        ),
    ] = EngineName.eager,
    certificate: Annotated[
        Path | None,
        typer.Option(
            envvar="CHARRM_CERTIFICATE", help="File; by default where `charrm certify` writes it."
        ),
    ] = None,
    certify: Annotated[
        bool,
        typer.Option(
            "--certify",
            envvar="CHARRM_CERTIFY",
            help="Tree engine without a valid certificate: prove it before being ready.",
        ),
    ] = False,
    certify_rows: Annotated[
        list[Path] | None,
        typer.Option(
            help="For --certify: generation_trans_*.jsonl to sample; with --profiles. May be "
            "repeated. By default rows made of the demo's texts."
        ),
    ] = None,
    certify_sample: Sample = 512,
    certify_minutes: Minutes = 10.0,
    pack_tokens: PackTokens = TREE.pack_tokens,
    attention_mib: AttentionMib = TREE.attention_bytes >> 20,
    block_tokens: BlockTokens = TREE.block_tokens,
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
    settings = Settings(
        model,
        revision,
        device,
        dtype,
        profiles,
        engine.value,
        TreeSettings(pack_tokens, attention_mib << 20, block_tokens),
        certificate,
        certify,
        tuple(certify_rows or ()),
        certify_sample,
        certify_minutes,
    )
    dispatch = Dispatch(partial(open_scorer, settings), settings.max_waiting_rows)

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
