"""A certificate: one engine, one machine, proved bit-equal to the official order. No torch.

It is bound to everything that could change a bit: weights, small files, protocol, code, device,
library versions, thread count, numeric fingerprint and engine settings. `charrm certify` issues it
(`charrm.certify`); the tree engine is opened only with one that fits. It guards against mistakes,
not against forgery: its digest is not a signature.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from charrm.engines import TreeSettings
from charrm.errors import BadFile, NotCertified
from charrm.files import read_object, write_atomically
from charrm.identity import Identity, cache_folder, digest_json

if TYPE_CHECKING:
    from charrm.engines.classes import NumericClasses

KIND = "charrm certificate 1"


@dataclass(frozen=True)
class Certificate:
    """What was compared, and for what it holds. `digest` is over all other fields."""

    bound: dict[str, Any]  # see `bound_to`
    classes: str  # NumericClasses as JSON, measured when it was issued
    measured: dict[str, Any]  # rows per family, lengths, seconds, break-even
    issued: str  # UTC
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        content = {k: v for k, v in self.__dict__.items() if k != "digest"}
        object.__setattr__(self, "digest", digest_json(content))

    def numeric_classes(self) -> NumericClasses:
        """The classes the engine must plan with. Raises BadFile."""
        from charrm.engines.classes import NumericClasses

        return NumericClasses.from_json(self.classes)

    def summary(self) -> list[str]:
        """What a person wants to know: what was compared, what it cost, when it has paid."""
        seconds, sample = self.measured["seconds"], self.measured["sample"]
        count = self.measured["rows"]["sample"]
        lines = [
            f"sample: {count} of {sample['of']} rows, {sample['shortest']} to {sample['longest']} "
            f"tokens, token ratio {sample['token_ratio']:.2f}: official order "
            f"{seconds['eager']:.1f} s, tree {seconds['tree']:.1f} s"
        ]
        rows = self.measured["break_even_rows"]
        if rows is None:
            lines.append("break-even: never, on rows like these the tree is not faster")
        else:
            lines.append(
                f"break-even: {seconds['all']:.1f} s of certification are paid back after "
                f"{rows} rows like these ({self.measured['saved_seconds_per_row']:.3f} s each)"
            )
        return lines

    def write(self, path: Path | None = None) -> Path:
        """Write to `path`, by default where `find_certificate` looks. Raises BadFile."""
        path = path or _folder() / f"{digest_json(self.bound)}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadFile(f"{path.parent}: cannot be made: {error}.") from None
        write_atomically(path, json.dumps({"kind": KIND, **asdict(self)}, indent=1) + "\n")
        return path


def bound_to(identity: Identity, settings: TreeSettings) -> dict[str, Any]:
    """What a certificate of the tree engine is bound to, from the eager identity of the same model.

    File layout and source are left out: they cannot change a bit, `weights_sha256` and `content`
    are over what was loaded.
    """
    names = ("protocol", "dtype", "device", "weights_sha256", "content", "versions", "environment",
             "code_sha256")  # fmt: skip
    values = {name: getattr(identity, name) for name in names}
    return {"engine": "tree", "settings": asdict(settings), **values}


def read_certificate(path: Path) -> Certificate:
    """Read a certificate; raises BadFile when it is none, or not as it was written."""
    content = read_object(path)
    kind, digest = content.pop("kind", None), content.pop("digest", None)
    try:
        if kind != KIND:
            raise TypeError(f"kind is {kind!r}, expected {KIND!r}")
        certificate = Certificate(**content)
        if certificate.digest != digest or not isinstance(certificate.bound, dict):
            raise TypeError(f"its digest is {certificate.digest}, it names {digest}")
    except TypeError as error:
        raise BadFile(f"{path}: not a certificate as written: {error}; certify again.") from None
    return certificate


def find_certificate(bound: Mapping[str, Any], path: Path | None = None) -> Certificate:
    """Return the certificate that holds for `bound`.

    Looks at `path`, or else where `charrm certify` keeps them. Raises NotCertified with what the
    nearest certificate differs in, BadFile for a damaged one.
    """
    own = path or _folder() / f"{digest_json(bound)}.json"
    if path is not None or own.is_file():
        certificate = read_certificate(own)
        differences = list(_differences("", certificate.bound, dict(bound)))
        if not differences:
            return certificate
        raise NotCertified(_refusal(own, differences))
    others = []
    for other in sorted(_folder().glob("*.json")):
        try:
            found = list(_differences("", read_certificate(other).bound, dict(bound)))
        except BadFile:
            continue  # it may be anybody's; the one that matters has its own name
        others.append((len(found), str(other), found))
    if not others:
        raise NotCertified(
            f"the tree engine has no certificate here ({_folder()} holds none); {_ADVICE}"
        )
    _, nearest, differences = min(others)
    raise NotCertified(_refusal(Path(nearest), differences))


_ADVICE = (
    "run `charrm certify` with the same model and settings on this machine, start the server with "
    "--certify, or use --engine eager."
)


def _refusal(path: Path, differences: list[str]) -> str:
    return (
        f"the tree engine has no certificate for this model, machine and settings. {path} is for "
        f"another: {'; '.join(differences)}. {_ADVICE[0].upper()}{_ADVICE[1:]}"
    )


def _differences(name: str, then: Any, now: Any) -> Iterator[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(then.keys() | now.keys()):
            inner = f"{name}.{key}" if name else key
            yield from _differences(inner, then.get(key), now.get(key))
    elif then != now:
        yield f"{name} was {_short(then)}, is {_short(now)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."


def _folder() -> Path:
    return cache_folder() / "certificates"
