"""What made a score, as digests: complete, stable, and cached without ever being stale."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from helpers import SMALL_FILES, load_json

from charrm import Scorer, identity
from charrm.errors import InvalidSetting
from charrm.identity import (
    AUDITED_HUB,
    AUDITED_REVISION,
    AUDITED_SHA256,
    Identity,
    audit,
    code_digest,
    digest_files,
)
from charrm.runtime import parse_device, parse_dtype

OLD = 1_700_000_000 * 10**9  # ns; a file older than the clock's tick may be cached
EXAMPLE = Identity(
    protocol="charrm/1",
    is_protocol=True,
    engine="eager",
    engine_settings={},
    certificate="",
    dtype="bfloat16",
    device="cpu (a)",
    source="/a",
    files={"config.json": "1" * 64, "model.safetensors": "2" * 64},
    weights_sha256="3" * 64,
    stored_dtype="bfloat16",
    audit={"config.json": "differs"},
    versions={"torch": "1"},
    environment={"threads": 1},
    code_sha256="4" * 64,
)


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CHARRM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "charrm" / "sha256.json"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"one")
    os.utime(path, ns=(OLD, OLD))
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files opened through `Path.open` in binary mode."""
    opened: list[str] = []
    original = Path.open

    def spy(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "rb":
            opened.append(self.name)
        return original(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", spy)
    return opened


def test_a_known_file_is_not_read_again(cache: Path, file: Path, reads: list[str]) -> None:
    assert digest_files([file]) == {"weights.bin": sha(b"one")}
    assert digest_files([file]) == {"weights.bin": sha(b"one")}
    assert reads == ["weights.bin"]
    assert list(load_json(cache).values()) == [sha(b"one")]


@pytest.mark.parametrize("content", [b"two", b"longer"])
@pytest.mark.parametrize("mtime", [OLD, OLD + 1])
@pytest.mark.parametrize("replaced", [True, False])
@pytest.mark.usefixtures("cache")
def test_a_changed_file_is_read_again(
    file: Path, content: bytes, mtime: int, replaced: bool
) -> None:
    """Even one of the same size and mtime: the change time is part of the key."""
    digest_files([file])
    if replaced:
        file.unlink()
    file.write_bytes(content)
    os.utime(file, ns=(mtime, mtime))
    assert digest_files([file]) == {"weights.bin": sha(content)}


def test_a_fresh_file_is_not_cached(cache: Path, file: Path, reads: list[str]) -> None:
    """It may still change within one tick of its timestamps."""
    file.write_bytes(b"new")
    digest_files([file])
    assert not cache.exists() or sha(b"new") not in load_json(cache).values()
    digest_files([file])
    assert reads == ["weights.bin"] * 2


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "\x00", '{"k": 3}', json.dumps({"k": "short"})]
)
def test_a_corrupt_cache_is_ignored(cache: Path, file: Path, content: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(content)
    assert digest_files([file]) == {"weights.bin": sha(b"one")}
    assert list(load_json(cache).values()) == [sha(b"one")]


def test_a_cache_that_cannot_be_written_is_tolerated(
    cache: Path, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert digest_files([file]) == {"weights.bin": sha(b"one")}
    assert not cache.exists()


def test_a_full_disk_leaves_the_old_cache(
    cache: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest_files([file])
    before = cache.read_text()
    second = tmp_path / "second.bin"
    second.write_bytes(b"2")
    os.utime(second, ns=(OLD, OLD))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert digest_files([file, second]) == {"weights.bin": sha(b"one"), "second.bin": sha(b"2")}
    assert cache.read_text() == before
    assert [path.name for path in cache.parent.iterdir()] == [cache.name]


def test_the_audit_knows_the_published_files(shared: Path) -> None:
    upstream = shared / "upstream"
    files = digest_files(upstream / name for name in AUDITED_SHA256)
    assert audit(files) == dict.fromkeys(AUDITED_SHA256, "matches")
    files["config.json"] = "0" * 64
    del files["tokenizer.model"]
    found = audit(files)
    assert (found["config.json"], found["tokenizer.model"]) == ("differs", "absent")


def test_the_embedded_facts_are_those_of_the_manifest(shared: Path) -> None:
    model = load_json(shared / "upstream" / "manifest.json")["model"]
    assert (model["hub"], model["revision"]) == (AUDITED_HUB, AUDITED_REVISION)
    listed = {name: entry["sha256"] for name, entry in model["files"].items()}
    assert {name: listed[name] for name in AUDITED_SHA256} == AUDITED_SHA256
    assert {name for name in listed if not name.endswith(".py")} == AUDITED_SHA256.keys()


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": "charrm/2"},
        {"is_protocol": False},
        {"engine": "tree"},
        {"dtype": "float32"},
        {"device": "cpu (b)"},
        {"files": {**EXAMPLE.files, "config.json": "0" * 64}},
        {"weights_sha256": "0" * 64},
        {"stored_dtype": "float32"},
        {"engine_settings": {"pack_tokens": 1}},
        {"certificate": "0" * 64},
        {"audit": {"config.json": "matches"}},
        {"versions": {"torch": "2"}},
        {"environment": {"threads": 2}},
        {"code_sha256": "0" * 64},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_digest_is_over_every_field(changes: dict[str, Any]) -> None:
    assert replace(EXAMPLE).digest == EXAMPLE.digest
    assert replace(EXAMPLE, **changes).digest != EXAMPLE.digest


def test_every_field_but_the_place_is_tried_above() -> None:
    names = {f.name for f in fields(Identity) if f.init}
    marks = test_the_digest_is_over_every_field.pytestmark
    tried = {name for changes in marks[0].args[1] for name in changes}
    assert names - tried == {"source"}
    assert replace(EXAMPLE, source="/b").digest == EXAMPLE.digest


def test_content_is_apart_from_the_layout() -> None:
    files = {"config.json": "1" * 64, "pytorch_model.bin": "9" * 64}
    other = replace(EXAMPLE, files=files, device="cpu (b)", engine="tree")
    assert other.content == EXAMPLE.content
    for changes in ({"weights_sha256": "0" * 64}, {"files": {"config.json": "0" * 64}}):
        assert replace(EXAMPLE, **changes).content != EXAMPLE.content


def test_the_identity_of_an_opened_checkpoint(demo_checkpoint: Path) -> None:
    first, second = (Scorer.open(demo_checkpoint, device="cpu").identity for _ in range(2))
    assert first == second
    shards = {path.name for path in demo_checkpoint.glob("*.safetensors*")}
    assert first.files.keys() == {*SMALL_FILES, *shards}
    for name, digest in first.files.items():
        assert digest == sha((demo_checkpoint / name).read_bytes())
    assert first.audit.keys() == AUDITED_SHA256.keys()
    assert {"charrm", "torch", "transformers", "sentencepiece"} <= first.versions.keys()
    assert {"cpu_capability", "threads", "numeric_fingerprint"} <= first.environment.keys()
    assert json.loads(json.dumps(first.to_json())) == first.to_json()


def test_the_code_digest_changes_with_any_source(tmp_path: Path) -> None:
    package = tmp_path / "charrm"
    shutil.copytree(Path(identity.__file__).parent, package)

    def digest() -> str:
        return code_digest.__wrapped__(package)  # without the cache

    assert digest() == code_digest()
    (package / "notes.txt").write_text("no source")
    assert digest() == code_digest()
    source = package / "engines" / "eager.py"
    source.write_text(source.read_text(encoding="utf-8") + "#\n", encoding="utf-8")
    changed = digest()
    assert changed != code_digest()
    source.rename(package / "engines" / "eager2.py")
    assert digest() not in (changed, code_digest())


@pytest.mark.parametrize("name", ["", "gpu", "cpu:1", "meta", "mps", "cuda:99", "cpu cuda"])
def test_a_device_that_is_not_here_is_refused(name: str) -> None:
    assert str(parse_device("cpu")) == "cpu"
    with pytest.raises(InvalidSetting, match="device: found"):
        parse_device(name)


@pytest.mark.parametrize("name", ["", "bf16", "float16", "torch.bfloat16", "double"])
def test_a_dtype_that_is_not_offered_is_refused(name: str) -> None:
    assert str(parse_dtype("float32")) == "torch.float32"
    with pytest.raises(InvalidSetting, match=r"bfloat16, float32"):
        parse_dtype(name)
