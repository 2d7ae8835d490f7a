"""Tests of data.py: what is read, how it is split and packed, and that no sequence is lost, repeated or shared."""

import base64
import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import tiktoken
import torch

import data

BYTES = data.tokenizer("bytes")
EOT = BYTES.eot_token
# what tiktoken calls these ranks in its cache
GPT2_FILES = ("6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
CL100K_FILE = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
NO_NETWORK = """
import socket
def refuse(*args, **kwargs):
    raise OSError("no network in this test")
socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse
"""


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """Refuses every connection and returns the list of attempts; tiktoken's cache is an empty folder."""
    attempts = []

    def refuse(*args, **kwargs):
        attempts.append(args)
        raise OSError("no network in this test")

    for owner, name in ((socket, "getaddrinfo"), (socket, "create_connection"), (socket.socket, "connect")):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    return attempts


def write_documents(folder, texts):
    folder.mkdir(exist_ok=True)
    for i, text in enumerate(texts):
        (folder / f"{i:04d}.txt").write_text(text)
    return str(folder)


def write_ranks(path, extra):
    """A rank file: the 256 bytes in order, then the pairs (token, rank) of `extra`."""
    pairs = [(bytes([i]), i) for i in range(256)] + extra
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in pairs))
    return str(path)


def documents_of(stream):
    """The texts between the end-of-text tokens of a stream."""
    text = BYTES.decode(stream.tolist())
    assert text.endswith(data.END_OF_TEXT)
    return text.split(data.END_OF_TEXT)[:-1]


def numbered(sequences, seq_len):
    """A stream whose sequence i begins with token i * seq_len."""
    return torch.arange(sequences * seq_len + 1, dtype=torch.int32)


def draw(tokens, seq_len, batch_size, world_size, steps, state=None):
    """The numbers of the sequences that all ranks draw, step by step and rank by rank, and the state afterwards."""
    ranks = [data.Batches(tokens, seq_len, batch_size, 5, rank, world_size) for rank in range(world_size)]
    for rank in ranks if state else []:
        rank.load_state_dict(json.loads(json.dumps(state)))
    drawn = [int(row[0]) // seq_len for _ in range(steps) for rank in ranks for row in rank.next()[0]]
    assert all(rank.state_dict() == ranks[0].state_dict() for rank in ranks)
    return drawn, ranks[0].state_dict()


# ---- tokenizers ----


def test_bytes_tokenizer():
    assert (BYTES.n_vocab, EOT) == (257, 256)
    text = "tab\t, é, 漢, \r\n\n\n nul-free " + "long line " * 1000
    assert data.encode(text, BYTES).tolist() == list(text.encode()) + [EOT]
    assert BYTES.decode(data.encode(text, BYTES).tolist()[:-1]) == text


def test_text_that_spells_end_of_text_is_text():
    ids = data.encode("a<|endoftext|>b", BYTES).tolist()
    assert ids == list(b"a<|endoftext|>b") + [EOT]


def test_long_documents_are_encoded_in_pieces(monkeypatch):
    text = "one line\nanother\n\n" * 20 + "x" * 100
    whole = data.encode(text, BYTES)
    monkeypatch.setattr(data, "PIECE", 16)
    assert torch.equal(data.encode(text, BYTES), whole)


@pytest.mark.parametrize("name, files", [("gpt2", GPT2_FILES), ("cl100k_base", (CL100K_FILE,)), ("o200k_harmony", ())])
def test_no_network_and_no_cache_is_one_clear_line(name, files, no_network, tmp_path):  # CASES 33
    start, reader = time.monotonic(), tiktoken.load.read_file_cached
    with pytest.raises(ValueError) as caught:
        data.tokenizer(name)
    message = str(caught.value)
    assert "\n" not in message and "://" not in message
    assert all(part in message for part in (name, str(tmp_path / "cache"), "TIKTOKEN_CACHE_DIR", ".tiktoken", *files))
    assert no_network and time.monotonic() - start < 5
    assert tiktoken.load.read_file_cached is reader


def test_no_network_ends_a_script(tmp_path):  # CASES 33: what the user of a script sees
    script = "import sys, data\ntry: data.tokenizer('gpt2')\nexcept ValueError as error: sys.exit(str(error))"
    env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command, here = [sys.executable, "-c", NO_NETWORK + script], Path(data.__file__).parent
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1 and GPT2_FILES[0] in done.stderr


def test_local_ranks_need_no_network(no_network, tmp_path):  # CASES 33
    path = write_ranks(tmp_path / "my.tiktoken", [(b"he", 256), (b"ll", 257), (b"hell", 258)])
    encoding = data.tokenizer(path)
    assert (encoding.eot_token, encoding.n_vocab) == (259, 260)
    assert data.encode("hello he", encoding).tolist() == [258, ord("o"), ord(" "), 256, 259]
    write_ranks(tmp_path / "my.tiktoken", [(b"hello", 256)])  # the file changed: no stale copy may answer
    assert data.tokenizer(path).eot_token == 257
    assert no_network == [] and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "content, message",
    [
        ("aGVsbG8= 1 2\n", "line 1"),
        ("not-base-64! 1\n", "line 1"),
        ("aGVsbG8= one\n", "line 1"),
        ("aGVsbG8= 1\n", "single byte"),
        ("", "single byte"),
    ],
)
def test_damaged_ranks_are_refused(content, message, tmp_path):
    path = tmp_path / "bad.tiktoken"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        data.tokenizer(str(path))


def test_ranks_given_twice_are_refused(tmp_path):
    with pytest.raises(ValueError, match="used once"):
        data.tokenizer(write_ranks(tmp_path / "twice.tiktoken", [(b"ab", 300), (b"cd", 300)]))


def test_unknown_tokenizers_are_named(tmp_path):
    with pytest.raises(ValueError, match="'gpt-two'.*gpt2"):
        data.tokenizer("gpt-two")
    with pytest.raises(FileNotFoundError, match="none.tiktoken"):
        data.tokenizer(str(tmp_path / "none.tiktoken"))


def test_large_ids_survive(tmp_path):  # CASES 32: 16 bits would give 34721
    path = write_ranks(tmp_path / "large.tiktoken", [(b"ab", 100257), (b"cd", 199998)])
    encoding = data.tokenizer(path)
    assert encoding.eot_token == 199999
    splits = data.load(write_documents(tmp_path / "text", ["abcd"] * 40), encoding, seed=0)
    assert set(splits.train.tolist()) == set(splits.val.tolist()) == {100257, 199998, 199999}
    tokens, targets = data.Batches(splits.train, 4, 2, seed=0).next()
    assert tokens.dtype == targets.dtype == torch.int64
    assert set(tokens.flatten().tolist()) == {100257, 199998, 199999}


# ---- sources ----


def test_split_is_by_document_and_loses_nothing(tmp_path, capsys):
    texts = [f"document {i}\n" * (i + 1) for i in range(40)]
    spec = write_documents(tmp_path / "text", texts)
    splits = data.load(spec, BYTES, seed=1)
    assert splits.train.dtype == splits.val.dtype == torch.int32
    train, val = documents_of(splits.train), documents_of(splits.val)
    assert len(val) == 2 and sorted(train + val) == sorted(texts)
    assert train != sorted(train, key=len)  # shuffled
    again, other = data.load(spec, BYTES, seed=1), data.load(spec, BYTES, seed=2)
    assert torch.equal(again.train, splits.train) and torch.equal(again.val, splits.val)
    assert not torch.equal(other.train, splits.train)
    assert len(documents_of(data.load(spec, BYTES, seed=1, val_fraction=0.001).val)) == 1
    assert "warning" not in capsys.readouterr().err


def test_few_documents_are_split_by_tokens(tmp_path, capsys):
    splits = data.load(write_documents(tmp_path / "text", ["a" * 999, "b" * 999]), BYTES, seed=0)
    assert (len(splits.train), len(splits.val)) == (1900, 100)
    assert sorted(documents_of(torch.cat(splits))) == ["a" * 999, "b" * 999]
    assert capsys.readouterr().err.count("warning: only 2 documents") == 1


def test_unusable_files_are_skipped_and_counted(tmp_path, capsys):
    folder = Path(write_documents(tmp_path / "text", [f"text {i}" for i in range(30)]))
    (folder / "latin1.txt").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "spelled.txt").write_text("\ufffd is valid here", encoding="utf-8")
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".hidden").write_text("secret")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    (folder / "dangling.txt").symlink_to(folder / "nowhere")
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe")
    splits = data.load(str(folder), BYTES, seed=0)
    documents = documents_of(torch.cat(splits))
    assert len(documents) == 32 and "secret" not in documents and "caf\ufffd" in documents
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "32 documents" in lines[0]
    assert "1 with invalid UTF-8" in lines[0] and "1 binary and 0 unreadable" in lines[0]


def test_other_ranks_are_silent(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data, "FIRST_RANK", False)
    data.load(write_documents(tmp_path / "text", ["short"]), BYTES, seed=0)
    assert capsys.readouterr().err == ""


def test_file_glob_and_nested_folders(tmp_path):
    root = tmp_path / "text"
    for name in ("b/deep/two.md", "a/one.txt", "c.txt", "odd[1].txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)

    def names(spec):
        return [p.relative_to(root).as_posix() for p in data._files(str(spec))]

    assert names(root) == ["a/one.txt", "b/deep/two.md", "c.txt", "odd[1].txt"]
    assert names(root / "**" / "*.txt") == ["a/one.txt", "c.txt", "odd[1].txt"]
    assert names(root / "c.txt") == ["c.txt"] and names(root / "odd[1].txt") == ["odd[1].txt"]
    splits = data.load(str(root / "c.txt"), BYTES, seed=0)
    assert documents_of(torch.cat(splits)) == ["c.txt"]


def test_nothing_to_read_is_said_clearly(tmp_path):
    (tmp_path / "empty").mkdir()
    for spec in ("", str(tmp_path / "none"), str(tmp_path / "*.rst")):
        with pytest.raises(FileNotFoundError, match="There is no file or folder"):
            data.load(spec, BYTES, seed=0)
    with pytest.raises(ValueError, match="no text in .*empty.*0 files"):
        data.load(str(tmp_path / "empty"), BYTES, seed=0)
    (tmp_path / "empty" / "binary").write_bytes(b"\0")
    with pytest.raises(ValueError, match="1 files found, skipped 1 binary"):
        data.load(str(tmp_path / "empty"), BYTES, seed=0)
    for fraction in (0, 1, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            data.load(str(tmp_path), BYTES, seed=0, val_fraction=fraction)


def test_python_library_in_any_layout(tmp_path, monkeypatch):
    names = ["abc.py", "json/decoder.py", "json/tests/test_x.py", "test/support.py", "idlelib/idle_test/test_y.py"]
    names += ["site-packages/torch.py", "_sysconfigdata__linux_.py", "config-3.11/python-config.py", "a.txt"]
    for name in names:
        (tmp_path / "Lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "Lib" / name).write_text(name)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "Lib")})
    walk = os.walk
    for order in (list, lambda found: list(found)[::-1]):  # file systems list in any order
        monkeypatch.setattr(os, "walk", lambda root: ((f, d, order(n)) for f, d, n in walk(root)))
        assert [p.name for p in data._files("python")] == ["abc.py", "decoder.py"]
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "zipped")})
    with pytest.raises(ValueError, match="no text in 'python'"):
        data.load("python", BYTES, seed=0)


def test_python_library_is_read_quickly():
    start = time.monotonic()
    splits = data.load("python", BYTES, seed=0)
    assert time.monotonic() - start < 15  # about 1 s on one idle core
    assert len(splits.train) > 5_000_000 and 0.01 < len(splits.val) / len(splits.train) < 0.2
    assert int(splits.train.max()) == int(splits.val[-1]) == EOT


# ---- order and resume ----


def test_targets_are_the_next_tokens():
    tokens, targets = data.Batches(numbered(10, 4), 4, 3, seed=0).next()
    assert tokens.shape == targets.shape == (3, 4) and tokens.is_contiguous() and targets.is_contiguous()
    assert torch.equal(targets, tokens + 1)


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_cut_and_resumed_equals_uncut(cut, tmp_path):  # CASES 27: documents of 100 tokens, sequences of 128
    texts = [f"{i:099d}" for i in range(60)]
    stream = data.load(write_documents(tmp_path / "text", texts), BYTES, seed=3).train
    uncut = data.Batches(stream, 128, 3, seed=3)
    expected = [uncut.next() for _ in range(40)]  # 44 sequences: nearly three epochs
    first = data.Batches(stream, 128, 3, seed=3)
    got = [first.next() for _ in range(cut)]
    resumed = data.Batches(stream, 128, 3, seed=3)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += [resumed.next() for _ in range(40 - cut)]
    assert all(torch.equal(a, b) for pair in zip(got, expected) for a, b in zip(*pair))
    assert resumed.state_dict() == uncut.state_dict()
    assert uncut.state_dict()["epoch"] == 2


def test_resume_on_other_numbers_of_ranks():  # CASES 28: no gap, no repeat, whatever the ranks
    tokens = numbered(37, 8)
    uncut, _ = draw(tokens, 8, batch_size=1, world_size=1, steps=37 * 4)
    drawn, state = draw(tokens, 8, batch_size=2, world_size=2, steps=5)
    for world_size, batch_size, steps in ((1, 2, 7), (4, 3, 4), (2, 1, 3), (1, 5, 5)):
        assert state["epoch"] * 37 + state["position"] == len(drawn)
        more, state = draw(tokens, 8, batch_size, world_size, steps, state)
        drawn += more
    assert drawn == uncut[: len(drawn)] and len(drawn) > 2 * 37
    assert all(sorted(uncut[i : i + 37]) == list(range(37)) for i in range(0, len(uncut), 37))


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_ranks_share_out_every_row_once(world_size):  # CASES 31: 1000 numbered rows
    tokens = numbered(1000, 4)
    ranks = [data.Batches(tokens, 4, 10, 0, rank, world_size) for rank in range(world_size)]
    rows = [{int(r[0]) // 4 for _ in range(100 // world_size) for r in rank.next()[0]} for rank in ranks]
    assert sum(map(len, rows)) == 1000 and set().union(*rows) == set(range(1000))


def test_epochs_and_seeds_have_their_own_order():
    def order(seed, epochs):
        batches = data.Batches(numbered(100, 2), 2, 100, seed)
        return [batches.next()[0][:, 0].tolist() for _ in range(epochs)]

    before = torch.get_rng_state()
    (a0, a1), (b0, b1) = order(0, 2), order(1, 2)
    assert len({tuple(x) for x in (a0, a1, b0, b1)}) == 4
    assert order(0, 2) == [a0, a1] and sorted(a0) == sorted(a1) == list(range(0, 200, 2))
    assert torch.equal(torch.get_rng_state(), before)  # the model's noise does not depend on the data


@pytest.mark.parametrize(
    "change, both",
    [
        (dict(seq_len=16), ("seq_len = 8", "seq_len = 16")),
        (dict(seed=2), ("seed = 1", "seed = 2")),
        (dict(tokens_N=numbered(39, 8)), ("321 tokens", "313 tokens")),
        (dict(tokens_N=numbered(40, 8) + 1), ("data = 321 tokens", "hash")),
    ],
)
def test_resume_of_another_run_is_refused(change, both):
    run = dict(tokens_N=numbered(40, 8), seq_len=8, batch_size=2, seed=1)
    state = data.Batches(**run).state_dict()
    with pytest.raises(ValueError) as caught:
        data.Batches(**{**run, **change}).load_state_dict(state)
    assert all(part in str(caught.value) for part in both) and "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [dict(position=40), dict(position=-1), dict(epoch=None), dict(epoch="1")])
def test_damaged_state_is_refused(change):
    batches = data.Batches(numbered(40, 8), 8, 2, seed=1)
    with pytest.raises(ValueError, match="Cannot resume"):
        batches.load_state_dict({**batches.state_dict(), **change})
    with pytest.raises(ValueError, match="Cannot resume"):
        batches.load_state_dict({})


def test_too_little_text_names_the_sizes():
    with pytest.raises(ValueError, match="training: 25 tokens make 3 sequences of 8.* 4"):
        data.Batches(numbered(3, 8), 8, 2, seed=0, world_size=2)
    with pytest.raises(ValueError, match="validation: 8 tokens make 0 sequences of 8"):
        data.validation_batches(numbered(1, 8)[:8], 8, 2, limit=10)
    with pytest.raises(ValueError, match="at least 1"):
        data.Batches(numbered(3, 8), 0, 2, seed=0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [1, 10, 1000])
def test_validation_sees_the_same_tokens_on_any_ranks(world_size, limit):
    tokens = numbered(50, 4)
    ranks = [data.validation_batches(tokens, 4, 3, limit, rank, world_size) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1  # else collectives would wait for ever
    seen = []
    for tokens_BS, targets_BS in (batch for batches in ranks for batch in batches):
        assert tokens_BS.shape == targets_BS.shape == (3, 4)
        real = targets_BS[:, 0] != data.IGNORED
        assert torch.equal(targets_BS[real], tokens_BS[real] + 1) and bool((targets_BS[~real] == -100).all())
        seen += (tokens_BS[real, 0] // 4).tolist()
    count = min(limit, 50)
    assert sorted(seen) == [i * 50 // count for i in range(count)]
