"""The server as its users run it: a process, real sockets, the whole way from row to number."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fakes import row
from helpers import grid_steps

from charrm import METRICS, Row, Scorer
from charrm.charactereval import read_metrics, read_profiles, read_test_data
from charrm.client import Client
from charrm.demo import NOTICE, build_demo_checkpoint
from charrm.errors import ShuttingDown
from charrm.results import ScoredRow
from server.demo import ServerProcess

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def server(demo_checkpoint: Path) -> Iterator[ServerProcess]:
    with ServerProcess(demo_checkpoint) as server:
        yield server


@pytest.fixture(scope="module")
def real_tokenizer_checkpoint(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's body behind the published tokenizer: real tokens, a small forward."""
    folder = tmp_path_factory.mktemp("real") / "checkpoint"
    return build_demo_checkpoint(folder, tokenizer=shared / "upstream")


def test_300_real_rows_over_http_equal_the_library(
    shared: Path, real_tokenizer_checkpoint: Path
) -> None:
    data = shared / "charactereval"
    profiles = read_profiles(data / "character_profiles.json")
    metrics = read_metrics(data / "id2metric.jsonl")
    # The shortest rows, so that 600 forwards stay quick; each with the metrics it is due.
    tests = read_test_data(data / "test_data.jsonl")
    tests.sort(key=lambda r: len(str(profiles[r.role])) + len(r.context))
    rows = [
        Row(profile=profiles[r.role], context=r.context, model_output=r.role, metric=metric.zh)
        for r in tests
        for metric in metrics.get(str(r.id), [])
    ][:300]
    library = Scorer.open(real_tokenizer_checkpoint, device="cpu")
    expected = library.score(rows)
    with ServerProcess(real_tokenizer_checkpoint) as server, Client(server.url) as client:
        assert client.identity() == library.identity.to_json()
        assert client.score_batch(rows) == expected
        assert list(client.stream_batch(rows[:20])) == expected[:20]
        assert client.score(rows[0]) == expected[0]
    scored = [result for result in expected if isinstance(result, ScoredRow)]
    assert len(scored) == 300
    assert {result.metric_en for result in scored} == set(METRICS)
    assert len({result.p for result in scored}) > 30  # a constant would be equal too


def test_the_readme_shows_a_real_answer(server: ServerProcess) -> None:
    text = README.read_text(encoding="utf-8")
    request = re.search(r"curl -s \S+(/v1/score) .*? -d '(\{.*?\})'", text, re.DOTALL)
    shown = re.search(r"```json\n(\{\"score\".*?\})\n```", text, re.DOTALL)
    assert request is not None
    assert shown is not None
    documented = json.loads(shown[1])
    answer = httpx.post(server.url + request[1], content=request[2].encode()).json()
    # Another CPU or another state of the code gives another identity and may move p a little.
    assert answer.keys() == documented.keys()
    assert grid_steps(answer["p"], documented["p"]) <= 4
    for measured in ("score", "p", "logit", "identity"):
        answer.pop(measured)
        documented.pop(measured)
    assert answer == documented


def test_the_readme_python_runs(
    server: ServerProcess, demo_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        code = block.replace(".demo/checkpoint", str(demo_checkpoint))
        exec(code.replace("http://127.0.0.1:8000", server.url), names)
    library, server_score = capsys.readouterr().out.split()
    assert library == server_score
    assert 1 <= float(library) <= 5


def test_a_client_that_leaves_costs_only_its_own_rows(server: ServerProcess) -> None:
    body = json.dumps({"rows": [row(context="长" * 600)] * 300}).encode()
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 80)) as leaving:
        head = f"POST /v1/score/batch HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        leaving.sendall(head.encode() + body)
    with Client(server.url, timeout=60) as client:
        assert client.score(row()).ok
        assert all(result.ok for result in client.score_batch([row()] * 3))


def test_a_stopping_server_answers_what_waits(demo_checkpoint: Path) -> None:
    rows = [row(context="长" * 600)] * 2000
    with ServerProcess(demo_checkpoint) as server, Client(server.url) as client:
        stream = client.stream_batch(rows)
        assert next(stream).ok
        server.terminate()
        with pytest.raises(ShuttingDown):
            list(stream)


def test_a_model_that_cannot_be_opened_ends_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "server", "--model", str(tmp_path), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert f"checkpoint_incomplete: {tmp_path}: missing config.json" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_tree_without_a_certificate_ends_the_process(
    demo_checkpoint: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "server", "--model", str(demo_checkpoint), "--port", "0",
               "--engine", "tree", "--device", "cpu"]  # fmt: skip
    environment = {**os.environ, "CHARRM_CACHE": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 1
    assert "not_certified: the tree engine has no certificate here" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_demo_scores_every_row_and_says_that_it_means_nothing(demo_checkpoint: Path) -> None:
    command = [sys.executable, "-m", "server.demo", "--folder", str(demo_checkpoint)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(NOTICE) == 2
    for name in METRICS:
        assert len(re.findall(rf"^ *{name} +\d+ ", ended.stdout, re.MULTILINE)) >= 2
    assert re.search(r" 4096 +440\b", ended.stdout)
    assert "differs (against the audited release)" in ended.stdout
