"""Opening a checkpoint needs little more memory than its weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.loading import measure, write_checkpoint


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's VmHWM")
@pytest.mark.parametrize("layout", ["safetensors file", "pickle shards"])
def test_peak_memory(tmp_path: Path, layout: str) -> None:
    size = write_checkpoint(tmp_path / "checkpoint", 256 * 2**20, layout)
    peak = measure(tmp_path / "checkpoint")["peak_bytes"]
    # The control is the lower bound: less than the weights would mean that nothing was measured.
    assert 0.95 * size < peak < 1.25 * size
