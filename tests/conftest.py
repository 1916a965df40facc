"""Shared fixtures, and a loud line about the material that some tests need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = Path(
    os.environ.get("CHARRM_SHARED", Path(__file__).resolve().parents[2] / "shared")
).resolve()


def pytest_report_header(config: pytest.Config) -> str:
    if SHARED.is_dir():
        return f"shared material: {SHARED}"
    return (
        f"SHARED MATERIAL ABSENT at {SHARED} (set CHARRM_SHARED): the tests against the official "
        "outputs, the real tokenizer and the benchmark's files ARE SKIPPED"
    )


@pytest.fixture(scope="session")
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip("shared material absent")
    return SHARED


@pytest.fixture(scope="session")
def anchor(shared: Path) -> Path:
    return shared / "anchor"


@pytest.fixture(scope="session")
def demo_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from charrm.demo import build_demo_checkpoint

    return build_demo_checkpoint(tmp_path_factory.mktemp("demo") / "checkpoint")


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the digest cache of the tests apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHARRM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
