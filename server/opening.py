"""Open the scorer that a server was asked for; prove its engine first where that is asked too."""

from __future__ import annotations

import logging

from charrm.certify import certify, choose_sample, show_progress
from charrm.charactereval import read_profiles
from charrm.errors import NotCertified
from charrm.scorer import Scorer
from server.settings import Settings

log = logging.getLogger("uvicorn.error")


def open_scorer(settings: Settings) -> Scorer:
    """Return the scorer. Raises what `Scorer.open` and `Scorer.with_tree` raise."""
    profiles = None if settings.profiles is None else read_profiles(settings.profiles)
    scorer = Scorer.open(
        settings.model,
        revision=settings.revision,
        device=settings.device,
        dtype=settings.dtype,
        profiles=profiles,
        max_text_chars=settings.max_text_chars,
    )
    if settings.engine == scorer.engine.name:
        return scorer
    try:
        return scorer.with_tree(settings.tree, settings.certificate)
    except NotCertified as error:
        if not settings.certify:
            raise
        log.info("certifying, since %s", error.message)
    sample = choose_sample(
        scorer, settings.certify_rows, settings.profiles, settings.certify_sample
    )
    with show_progress() as report:
        issued = certify(
            scorer, sample, settings.tree, minutes=settings.certify_minutes, report=report
        )
    # Where the next start looks for it; a file that was named may be another machine's.
    log.info("certified: %s; %s", issued.write(), "; ".join(issued.summary()))
    return scorer.with_tree(settings.tree)
