"""What made a score: digests of every file, of the code and of the environment, as one value.

Digests of the audited release are facts about it and are embedded here.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from charrm.errors import BadFile
from charrm.files import write_atomically

AUDITED_HUB = "morecry/BaichuanCharRM"
AUDITED_REVISION = "e953da5f57b86db7adca3a2714b4c3720f5b96a2"
AUDITED_SHA256 = {
    "config.json": "25ae0bd0e2ca917a4caf71f70b576f687361ee5866baf156f88a58c9eca0a489",
    "tokenizer_config.json": "3d136a6d68712e21f7801991aa6166c30d6752b1778e1aa722c77896d668a5fb",
    "special_tokens_map.json": "2f5a911659701df96e4ca09b52061ae75ed404b12360301edb09f14dbea7cb26",
    "tokenizer.model": "79452955be6b419a65984273a9f08af86042e1c2a75ee3ba989cbf620a133cc2",
    "pytorch_model.bin.index.json": (
        "df7e49338fb4014b8bc7f2c99184e0bd0c84dbc6c0b2291b8979c912a4ce466e"
    ),
}
_FRESH_SECONDS = 2.0  # a file this young may still change within one tick of its timestamp


@dataclass(frozen=True)
class Identity:
    """Everything that decides a score. `digest` is over all other fields.

    `content` identifies the model apart from its file layout: weights by tensor name, dtype,
    shape and bytes, plus the small files.
    """

    protocol: str
    is_protocol: bool  # False when the dtype is not the protocol's
    engine: str
    engine_settings: dict[str, Any]
    certificate: str  # digest of what proved the engine; empty for the official order itself
    dtype: str
    device: str
    source: str
    files: dict[str, str]  # name -> sha256 of every file loaded
    weights_sha256: str  # content, the same for every layout
    stored_dtype: str
    audit: dict[str, str]  # audited small file -> matches | differs | absent
    versions: dict[str, str]
    environment: dict[str, Any]  # CPU capability, threads, flags, numeric fingerprint
    code_sha256: str
    content: str = field(init=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        small = {n: d for n, d in self.files.items() if n in _CONTENT_FILES}
        object.__setattr__(self, "content", digest_json([self.weights_sha256, small]))
        fields = {k: v for k, v in self.__dict__.items() if k not in ("digest", "source")}
        object.__setattr__(self, "digest", digest_json(fields))

    def to_json(self) -> dict[str, Any]:
        """Return the identity as JSON-ready values."""
        return asdict(self)


# An index or shard name says how the weights are stored, not what they are.
_CONTENT_FILES = frozenset(AUDITED_SHA256) - {"pytorch_model.bin.index.json"}


def digest_json(value: object) -> str:
    """Return the sha256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def audit(files: dict[str, str]) -> dict[str, str]:
    """Compare the small files with the audited release."""
    return {
        name: "absent" if name not in files else "matches" if files[name] == sha else "differs"
        for name, sha in AUDITED_SHA256.items()
    }


@cache
def code_digest(root: Path = Path(__file__).parent) -> str:
    """Return the sha256 over the python sources of a package, by relative path."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def digest_files(paths: Iterable[Path]) -> dict[str, str]:
    """Return name -> sha256 of files; known ones (path, size, both times) come from a cache."""
    # Keys come before the bytes: a file that changes meanwhile then has another key.
    keys = {path: _cache_key(path) for path in paths}
    known = _read_cache()
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda path: known.get(keys[path]) or _sha256(path), keys)
        digests = dict(zip(keys, found, strict=True))
    entries = {keys[path]: sha for path, sha in digests.items() if _settled(path)}
    if not entries.keys() <= known.keys():
        _write_cache({**known, **entries})
    return {path.name: sha for path, sha in digests.items()}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _cache_key(path: Path) -> str:
    stat = path.stat()
    return f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}"


def _settled(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > _FRESH_SECONDS


def cache_folder() -> Path:
    """Return where things are kept that can be computed again: CHARRM_CACHE or the user's."""
    base = os.environ.get("CHARRM_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "charrm"


def _cache_path() -> Path:
    return cache_folder() / "sha256.json"


def _read_cache() -> dict[str, str]:
    try:
        content = json.loads(_cache_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {k: v for k, v in content.items() if isinstance(v, str) and len(v) == 64}


def _write_cache(entries: dict[str, str]) -> None:
    """Replace the cache as a whole; a cache that cannot be written only costs time later."""
    path = _cache_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(entries))
    except (OSError, BadFile):
        pass
