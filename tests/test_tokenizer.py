"""Tokens equal those of the official tokenizer class, one text at a time and over all prompts."""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from pathlib import Path
from typing import Any

import pytest
from helpers import chat_prompt, copy_small_files, edit_json, load_json

from charrm.errors import CheckpointCorrupt, CheckpointError, CheckpointIncomplete
from charrm.protocol import METRICS, Row, compose, keep_last, render_profile
from charrm.tokenizer import TOKENIZER_FILES, BaichuanTokenizer, load_tokenizer


@pytest.fixture(scope="module")
def published(shared: Path) -> BaichuanTokenizer:
    return load_tokenizer(shared / "upstream")


@pytest.fixture(scope="module")
def small(anchor: Path) -> BaichuanTokenizer:
    return load_tokenizer(anchor)


@pytest.fixture(scope="module")
def official(anchor: Path) -> Any:
    return load_json(anchor / "tokens.json")


def test_every_official_text(published: BaichuanTokenizer, official: Any) -> None:
    texts = official["texts"]
    assert len(texts) == 56
    wrong = [case["text"] for case in texts if published.encode_text(case["text"]) != case["ids"]]
    assert wrong == []


def test_pieces_alone_would_not_do(published: BaichuanTokenizer, official: Any) -> None:
    """The control: the split rule for special literals decides some of these texts."""
    plain = published.sp_model
    wrong = [c["text"] for c in official["texts"] if plain.encode(c["text"]) != c["ids"]]
    assert "你好 </s> 再见" in wrong
    assert "你好</s>再见" not in wrong


def test_the_digest_over_all_official_prompts(
    published: BaichuanTokenizer, official: Any, shared: Path
) -> None:
    folder, stored = shared / "charactereval", official["blank_set"]
    profiles = load_json(folder / "character_profiles.json")
    metrics = load_json(folder / "id2metric.jsonl")
    digest = hashlib.sha256()
    lengths: list[int] = []
    first: list[dict[str, Any]] = []
    for row in load_json(folder / "test_data.jsonl"):
        for metric_en, metric_zh in metrics.get(str(row["id"]), []):
            profile, context = profiles[row["role"]], row["context"]
            prompt = compose(Row(profile, None, context, model_output="", metric=metric_en))
            assert prompt.metric.zh == metric_zh
            ids, dropped = keep_last(published.encode_text(prompt.text))
            assert dropped == 0
            packed = struct.pack(f"<{len(ids)}I", *ids)
            digest.update(struct.pack("<I", len(ids)) + packed)
            lengths.append(len(ids))
            if len(first) < len(stored["first_rows"]):
                sha = hashlib.sha256(packed).hexdigest()
                first.append(
                    {"id": row["id"], "metric_en": metric_en, "n_tokens": len(ids), "sha256": sha}
                )
    assert first == stored["first_rows"]
    assert len(lengths) == stored["rows"] == 8032
    assert sum(lengths) == stored["total_tokens"]
    assert (min(lengths), max(lengths)) == (stored["min_tokens"], stored["max_tokens"])
    assert digest.hexdigest() == stored["sha256"]


def test_a_profile_as_json_gives_other_tokens(published: BaichuanTokenizer, shared: Path) -> None:
    profiles = load_json(shared / "charactereval" / "character_profiles.json")
    for profile in profiles.values():
        as_json = json.dumps(profile, ensure_ascii=False)
        assert published.encode_text(render_profile(profile)) != published.encode_text(as_json)


def test_ids_of_the_anchor_rows(small: BaichuanTokenizer, anchor: Path) -> None:
    expected = load_json(anchor / "expected.json")
    wrong = []
    for row in expected["rows"]:
        profile = expected["profiles"][row["role"]]
        prompt = compose(Row(profile, None, row["context"], row["model_output"], row["metric_en"]))
        assert prompt.text == row["input_text"]
        ids, dropped = keep_last(small.encode_text(prompt.text))
        if ids != row["input_ids"] or dropped:
            wrong.append(row["input_text"])
    assert wrong == []
    assert {row["metric_zh"] for row in expected["rows"]} == set(METRICS.values())


def test_ids_of_the_truncated_anchor_row(small: BaichuanTokenizer, anchor: Path) -> None:
    expected = load_json(anchor / "expected.json")
    row = expected["truncated_row"]
    context = "陆小满：" + "雨" * 9000 + "\n阿川：嗯。"
    profile = expected["profiles"][row["role"]]
    text = chat_prompt(profile, context, row["model_output"], row["metric_zh"])
    ids, dropped = keep_last(small.encode_text(text))
    assert dropped == row["tokens_dropped"]
    assert len(ids) == 4096 == row["tokens_before"] - dropped
    assert (ids[:8], ids[-8:]) == (row["first_ids"], row["last_ids"])


def test_a_long_text_leaves_the_console_alone(
    demo_checkpoint: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        tokenizer = load_tokenizer(demo_checkpoint)
        assert len(tokenizer.encode_text("雨" * 9000)) > 4096
    assert capfd.readouterr() == ("", "")
    assert [r.message for r in caplog.records if r.levelno >= logging.INFO] == []


def test_transformers_would_warn_about_a_long_text(
    demo_checkpoint: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The control: without the product's care the same text writes to the console or a log."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        load_tokenizer(demo_checkpoint).encode("雨" * 9000, add_special_tokens=False)
    finally:
        logger.removeHandler(caplog.handler)
    assert "longer than the specified maximum" in caplog.text + capfd.readouterr().err


def test_special_tokens_of_the_published_files(published: BaichuanTokenizer) -> None:
    """`special_tokens_map.json` outranks the config: a mask made from pad ids would hide `</s>`."""
    assert (published.pad_token, published.pad_token_id) == ("</s>", 2)
    assert (published.unk_token_id, published.bos_token_id, published.eos_token_id) == (0, 1, 2)
    assert published.vocab_size == len(published.get_vocab()) == 125696
    assert published.model_max_length == 4096


def test_the_special_tokens_map_is_honoured(shared: Path, tmp_path: Path) -> None:
    folder = copy_small_files(shared / "upstream", tmp_path)
    edit_json(folder / "special_tokens_map.json", pad_token="<s>")
    assert load_tokenizer(folder).pad_token_id == 1


def test_the_split_rule_comes_from_the_files(shared: Path, tmp_path: Path) -> None:
    folder = copy_small_files(shared / "upstream", tmp_path)
    for name in TOKENIZER_FILES[1:]:
        eos = {**load_json(folder / name)["eos_token"], "single_word": False}
        edit_json(folder / name, eos_token=eos)
    assert 2 in load_tokenizer(folder).encode_text("你好</s>再见")
    assert 2 not in load_tokenizer(shared / "upstream").encode_text("你好</s>再见")


def test_characters_counts_the_text(published: BaichuanTokenizer, official: Any) -> None:
    texts = [case["text"] for case in official["texts"]]
    texts += ["".join(texts), "𠀀𠀁 🙂🏽\n\n  x" * 50, "\u0301e\u0301 \ud7ff\ue000\U0010ffff"]
    wrong = [t for t in texts if published.characters(published.encode_text(t)) != len(t)]
    assert wrong == []


def test_characters_of_a_cut_text(small: BaichuanTokenizer) -> None:
    """A character whose bytes are torn apart counts as lost with its first byte."""
    text = "a𠀀b"
    ids = small.encode_text(text)
    counts = [small.characters(ids[:n]) for n in range(len(ids) + 1)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, len(text))


def refusal(folder: Path, kind: type[CheckpointError]) -> str:
    with pytest.raises(kind) as caught:
        load_tokenizer(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_missing_files_are_all_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, CheckpointIncomplete)
    assert all(name in message for name in TOKENIZER_FILES)


@pytest.mark.parametrize("name", TOKENIZER_FILES)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe{}", b"version https://git-lfs"])
def test_a_corrupt_file_is_refused(
    demo_checkpoint: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    folder = copy_small_files(demo_checkpoint, tmp_path)
    (folder / name).write_bytes(content)
    assert refusal(folder, CheckpointCorrupt)


def test_half_a_vocabulary_is_refused(demo_checkpoint: Path, tmp_path: Path) -> None:
    folder = copy_small_files(demo_checkpoint, tmp_path)
    whole = (folder / "tokenizer.model").read_bytes()
    (folder / "tokenizer.model").write_bytes(whole[: len(whole) // 2])
    refusal(folder, CheckpointCorrupt)


def test_another_tokenizer_class_is_refused(demo_checkpoint: Path, tmp_path: Path) -> None:
    """Without the name transformers would ask its Auto classes."""
    folder = copy_small_files(demo_checkpoint, tmp_path)
    load_tokenizer(folder)  # the control
    edit_json(folder / "tokenizer_config.json", tokenizer_class=...)
    with pytest.raises(CheckpointCorrupt, match="tokenizer_class is None"):
        load_tokenizer(folder)


def test_another_end_of_sequence_is_refused(demo_checkpoint: Path, tmp_path: Path) -> None:
    folder = copy_small_files(demo_checkpoint, tmp_path)
    for name in TOKENIZER_FILES[1:]:
        edit_json(folder / name, eos_token="<s>")
    assert "expected 2" in refusal(folder, CheckpointCorrupt)


def test_another_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from charrm import tokenizer
    from charrm.errors import MissingDependency

    monkeypatch.setattr(tokenizer, "version", lambda _: "4.57.0")
    with pytest.raises(MissingDependency, match=r"found 4\.57\.0, expected 4\.36\.2"):
        tokenizer._check_transformers()
