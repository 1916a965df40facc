"""Pinned files: what is fetched, resumed, copied, refused, and what is said without a network.

The server is a fake inside the process. Tests that use the fixture `shared` are skipped without it.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from helpers import load_json
from rich.console import Console

from charrm.errors import BadFile, Unreachable
from golden import upstream
from golden.upstream import DATA_FILES, PINS, ROW_LEVEL_ANCHOR, FileDigest, Pin, fetch

CONTENT = {
    "data/one.json": b"one" * 1000,
    "results/two.jsonl": b"two" * 3000,
    "anchor/three.xlsx": b"PK\x03\x04" + bytes(range(256)) * 9,
}
REPO_PATHS = {"anchor/three.xlsx": "middle/three.xlsx"}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "_PAUSES", (0.0, 0.0))


@pytest.fixture
def pins(tmp_path: Path) -> tuple[Pin, ...]:
    """One pin with everything recorded, one with the blob id only, one without its size."""
    made = []
    for number, (target, content) in enumerate(CONTENT.items()):
        (tmp_path / "x").write_bytes(content)
        digest = FileDigest.of(tmp_path / "x")
        (tmp_path / "x").unlink()
        sha256 = None if number == 1 else digest.sha256
        size = digest.bytes if number == 0 else None
        path = REPO_PATHS.get(target, target)
        made.append(Pin(target, "owner/repo", "c0ffee", path, digest.git_blob_sha1, sha256, size))
    return tuple(made)


class Server:
    """Serves CONTENT with ranges; `handler` may answer first, returning None to let it pass."""

    def __init__(self, handler: Callable[[httpx.Request, int], httpx.Response | None]) -> None:
        self.handler = handler
        self.ranges: list[str | None] = []
        self.paths: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        self.ranges.append(request.headers.get("Range"))
        answer = self.handler(request, len(self.paths))
        if answer is not None:
            return answer
        content = content_of(request)
        begin = int((self.ranges[-1] or "bytes=0-")[6:-1])
        if begin >= len(content):
            return httpx.Response(416)
        if not begin:
            return httpx.Response(200, content=content)
        headers = {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"}
        return httpx.Response(206, headers=headers, content=content[begin:])

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(self))


def content_of(request: httpx.Request) -> bytes:
    name = request.url.path.rpartition("/")[2]
    return next(content for target, content in CONTENT.items() if target.endswith(name))


def serving() -> Server:
    return Server(lambda request, number: None)


def pieces(content: bytes, end: BaseException | None) -> Iterator[bytes]:
    """Yield half of the content, then raise, or stop short."""
    yield content[: len(content) // 2]
    if end is not None:
        raise end


def assert_complete(target: Path) -> None:
    found = {p.relative_to(target).as_posix(): p for p in target.rglob("*") if p.is_file()}
    assert found.keys() == CONTENT.keys()  # neither .part nor .rejected
    assert {name: path.read_bytes() for name, path in found.items()} == CONTENT


def test_digests_are_those_of_git_and_sha256sum(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"hello world\n")
    assert FileDigest.of(path) == FileDigest(
        "a948904f2f0f479b8f8197694b30184b0d2ed1c1cd2a1ec0fb85d299a192a447",
        "3b18e512dba79e4c8300dd08aeb37f8e728b8dad",
        12,
    )
    path.write_bytes(b"hello world")
    assert FileDigest.of(path).git_blob_sha1 != "3b18e512dba79e4c8300dd08aeb37f8e728b8dad"
    with pytest.raises(BadFile, match="cannot be read"):
        FileDigest.of(tmp_path / "absent")


def test_everything_is_downloaded_to_its_place(tmp_path: Path, pins: tuple[Pin, ...]) -> None:
    server = serving()
    done = fetch(tmp_path / "set", pins=pins, client=server.client)
    assert_complete(tmp_path / "set")
    assert [item.how for item in done] == ["downloaded"] * 3
    assert str(done[0]) == f"downloaded and verified: {done[0].path}"
    assert [item.path for item in done] == [tmp_path / "set" / name for name in CONTENT]
    assert pins[2].url == f"{upstream.HOST}/owner/repo/c0ffee/middle/three.xlsx"
    assert server.paths == [httpx.URL(pin.url).path for pin in pins]


def test_a_verified_file_is_not_downloaded_again(tmp_path: Path, pins: tuple[Pin, ...]) -> None:
    fetch(tmp_path, pins=pins[:2], client=serving().client)
    server = serving()
    done = fetch(tmp_path, pins=pins, client=server.client)
    assert [item.how for item in done] == ["present", "present", "downloaded"]
    assert len(server.paths) == 1


def test_a_changed_file_is_refused_and_left_alone(tmp_path: Path, pins: tuple[Pin, ...]) -> None:
    fetch(tmp_path, pins=pins, client=serving().client)
    path = tmp_path / pins[0].target
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    server = serving()
    with pytest.raises(BadFile) as refused:
        fetch(tmp_path, pins=pins, client=server.client)
    assert_names_both(refused.value.message, path, pins[0])
    assert path.read_bytes().endswith(b"!")
    assert server.paths == []


def assert_names_both(message: str, path: Path, pin: Pin) -> None:
    found = FileDigest.of(path)
    assert f"git blob {found.git_blob_sha1}, expected {pin.git_blob_sha1}" in message
    if pin.sha256 is not None:
        assert f"sha256 {found.sha256}, expected {pin.sha256}" in message


def leave_part(target: Path, pin: Pin, content: bytes) -> Path:
    part = target / f"{pin.target}.part"
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(content)
    return part


def test_a_part_is_continued(tmp_path: Path, pins: tuple[Pin, ...]) -> None:
    leave_part(tmp_path, pins[0], CONTENT[pins[0].target][:1234])
    server = serving()
    fetch(tmp_path, pins=pins, client=server.client)
    assert_complete(tmp_path)
    assert server.ranges == ["bytes=1234-", None, None]


def test_a_server_that_ignores_the_range_sends_the_whole(
    tmp_path: Path, pins: tuple[Pin, ...]
) -> None:
    leave_part(tmp_path, pins[0], CONTENT[pins[0].target][:1234])
    server = Server(lambda request, number: httpx.Response(200, content=content_of(request)))
    fetch(tmp_path, pins=pins, client=server.client)
    assert_complete(tmp_path)
    assert len(server.paths) == 3


@pytest.mark.parametrize("left", [b"three", b"garbage" * 10_000], ids=["shorter", "longer"])
def test_a_part_of_something_else_is_dropped(
    tmp_path: Path, pins: tuple[Pin, ...], left: bytes
) -> None:
    leave_part(tmp_path, pins[0], left)
    server = serving()
    fetch(tmp_path, pins=pins, client=server.client)
    assert_complete(tmp_path)
    assert server.ranges == [f"bytes={len(left)}-", None, None, None]


def test_a_complete_part_is_taken(tmp_path: Path, pins: tuple[Pin, ...]) -> None:
    leave_part(tmp_path, pins[0], CONTENT[pins[0].target])
    server = serving()  # answers 416: nothing is left to send
    fetch(tmp_path, pins=pins, client=server.client)
    assert_complete(tmp_path)
    assert len(server.paths) == 3


def test_another_range_than_asked_for_is_not_appended(
    tmp_path: Path, pins: tuple[Pin, ...]
) -> None:
    leave_part(tmp_path, pins[0], CONTENT[pins[0].target][:1234])

    def shifted(request: httpx.Request, number: int) -> httpx.Response | None:
        headers = {"Content-Range": "bytes 1000-2999/3000"}
        return httpx.Response(206, headers=headers, content=b"x" * 2000) if number == 1 else None

    server = Server(shifted)
    fetch(tmp_path, pins=pins, client=server.client)
    assert_complete(tmp_path)
    assert server.ranges == ["bytes=1234-", None, None, None]


@pytest.mark.parametrize(
    "end",
    [None, httpx.ReadError("reset"), httpx.ReadTimeout("slow")],
    ids=["short", "error", "t/o"],
)
def test_an_interrupted_body_is_continued(
    tmp_path: Path, pins: tuple[Pin, ...], end: Exception | None
) -> None:
    def cut(request: httpx.Request, number: int) -> httpx.Response | None:
        content = content_of(request)
        headers = {"Content-Length": str(len(content))}
        body = pieces(content, end)
        return httpx.Response(200, headers=headers, content=body) if number == 1 else None

    server = Server(cut)
    fetch(tmp_path, pins=pins, client=server.client)
    assert_complete(tmp_path)
    assert server.ranges[:2] == [None, f"bytes={len(CONTENT[pins[0].target]) // 2}-"]


def test_a_body_that_is_always_cut_leaves_its_part(tmp_path: Path, pins: tuple[Pin, ...]) -> None:
    def cut(request: httpx.Request, number: int) -> httpx.Response | None:
        content = content_of(request)
        headers = {"Content-Length": str(len(content))}
        return httpx.Response(200, headers=headers, content=pieces(content, None))

    server = Server(cut)
    with pytest.raises(Unreachable, match=r"ended at byte 1500 of 3000; 1500 bytes are kept"):
        fetch(tmp_path, pins=pins[:1], client=server.client)
    assert len(server.paths) == 3
    assert not (tmp_path / pins[0].target).exists()
    fetch(tmp_path, pins=pins, client=serving().client)
    assert_complete(tmp_path)


def test_a_stopped_process_leaves_a_part_that_is_continued(
    tmp_path: Path, pins: tuple[Pin, ...]
) -> None:
    def stopped(request: httpx.Request, number: int) -> httpx.Response | None:
        return httpx.Response(200, content=pieces(content_of(request), KeyboardInterrupt()))

    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path, pins=pins, client=Server(stopped).client)
    assert not (tmp_path / pins[0].target).exists()
    server = serving()
    fetch(tmp_path, pins=pins, client=server.client)
    assert_complete(tmp_path)
    assert server.ranges[0] == "bytes=1500-"


@pytest.mark.parametrize(("number", "facts"), [(0, 3), (1, 1), (2, 2)])
def test_a_wrong_digest_is_refused_with_both_values(
    tmp_path: Path, pins: tuple[Pin, ...], number: int, facts: int
) -> None:
    bad = pins[number]

    def other(request: httpx.Request, _: int) -> httpx.Response | None:
        return httpx.Response(200, content=b"other") if request.url.path in bad.url else None

    with pytest.raises(BadFile) as refused:
        fetch(tmp_path, pins=pins, client=Server(other).client)
    rejected = tmp_path / f"{bad.target}.rejected"
    assert rejected.read_bytes() == b"other"
    assert_names_both(refused.value.message, rejected, bad)
    assert refused.value.message.count(", expected ") == facts
    assert not (tmp_path / bad.target).exists()
    assert not (tmp_path / f"{bad.target}.part").exists()
    assert all((tmp_path / pin.target).exists() for pin in pins if pin != bad)  # the others came
    fetch(tmp_path, pins=pins, client=serving().client)
    assert (tmp_path / bad.target).read_bytes() == CONTENT[bad.target]


def test_a_pointer_is_called_a_pointer(tmp_path: Path, pins: tuple[Pin, ...]) -> None:
    server = Server(lambda request, number: httpx.Response(200, content=POINTER))
    with pytest.raises(BadFile, match=r"Git-LFS pointer.*git lfs pull"):
        fetch(tmp_path / "a", pins=pins[:1], client=server.client)
    (tmp_path / "three.xlsx").write_bytes(POINTER)
    with pytest.raises(BadFile, match=r"Git-LFS pointer.*git lfs pull"):
        fetch(tmp_path / "b", tmp_path, pins=pins[2:])


@pytest.mark.parametrize(
    ("status", "error", "attempts"),
    [(404, BadFile, 1), (503, Unreachable, 3), (429, Unreachable, 3)],
)
def test_a_refusing_server_is_named(
    tmp_path: Path, pins: tuple[Pin, ...], status: int, error: type[Exception], attempts: int
) -> None:
    server = Server(lambda request, number: httpx.Response(status, content=b"no"))
    with pytest.raises(error, match=f"the server answered {status}"):
        fetch(tmp_path, pins=pins[:1], client=server.client)
    assert len(server.paths) == attempts
    assert [path for path in tmp_path.rglob("*one*")] == []


def test_without_a_network_every_missing_file_is_listed(
    tmp_path: Path, pins: tuple[Pin, ...]
) -> None:
    def refused(request: httpx.Request, number: int) -> httpx.Response | None:
        raise httpx.ConnectError("connection refused", request=request)

    fetch(tmp_path, pins=pins[:1], client=serving().client)
    server = Server(refused)
    with pytest.raises(Unreachable) as error:
        fetch(tmp_path, pins=pins, client=server.client)
    message = error.value.message
    assert message.startswith("2 of 3 files are not there.")
    assert "connection refused" in message
    assert "--from" in message
    for pin in pins[1:]:
        assert str(tmp_path / pin.target) in message
        assert pin.expected in message
        assert pin.url in message
    assert pins[0].git_blob_sha1 not in message
    assert len(server.paths) == 3  # the third file was not tried


@pytest.mark.parametrize("layout", ["flat", "repository", "set"])
def test_a_local_folder_needs_no_network(
    tmp_path: Path, pins: tuple[Pin, ...], layout: str
) -> None:
    source = tmp_path / "source"
    for pin in pins:
        name = {"flat": Path(pin.path).name, "repository": pin.path, "set": pin.target}[layout]
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(CONTENT[pin.target])
    server = serving()
    done = fetch(tmp_path / "set", source, pins=pins, client=server.client)
    assert_complete(tmp_path / "set")
    assert [item.how for item in done] == ["copied"] * 3
    assert server.paths == []


def test_a_local_folder_with_wrong_and_missing_files_is_refused(
    tmp_path: Path, pins: tuple[Pin, ...]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "one.json").write_bytes(b"another")
    (source / "two.jsonl").write_bytes(CONTENT["results/two.jsonl"])
    with pytest.raises(BadFile) as refused:
        fetch(tmp_path / "set", source, pins=pins)
    message = refused.value.message
    assert message.startswith("2 of 3 files are not there.")
    assert_names_both(message, source / "one.json", pins[0])
    assert "holds none of anchor/three.xlsx, middle/three.xlsx, three.xlsx" in message
    left = [path.name for path in (tmp_path / "set").rglob("*") if path.is_file()]
    assert left == ["two.jsonl"]
    (source / "data").mkdir()
    (source / "data" / "one.json").write_bytes(CONTENT["data/one.json"])  # a second candidate
    assert fetch(tmp_path / "set", source, pins=pins[:1])[0].how == "copied"
    with pytest.raises(BadFile, match="no such folder"):
        fetch(tmp_path / "set", tmp_path / "absent", pins=pins)


def test_a_stand_in_set_is_not_mixed_with_published_files(
    tmp_path: Path, pins: tuple[Pin, ...]
) -> None:
    (tmp_path / upstream.STAND_IN).write_text("{}", encoding="utf-8")
    server = serving()
    with pytest.raises(BadFile, match="stand-in"):
        fetch(tmp_path, pins=pins, client=server.client)
    assert server.paths == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("local", [False, True])
def test_a_full_disk_leaves_nothing_under_the_final_name(
    tmp_path: Path, pins: tuple[Pin, ...], local: bool
) -> None:
    (tmp_path / "one.json").write_bytes(CONTENT["data/one.json"])
    target = tmp_path / "set"
    part = leave_part(target, pins[0], b"")
    part.unlink()
    part.symlink_to("/dev/full")
    source = tmp_path if local else None
    with pytest.raises(BadFile, match="No space left"):
        fetch(target, source, pins=pins[:1], client=serving().client)
    assert list((target / "data").iterdir()) == []
    fetch(target, source, pins=pins[:1], client=serving().client)
    assert (target / "data" / "one.json").read_bytes() == CONTENT["data/one.json"]


def test_an_unusable_target_is_refused(tmp_path: Path, pins: tuple[Pin, ...]) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BadFile, match="cannot be made"):
        fetch(tmp_path / "file", pins=pins, client=serving().client)


def test_progress_is_shown_on_a_terminal_only(
    tmp_path: Path, pins: tuple[Pin, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    fetch(tmp_path / "a", pins=pins, client=serving().client, console=console)
    assert all(pin.target in screen.getvalue() for pin in pins)
    plain = Console(file=(log := io.StringIO()), force_terminal=False)
    fetch(tmp_path / "b", pins=pins, client=serving().client, console=plain)
    assert log.getvalue().strip() == ""
    assert capsys.readouterr() == ("", "")


def test_pins_are_those_of_the_manifest(shared: Path) -> None:
    manifest = load_json(shared / "upstream" / "manifest.json")
    dataset, anchor = manifest["dataset"], manifest["row_level_anchor"]
    recorded = {
        name: (f["git_blob_sha1"], f["sha256"], f["bytes"]) for name, f in dataset["files"].items()
    }
    blobs = dataset["result_files_git_blob_sha1"]
    recorded |= {n: (b, None, None) for n, b in blobs.items() if n.startswith("results/")}
    pinned = {p.path: (p.git_blob_sha1, p.sha256, p.bytes) for p in PINS if p != ROW_LEVEL_ANCHOR}
    assert pinned == recorded
    assert {(pin.repository, pin.commit) for pin in PINS if pin != ROW_LEVEL_ANCHOR} == {
        (dataset["repository"], dataset["commit"])
    }
    assert all(pin.path == pin.target for pin in PINS if pin != ROW_LEVEL_ANCHOR)
    fields = ("repository", "commit", "path", "git_blob_sha1", "sha256")
    assert {name: getattr(ROW_LEVEL_ANCHOR, name) for name in fields} == {
        name: anchor[name] for name in fields
    }
    table = load_json(shared / "upstream" / "published_table.json")
    assert {
        upstream.PAPER_NAMES[model]: Path(pin.path).name
        for model, pin in upstream.RESULT_FILES.items()
    } == table["published_generation_files"]


def test_the_published_data_files_verify(shared: Path, tmp_path: Path) -> None:
    done = fetch(tmp_path, shared / "charactereval", pins=DATA_FILES)
    assert [item.how for item in done] == ["copied"] * 3
    changed = tmp_path / "changed"
    shutil.copyfile(done[0].path, changed)
    with changed.open("ab") as stream:
        stream.write(b" ")
    assert DATA_FILES[0].mismatch(done[0].path) is None
    assert DATA_FILES[0].mismatch(changed) is not None
