"""`python -m server.openapi`: write the committed description of the HTTP interface."""

from __future__ import annotations

import json
from pathlib import Path

from charrm.errors import Starting
from charrm.scorer import Scorer
from server.app import create_app
from server.dispatch import Dispatch
from server.settings import Settings

PATH = Path(__file__).with_name("openapi.json")


def render() -> str:
    """Return the OpenAPI document as it is committed."""

    def no_scorer() -> Scorer:
        raise Starting("only the routes are described here")

    document = create_app(Settings(model=""), Dispatch(no_scorer, max_waiting_rows=0)).openapi()
    return json.dumps(document, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    PATH.write_text(render(), encoding="utf-8")
