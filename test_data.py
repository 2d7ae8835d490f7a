"""Tests of data.py: what is read, how it is split and packed, and that no sequence is lost, repeated or shared."""

import base64
import hashlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
import torch

import data

HERE = Path(data.__file__).parent
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
    return data.Tokens([torch.arange(sequences * seq_len + 1, dtype=torch.int32)], n_vocab=10**6)


def through_json(states):
    return json.loads(json.dumps(data.merge_states(states)))


def draw(make, world_size, steps, state=None):
    """The rows [seq_len + 1] that all ranks draw, in the order of the endless list, and the merged state afterwards.

    make(rank, world_size) gives one rank's batches.
    """
    ranks = [make(rank, world_size) for rank in range(world_size)]
    for rank in ranks if state else []:
        rank.load_state_dict(state)
    rows = []
    for _ in range(steps):
        batches = [rank.next() for rank in ranks]
        assert all(torch.equal(tokens[:, 1:], targets[:, :-1]) for tokens, targets in batches)
        of_ranks = [torch.cat([tokens, targets[:, -1:]], 1).tolist() for tokens, targets in batches]
        rows += [row for in_turn in zip(*of_ranks) for row in in_turn]  # rank r draws every W-th
    return rows, through_json([rank.state_dict() for rank in ranks])


def write_rows(folder, rows, files=1, form="jsonl"):
    """A dataset of `files` files whose column "text" holds the rows; returns its spec."""
    folder.mkdir(exist_ok=True)
    cuts = [len(rows) * i // files for i in range(files + 1)]
    for i, (start, stop) in enumerate(zip(cuts, cuts[1:])):
        if form == "jsonl":
            lines = [json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(rows[start:stop], start)]
            (folder / f"{i:03d}.jsonl").write_text("".join(lines))
        else:
            table = pyarrow.table({"id": range(start, stop), "text": pyarrow.array(rows[start:stop], pyarrow.string())})
            pyarrow.parquet.write_table(table, folder / f"{i:03d}.parquet", row_group_size=30)
    return f"hf:{folder}"


def open_train(spec, seq_len, batch_size, seed=3, encoding=BYTES):
    """make(rank, world_size) for draw: the training batches of any source. Reads the text once for all ranks."""
    if spec.startswith("hf:"):
        rows = data.HubRows(spec, seed)
        return lambda *rank: data.Stream(rows, encoding, seq_len, batch_size, *rank)
    if list(Path(spec).glob("*.bin")):
        tokens = data.open_shards(spec, encoding).train
    else:
        tokens = data.Tokens([data.load(spec, encoding, seed).train], encoding.n_vocab)
    return lambda *rank: data.Batches(tokens, seq_len, batch_size, seed, *rank)


SOURCES = ("text", "shards", "jsonl-1", "parquet-1", "jsonl-3", "parquet-4")


def write_source(kind, folder, texts, seed=3):
    """The texts as a source of that kind, small enough blocks and shards given; returns its spec."""
    if "-" in kind:
        return write_rows(folder / kind, texts, int(kind[-1]), kind[:-2])
    spec = write_documents(folder / "text", texts)
    if kind == "shards":
        data.make_shards(spec, BYTES, str(folder / "shards"), seed)
        spec = str(folder / "shards")
    return spec


@pytest.fixture
def small(monkeypatch):
    """Blocks, lanes and shards so small that a short text has many."""
    monkeypatch.setattr(data, "BLOCK", 16)
    monkeypatch.setattr(data, "LANES", 12)
    monkeypatch.setattr(data, "SHARD_TOKENS", 1000)
    monkeypatch.setattr(data, "PORTION", 300)


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
    script = "import sys, data\nassert 'datasets' not in sys.modules  # it is slow, and for streams alone\n"
    script += "try: data.tokenizer('gpt2')\nexcept ValueError as error: sys.exit(str(error))"
    env = {**os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", NO_NETWORK + script]
    done = subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True, timeout=60)
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
    tokens, targets = data.Batches(data.Tokens([splits.train], encoding.n_vocab), 4, 2, seed=0).next()
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


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("cut", [1, 7, 20])
def test_cut_and_resumed_equals_uncut(kind, cut, tmp_path, small):  # CASES 27: documents of 100, sequences of 128
    make = open_train(write_source(kind, tmp_path, [f"{i:099d}" for i in range(60)]), 128, batch_size=3)
    uncut, end = draw(make, 1, 40)  # of 44 sequences an epoch: nearly three epochs
    rows, state = draw(make, 1, cut)
    more, resumed_end = draw(make, 1, 40 - cut, state)
    assert rows + more == uncut and resumed_end == end
    assert end.get("epoch", end.get("bookmark", {}).get("place", {}).get("epoch")) == 2


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("worlds", [(1, 2, 1), (2, 3, 4), (2, 4, 6, 1), (12, 1, 12)])
def test_resume_on_other_numbers_of_ranks(kind, worlds, tmp_path, small):  # CASES 28: no gap, no repeat
    texts = [f"{i:02d}" * (i * 37 % 101) for i in range(90)]
    spec = write_source(kind, tmp_path, texts)
    makes = {world: open_train(spec, 16, 12 // world) for world in worlds}
    uncut, end = draw(open_train(spec, 16, 12), 1, 20 * len(worlds))
    rows, state = [], None
    for world in worlds:
        more, state = draw(makes[world], world, 20, state)
        rows += more
    assert rows == uncut and state == end


def test_resume_with_other_batches():
    tokens = numbered(37, 8)

    def make(batch_size):
        return lambda *rank: data.Batches(tokens, 8, batch_size, 5, *rank)

    uncut, _ = draw(make(1), 1, 37 * 4)
    drawn, state = draw(make(2), 2, 5)
    for world_size, batch_size, steps in ((1, 2, 7), (4, 3, 4), (2, 1, 3), (1, 5, 5)):
        assert state["epoch"] * 37 + state["position"] == len(drawn)
        more, state = draw(make(batch_size), world_size, steps, state)
        drawn += more
    assert drawn == uncut[: len(drawn)] and len(drawn) > 2 * 37
    firsts = [row[0] // 8 for row in uncut]
    assert all(sorted(firsts[i : i + 37]) == list(range(37)) for i in range(0, len(uncut), 37))


def test_stream_resumes_with_other_batches(tmp_path, small):
    spec = write_rows(tmp_path / "rows", [f"{i:02d}" * (i * 37 % 101) for i in range(90)], files=2)
    uncut, _ = draw(open_train(spec, 16, 1), 1, 400)
    drawn, state = draw(open_train(spec, 16, 5), 2, 3)
    for world_size, batch_size, steps in ((1, 7, 5), (4, 3, 4), (3, 1, 3), (1, 5, 5), (2, 50, 2)):
        assert state["drawn"] == len(drawn)
        more, state = draw(open_train(spec, 16, batch_size), world_size, steps, state)
        drawn += more
    assert drawn == uncut[: len(drawn)] and len(drawn) > 300


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["text", "shards", "jsonl-1", "jsonl-3", "parquet-4"])
def test_ranks_share_out_every_row_once(kind, world_size, tmp_path, monkeypatch):  # CASES 31: 1000 numbered rows
    monkeypatch.setattr(data, "SHARD_TOKENS", 1000)
    texts = [f"{i:03d}" for i in range(1000)]  # with end-of-text one sequence of 4 tokens each
    make = open_train(write_source(kind, tmp_path, texts), 4, batch_size=1)
    ranks, drawn = [make(rank, world_size) for rank in range(world_size)], []
    for rank in ranks:
        drawn.append([BYTES.decode(rank.next()[0][0].tolist()) for _ in range(948 // world_size)])
    numbers = [int(text[:3]) for of_rank in drawn for text in of_rank]
    assert len(set(numbers)) == 948  # 950 but for the last sequence of a text, which has no next token, and a step
    if "-" in kind:
        assert all(number % 20 for number in numbers)  # those are kept for validation


def test_steps_are_the_same_sets_on_any_ranks():
    tokens = numbered(100, 2)
    sets = []
    for world_size in (1, 2, 3, 6):
        ranks = [data.Batches(tokens, 2, 6 // world_size, 0, rank, world_size) for rank in range(world_size)]
        sets.append([sorted(i for rank in ranks for i in rank.next()[0][:, 0].tolist()) for _ in range(40)])
    assert all(steps == sets[0] for steps in sets)


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
        (dict(tokens=numbered(39, 8)), ("321 tokens", "313 tokens")),
        (dict(tokens=data.Tokens([numbered(40, 8).parts[0] + 1], 10**6)), ("data = 321 tokens", "hash")),
    ],
)
def test_resume_of_another_run_is_refused(change, both):
    run = dict(tokens=numbered(40, 8), seq_len=8, batch_size=2, seed=1)
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
        data.validation_batches(data.Tokens([torch.arange(8)], 8), 8, 2, limit=10)
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


@pytest.mark.parametrize("kind", SOURCES)
def test_open_data_opens_every_source(kind, tmp_path, small):
    spec = write_source(kind, tmp_path, [f"{i:099d}" for i in range(60)])
    seen = []
    for ranks in (1, 2, 3):
        opened = [data.open_data(spec, BYTES, 3, 32, 6 // ranks, 4, rank, ranks) for rank in range(ranks)]
        rows, _ = draw(lambda rank, _: opened[rank][0], ranks, 5)
        vals = [row for _, val in opened for batch in val for row in batch[1].tolist() if row[0] != data.IGNORED]
        seen.append((rows, sorted(vals)))
        assert all(batches.identity == opened[0][0].identity for batches, _ in opened)
    assert seen[0] == seen[1] == seen[2] and len(seen[0][1]) == 4


# ---- streams ----


def plainly(files, seed, seq_len, count):
    """The first sequences of a stream as its rules say, with everything in memory: the files are lists of rows."""
    lanes, loads, epoch = [[] for _ in range(data.LANES)], [0] * data.LANES, 0
    while min(map(len, lanes)) <= (count // data.LANES + 1) * seq_len:
        row = 0
        for rows in files:
            for start in range(0, len(rows), data.BLOCK):
                block = rows[start : start + data.BLOCK]
                for i in data._permutation(len(block), seed, "rows", epoch, row).tolist():
                    if block[i] and ((row + i) % 20 or row + i >= 20_000):
                        ids = data.encode(block[i], BYTES).tolist()
                        lane = loads.index(min(loads))
                        loads[lane] += len(ids)
                        lanes[lane] += ids
                row += len(block)
        epoch += 1
    at = [(k % data.LANES, k // data.LANES * seq_len) for k in range(count)]
    return [lanes[lane][start : start + seq_len + 1] for lane, start in at]


ROWS = [None if i % 13 == 1 else "" if i % 7 == 5 else f"{i}," * (i * i % 83) for i in range(150)]
ROWS += ["long " * 400, "ü漢"]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("seq_len", [8, 60])
def test_stream_gives_every_token_in_its_turn(form, files, seq_len, tmp_path, small):
    spec = write_rows(tmp_path / "rows", ROWS, files, form)
    cuts = [len(ROWS) * i // files for i in range(files + 1)]
    expected = plainly([ROWS[a:b] for a, b in zip(cuts, cuts[1:])], 3, seq_len, 1200)
    for world_size in (1, 3):
        rows, state = draw(open_train(spec, seq_len, 24 // world_size), world_size, 50)
        assert rows == expected
    assert state["bookmark"]["place"]["epoch"] >= (seq_len == 60)


def test_stream_of_lane_count_and_block_as_shipped(tmp_path):
    rows = [f"{i}," * (i % 50 + 1) for i in range(2500)]
    spec = write_rows(tmp_path / "rows", rows)
    expected = plainly([rows], 3, 32, 8 * 192)
    drawn, state = draw(open_train(spec, 32, 48), 4, 2)
    more, state = draw(open_train(spec, 32, 8), 8, 18, state)
    assert drawn + more == expected
    assert len(json.dumps(state)) < 8000


@pytest.mark.parametrize("rows", [["x" * 9, "short", "longer than others " * 30], ["x" * 40, "a" * 50]])
def test_stream_of_fewer_rows_than_lanes(rows, tmp_path, small):  # it wraps from epoch to epoch
    spec = write_rows(tmp_path / "rows", rows)
    uncut, end = draw(open_train(spec, 8, 12), 1, 10)
    assert uncut == plainly([rows], 3, 8, 120)
    first, state = draw(open_train(spec, 8, 2), 2, 7)
    more, resumed_end = draw(open_train(spec, 8, 23), 4, 1, state)
    assert first + more == uncut and resumed_end == end


def test_stream_is_resumed_from_any_step(tmp_path, small):  # block borders and ends of epochs are among them
    spec = write_rows(tmp_path / "rows", ROWS[:24], files=2)
    make = open_train(spec, 16, 2)
    uncut, _ = draw(make, 3, 80)
    state = None
    for step in range(80):
        rows, state = draw(make, 3, 1, state)
        assert rows == uncut[step * 6 : step * 6 + 6], step
    assert state["bookmark"]["place"]["epoch"] >= 2


def test_state_before_the_first_step_and_right_after_a_resume(tmp_path, small):
    make = open_train(write_rows(tmp_path / "rows", ROWS), 16, 3)
    uncut, _ = draw(make, 1, 40)
    _, state = draw(make, 4, 0)
    assert draw(make, 1, 40, state)[0] == uncut
    rows, state = draw(make, 2, 9)
    for world_size in (4, 1, 2):  # handed on without a step
        unchanged, state = draw(make, world_size, 0, state)
        assert unchanged == []
    assert rows + draw(make, 2, 5, state)[0] == uncut[: 9 * 6 + 5 * 6]


def test_stream_goes_back_to_an_earlier_state(tmp_path, small):
    stream = open_train(write_rows(tmp_path / "rows", ROWS), 16, 12)(0, 1)
    stream.next()
    state = stream.state_dict()
    once = [stream.next()[0].tolist() for _ in range(20)]
    stream.load_state_dict(state)
    assert [stream.next()[0].tolist() for _ in range(20)] == once


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_document_is_tokenised_by_two_ranks(world_size, tmp_path, small, monkeypatch):
    make = open_train(write_rows(tmp_path / "rows", [f"{i:03d}" * (1 + i % 9) for i in range(400)]), 16, 2)
    encoded, encode = [], data.encode
    monkeypatch.setattr(data, "encode", lambda text, encoding: encoded.append(text) or encode(text, encoding))
    of_ranks = []
    for stream in [make(rank, world_size) for rank in range(world_size)]:
        blocks = stream._deal(stream.bookmarks[0], {lane: 0 for lane in stream.lanes})
        dealt = [item for _, block in itertools.islice(blocks, 400 // data.BLOCK) for item in block]
        assert {lane for lane, _, _ in dealt} == set(stream.lanes) == set(range(stream.rank, 12, world_size))
        of_ranks.append(len(dealt))
    assert len(encoded) == len(set(encoded)) == sum(of_ranks) == 380
    assert max(of_ranks) < 1.2 * min(of_ranks)


def test_resume_reads_on_and_not_from_the_start(tmp_path, small, monkeypatch):
    spec = write_rows(tmp_path / "rows", [f"{i:03d}" * 8 for i in range(600)], files=6)
    make = open_train(spec, 16, 6)
    uncut, _ = draw(make, 2, 64)
    _, state = draw(make, 2, 60)
    opened, encoded, tables, encode = [], [], data.HubRows._tables, data.encode
    monkeypatch.setattr(data.HubRows, "_tables", lambda self, file: opened.append(file) or tables(self, file))
    monkeypatch.setattr(data, "encode", lambda *args: encoded.append(args[0]) or encode(*args))
    rows, _ = draw(make, 1, 8, state)
    assert rows == uncut[-48:]
    tokens_before = 60 * 12 * 16
    assert opened[0] == state["bookmark"]["place"]["file"] == tokens_before // (95 * 25) > 2
    assert len(encoded) < 100


def test_bookmarks_that_are_passed_are_forgotten(tmp_path, small):
    stream = open_train(write_rows(tmp_path / "rows", [f"{i:03d}" * 8 for i in range(600)]), 16, 12)(0, 1)
    sizes = []
    for _ in range(60):
        stream.next()
        sizes.append((len(stream.bookmarks), sum(len(lane.waiting) for lane in stream.lanes.values())))
    assert max(sizes) <= (4, 40)


def test_lanes_stay_level(tmp_path, small):
    """Dealt in turn, a lane of long documents would fall behind; the tokens that wait would grow with the run."""
    rows = [("long " * 60 if i % 12 == 3 else "short ") for i in range(3000)]
    stream = open_train(write_rows(tmp_path / "rows", rows), 16, 12)(0, 1)
    for _ in range(300):
        stream.next()
        assert sum(lane.size for lane in stream.lanes.values()) < 12 * 301 + 16 * 300


def test_kept_rows_are_never_trained_on(tmp_path, small):
    rows = [f"<{i}>" for i in range(100)]
    spec = write_rows(tmp_path / "rows", rows, files=3)
    make, kept = open_train(spec, 10, 6), data.HubRows(spec, 0).held_out(BYTES)
    assert documents_of(kept) == ["<0>", "<20>", "<40>", "<60>", "<80>"]
    drawn = "".join(BYTES.decode(row[:-1]) for row in draw(make, 1, 60)[0])
    assert sum(f"<{i}>" in drawn for i in range(100)) == 95
    assert not any(f"<{i}>" in drawn for i in range(0, 100, 20))
    assert documents_of(data.HubRows(spec, 0).held_out(BYTES, enough=6)) == ["<0>", "<20>"]


def test_rows_kept_end_at_20000(tmp_path, small, monkeypatch):
    assert data.HELD_OUT_ROWS == 20_000
    monkeypatch.setattr(data, "HELD_OUT_ROWS", 60)
    rows = data.HubRows(write_rows(tmp_path / "rows", [str(i) for i in range(100)], files=3), 0)
    _, train, val = zip(*rows.blocks())
    assert sum(val, []) == ["0", "20", "40"]
    assert sorted(map(int, sum(train, []))) == [i for i in range(100) if i not in (0, 20, 40)]


def test_seeds_and_epochs_of_a_stream_have_their_own_order(tmp_path, small):
    rows = data.HubRows(write_rows(tmp_path / "rows", [str(i) for i in range(1, 100)]), 0)
    order = [[text for _, texts, _ in rows.blocks(epoch=epoch) for text in texts] for epoch in (0, 1)]
    rows.seed = 1
    order.append([text for _, texts, _ in rows.blocks() for text in texts])
    assert order[0] != order[1] != order[2] != order[0] and sorted(order[0]) == sorted(order[1]) == sorted(order[2])
    assert order[0][:15] != sorted(order[0][:15], key=int)


def test_ranks_that_cannot_share_the_lanes_are_refused(tmp_path):
    rows = data.HubRows(write_rows(tmp_path / "rows", ROWS), 0)
    with pytest.raises(ValueError, match="5 ranks.*192"):
        data.Stream(rows, BYTES, 8, 1, 0, 5)


@pytest.mark.parametrize("change", [
    dict(seq_len=16), dict(seed=2), dict(data="other"), dict(lanes={"0": [0, 0]}), dict(lanes=None), dict(bookmark={}),
    dict(drawn=None), dict(lanes={str(i): [0, 0] for i in range(12)}), dict(lanes={str(i): None for i in range(12)})])
def test_stream_refuses_other_and_damaged_states(change, tmp_path, small):
    make = open_train(write_rows(tmp_path / "rows", ROWS), 8, 12)
    _, state = draw(make, 1, 30)
    with pytest.raises(ValueError, match="Cannot resume"):
        make(0, 1).load_state_dict({**state, **change})
    with pytest.raises(ValueError, match="Cannot resume"):
        make(0, 1).load_state_dict(data.Batches(numbered(40, 8), 8, 2, seed=3).state_dict())
    halves = [make(rank, 2) for rank in range(2)]
    with pytest.raises(ValueError, match="not of all ranks"):
        halves[0].load_state_dict(halves[0].state_dict())


def test_stream_notices_that_the_rows_changed(tmp_path, small):
    spec = write_rows(tmp_path / "rows", ["a" * 100] * 50)
    _, state = draw(open_train(spec, 8, 12), 1, 3)
    write_rows(tmp_path / "rows", ["a"] * 50)
    with pytest.raises(ValueError, match="not those of the checkpoint"):
        draw(open_train(spec, 8, 12), 1, 1, state)


@pytest.mark.parametrize("content, spec, said", [
    ({}, ":none", "BuilderConfig 'none' not found. Available: ['default']"),
    ({}, "::none", "Bad split: none. Available splits: ['train']"),
    ({}, ":::body", "no column of text 'body', but id (int64), text (string)"),
    ({}, ":::id", "no column of text 'id', but id (int64), text (string)"),
    ({}, ":default:train:text:more", "names no dataset"),
    ({"000.jsonl": "{broken"}, "", "rows"),
    ({"000.jsonl": ""}, "", "rows"),
])
def test_bad_datasets_are_one_line(content, spec, said, tmp_path):
    spec = write_rows(tmp_path / "rows", ["some text"] * 30) + spec
    for name, text in content.items():
        (tmp_path / "rows" / name).write_text(text)
    with pytest.raises((ValueError, OSError)) as caught:
        data.open_data(spec, BYTES, 0, 8, 2, 4)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_empty_folder_is_no_dataset(tmp_path):
    with pytest.raises(ValueError, match="Cannot open hf:"):
        data.open_data(f"hf:{tmp_path}", BYTES, 0, 8, 2, 4)
    with pytest.raises(ValueError, match="names no dataset"):
        data.open_data("hf:", BYTES, 0, 8, 2, 4)


def test_dataset_with_nothing_to_train_on(tmp_path):
    spec = write_rows(tmp_path / "rows", ["kept for validation"] + [None, ""] * 9)
    batches, _ = data.open_data(spec, BYTES, 0, 8, 2, 1)
    with pytest.raises(ValueError, match="no text to train on"):
        batches.next()
    with pytest.raises(ValueError, match="Too little text for validation: 0 tokens"):
        data.open_data(write_rows(tmp_path / "none", ["", "text"]), BYTES, 0, 8, 2, 4)


def test_offline_is_one_line_at_once(no_network, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    start = time.monotonic()
    with pytest.raises(OSError) as caught:
        data.open_data("hf:someone/some-set:config", BYTES, 0, 8, 2, 4)
    message = str(caught.value)
    assert "'someone/some-set'" in message and "the Hub cannot be reached" in message and "\n" not in message
    assert no_network and time.monotonic() - start < 5
    with pytest.raises(ValueError, match="There is no dataset './nowhere'"):
        data.open_data("hf:./nowhere", BYTES, 0, 8, 2, 4)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_stream_that_breaks_off_says_how_to_go_on(form, tmp_path, small):
    spec = write_rows(tmp_path / "rows", [f"{i:03d}" * 8 for i in range(200)], 2, form)
    path = sorted((tmp_path / "rows").iterdir())[1]
    path.write_bytes(path.read_bytes()[:700])
    batches, _ = data.open_data(spec, BYTES, 0, 8, 12, 4)
    with pytest.raises(OSError) as caught:
        for _ in range(100):
            batches.next()
    message = str(caught.value)
    assert "broke off in file 2 of 2" in message and "--resume=auto" in message and "\n" not in message


def test_error_of_the_thread_comes_in_its_turn():
    def items():
        yield 1
        yield 2
        raise KeyError("three")

    made = data._ahead(items())
    assert [next(made), next(made)] == [1, 2]
    with pytest.raises(KeyError, match="three"):
        next(made)
    with pytest.raises(StopIteration):  # and no hang
        next(made)


def test_reads_one_item_ahead_and_no_more():
    made = itertools.count()
    items = data._ahead(made)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    time.sleep(0.05)
    assert next(made) == 4  # 3 waits


@pytest.mark.parametrize("where", ["while it waits", "while it trains"])
def test_interrupt_ends_a_stream_at_once(where, tmp_path):
    spec = write_rows(tmp_path / "rows", ["some text"] * 3000)
    script = f"""
import signal, sys, time, data
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has none
rows = data.HubRows({spec!r}, 0)
read, waits = rows._texts, {where == "while it waits"}
rows._texts = lambda table: (waits or rows.files) and (waits and time.sleep(30), read(table))[1]
stream = data.Stream(rows, data.tokenizer("bytes"), 8, 2)
print("ready", flush=True)
while True:
    stream.next()
"""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, "-c", script], cwd=HERE, **pipes)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=10)
    assert "KeyboardInterrupt" in said and process.returncode in (-signal.SIGINT, 130)


# ---- token shards ----


def shards_of_text(tmp_path, texts=None, encoding=BYTES, **change):
    """Shards of a folder of text: (spec of the text, folder of the shards)."""
    spec = write_documents(tmp_path / "text", texts or [f"document {i}\n" * (i % 9 + 1) for i in range(60)])
    data.make_shards(spec, encoding, str(tmp_path / "shards"), **change)
    return spec, tmp_path / "shards"


@pytest.mark.parametrize("vocabulary", ["bytes", "large"])
def test_shards_give_the_batches_of_their_text(vocabulary, tmp_path, small):
    encoding = BYTES
    if vocabulary == "large":
        encoding = data.tokenizer(write_ranks(tmp_path / "l.tiktoken", [(b"do", 100257)]))
    spec, folder = shards_of_text(tmp_path, encoding=encoding, seed=7)
    assert len(list(folder.glob("train-*.bin"))) > 1  # so that sequences cross from one to the next
    of_text, val_of_text = data.open_data(spec, encoding, 7, 30, 4, 5)
    of_shards, val_of_shards = data.open_data(str(folder), encoding, 7, 30, 4, 5)
    for _ in range(200):
        assert all(map(torch.equal, of_text.next(), of_shards.next()))
    assert all(torch.equal(a, b) for x, y in zip(val_of_text, val_of_shards, strict=True) for a, b in zip(x, y))
    assert of_text.state_dict()["epoch"] >= 2


def test_header_tells_all(tmp_path, small):
    spec, folder = shards_of_text(tmp_path, seed=5)
    splits, before = data.load(spec, BYTES, seed=5), ""
    for split, stream in (("val", splits.val), ("train", splits.train)):
        paths, ids = sorted(folder.glob(f"{split}-*.bin")), []
        for number, path in enumerate(paths):
            header, raw = data._read_header(path), path.read_bytes()
            assert raw.startswith(b"nanofp4 tokens 1 ") and len(raw) == 4096 + 2 * header["tokens"]
            here = torch.frombuffer(bytearray(raw[4096:]), dtype=torch.uint16).tolist()
            assert header["documents"] == here.count(EOT) and header["shard"] == number and header["split"] == split
            assert header["last"] == (path == paths[-1])
            assert header["sha256"] == hashlib.sha256(header["before"].encode() + raw[4096:]).hexdigest()
            assert header["before"] == before
            before, ids = header["sha256"], ids + here
        assert ids == stream.tolist()
    assert (header["tokenizer"], header["n_vocab"], header["dtype"]) == ("bytes", 257, "uint16")
    assert (header["data"], header["seed"]) == (spec, 5)
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize("top, dtype", [(65534, "uint16"), (65535, "uint32"), (100256, "uint32"), (199998, "uint32")])
def test_ids_survive_in_shards(top, dtype, tmp_path):  # CASES 32: 16 bits would give 34721 for 100257
    encoding = data.tokenizer(write_ranks(tmp_path / "t.tiktoken", [(b"ab", top)]))
    _, folder = shards_of_text(tmp_path, ["abab"] * 40, encoding)
    assert data._read_header(folder / "train-00000.bin")["dtype"] == dtype
    batches, val = data.open_data(str(folder), encoding, 0, 4, 2, 1)
    assert set(batches.next()[0].flatten().tolist()) == set(val[0][0][0].tolist()) == {top, top + 1}


def test_id_beyond_the_vocabulary_is_named(tmp_path):
    _, folder = shards_of_text(tmp_path)
    raw = bytearray((folder / "train-00000.bin").read_bytes())
    raw[4096 + 100 : 4096 + 102] = (257).to_bytes(2, "little")
    (folder / "train-00000.bin").write_bytes(raw)
    batches, _ = data.open_data(str(folder), BYTES, 0, 16, 4, 4)
    with pytest.raises(ValueError, match="id 257 .*has 257 ids.*damaged"):
        for _ in range(batches.count):
            batches.next()


def resize(change):
    def work(folder):
        os.truncate(folder / "train-00001.bin", os.path.getsize(folder / "train-00001.bin") + change)

    return work


def damage(at):
    def work(folder):
        raw = bytearray((folder / "train-00001.bin").read_bytes())
        raw[at] ^= 1
        (folder / "train-00001.bin").write_bytes(raw)

    return work


def mix(folder):
    other = folder.parent / "other"
    data.make_shards(write_documents(other, ["other text\n" * 9] * 90), BYTES, str(other / "shards"))
    path = folder / "train-00001.bin"
    wanted = data._read_header(path)["tokens"]
    assert data._read_header(other / "shards" / path.name)["tokens"] == wanted
    path.write_bytes((other / "shards" / path.name).read_bytes())


@pytest.mark.parametrize("work, said", [
    (resize(-1), "train-00001.bin is cut off or damaged"), (resize(2), "train-00001.bin is cut off or damaged"),
    (lambda folder: (folder / "train-00001.bin").write_bytes(b""), "train-00001.bin is not a token shard"),
    (lambda folder: (folder / "val-00000.bin").write_bytes(b"else" * 5000), "val-00000.bin is not a token shard"),
    (damage(3), "not a token shard"), (damage(30), "damaged header"), (damage(200), "damaged header"),
    (lambda folder: (folder / "train-00000.bin").unlink(), "lacks token shards of train"),
    (lambda folder: (folder / "train-00001.bin").unlink(), "lacks token shards of train"),
    (lambda folder: max(folder.glob("train-*")).unlink(), "lacks token shards of train"),
    (lambda folder: [path.unlink() for path in folder.glob("train-*")], "lacks token shards of train, it has 0"),
    (lambda folder: (folder / "val-00000.bin").unlink(), "lacks token shards of val"),
    (lambda folder: (folder / "train-00001.bin").replace(folder / "train-00001.bin.part"), "lacks token shards"),
    (lambda folder: [path.rename(f"{path}.part") for path in folder.iterdir()], "lacks token shards of val, it has 0"),
    (mix, "another set"),
])
def test_bad_shards_are_refused(work, said, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "SHARD_TOKENS", 1000)
    monkeypatch.setattr(data, "PORTION", 1000)
    _, folder = shards_of_text(tmp_path)
    data.open_shards(folder, BYTES)
    work(folder)
    with pytest.raises(ValueError, match=said) as caught:
        data.open_data(str(folder), BYTES, 0, 8, 2, 2)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_shards_of_another_tokenizer_are_refused(tmp_path):
    _, folder = shards_of_text(tmp_path)
    other = data.tokenizer(write_ranks(tmp_path / "other.tiktoken", []))  # the same ids, another split of the text
    with pytest.raises(ValueError) as caught:
        data.open_data(str(folder), other, 0, 8, 2, 2)
    message = str(caught.value)
    assert all(part in message for part in ("tokenizer bytes", "other.tiktoken", "--tokenizer", str(folder)))
    copy = tiktoken.Encoding("renamed", pat_str=data.BYTES_PATTERN, mergeable_ranks=BYTES._mergeable_ranks,
                             special_tokens=BYTES._special_tokens)
    data.open_data(str(folder), copy, 0, 8, 2, 2)  # a name alone changes no id


def test_tokenizer_hash_covers_all_that_matters(tmp_path):
    ranks = {bytes([i]): i for i in range(256)}
    parts = dict(pat_str=".", mergeable_ranks=ranks, special_tokens={data.END_OF_TEXT: 256})
    changes = [dict(pat_str=".|a"), dict(mergeable_ranks={bytes([i]): 255 - i for i in range(256)}),
               dict(special_tokens={data.END_OF_TEXT: 257}), dict(special_tokens={data.END_OF_TEXT: 256, "<a>": 257})]
    hashes = {data.tokenizer_hash(tiktoken.Encoding("x", **parts | change)) for change in [{}, *changes]}
    assert len(hashes) == 5


def test_folder_in_use_is_refused(tmp_path):
    spec, folder = shards_of_text(tmp_path)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match="is not empty, it holds train-00000.bin"):
        data.make_shards(spec, BYTES, str(folder))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("text")
    with pytest.raises(ValueError, match="is not empty, it holds precious.txt"):
        data.make_shards(spec, BYTES, str(tmp_path / "mine"))
    (tmp_path / "alike").mkdir()
    (tmp_path / "alike" / "train-00000.bin").write_text("text")
    with pytest.raises(ValueError, match="train-00000.bin is not a token shard"):
        data.make_shards(spec, BYTES, str(tmp_path / "alike"))
    assert before == {path: path.read_bytes() for path in folder.iterdir()}
    assert os.listdir(tmp_path / "mine") == ["precious.txt"]


def test_max_tokens_cuts_the_training_text(tmp_path, small):
    spec, folder = shards_of_text(tmp_path, max_tokens=1234)
    splits, cut = data.load(spec, BYTES, seed=0), data.open_shards(folder, BYTES)
    assert len(cut.train) == 1234 and cut.train.cut(0, 1234).tolist() == splits.train[:1234].tolist()
    assert cut.val.cut(0, len(cut.val)).tolist() == splits.val.tolist()


def test_shards_of_a_stream_hold_its_first_epoch(tmp_path, small):
    spec = write_rows(tmp_path / "rows", ROWS, files=3)
    data.make_shards(spec, BYTES, str(tmp_path / "shards"), seed=4)
    cut, rows = data.open_shards(tmp_path / "shards", BYTES), data.HubRows(spec, 4)
    texts = [text for _, block, _ in rows.blocks() for text in block]
    assert documents_of(cut.train.cut(0, len(cut.train))) == texts
    assert cut.val.cut(0, len(cut.val)).tolist() == rows.held_out(BYTES).tolist()
    assert sum(data._read_header(path)["documents"] for path in (tmp_path / "shards").glob("train*")) == len(texts)


def test_interrupted_shards_of_a_stream_go_on(tmp_path, small, monkeypatch, capsys):
    monkeypatch.setattr(data, "HELD_OUT_ROWS", 30)
    spec, tables, opened = write_rows(tmp_path / "rows", ROWS, files=4), data.HubRows._tables, []
    data.make_shards(spec, BYTES, str(tmp_path / "whole"))

    def broken(self, file):
        opened.append(file)
        for number, table in enumerate(tables(self, file)):
            if (file, number) == (2, 1):
                raise OSError("the network failed")
            yield table

    monkeypatch.setattr(data.HubRows, "_tables", broken)
    for _ in range(2):  # the second run goes as far as the first
        with pytest.raises(OSError, match="^the network failed"):
            data.make_shards(spec, BYTES, str(tmp_path / "cut"))
        whole = sorted(path.name for path in (tmp_path / "cut").iterdir())
        assert len(whole) > 3 and not any(name.endswith(".part") for name in whole)
    with pytest.raises(ValueError, match="lacks token shards of train"):
        data.open_data(str(tmp_path / "cut"), BYTES, 0, 8, 2, 2)
    with pytest.raises(ValueError, match="is not empty"):  # other flags
        data.make_shards(spec, BYTES, str(tmp_path / "cut"), seed=1)
    monkeypatch.setattr(data.HubRows, "_tables", lambda self, file: opened.append(file) or tables(self, file))
    capsys.readouterr()
    opened.clear()
    data.make_shards(spec, BYTES, str(tmp_path / "cut"))
    assert opened in ([0, 2, 3], [0, 1, 2, 3]) and opened != [0, 0, 1, 2, 3]  # the first is read for validation
    assert "goes on behind" in capsys.readouterr().err
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "cut" / path.name).read_bytes()
    assert len(list((tmp_path / "cut").iterdir())) == len(list((tmp_path / "whole").iterdir()))


# ---- the command ----


def command(*words):
    return subprocess.run([sys.executable, "data.py", *words], cwd=HERE, capture_output=True, text=True, timeout=60)


def test_command_makes_shards(tmp_path):
    spec = write_documents(tmp_path / "text", [f"document {i}\n" * 9 for i in range(60)])
    done = command(f"--data={spec}", f"--out={tmp_path / 'out' / 'deep'}", "--seed=3")
    assert done.returncode == 0, done.stderr
    assert "ktoken" in done.stderr and "--tokenizer=bytes --model.vocab_size=384" in done.stderr
    batches, _ = data.open_data(str(tmp_path / "out" / "deep"), BYTES, 3, 16, 4, 4)
    of_text, _ = data.open_data(spec, BYTES, 3, 16, 4, 4)
    assert torch.equal(batches.next()[0], of_text.next()[0])


def test_command_explains_itself(capsys):
    with pytest.raises(SystemExit) as caught:
        data.main(["--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert all(flag in said for flag in ("--data", "--tokenizer", "--out", "--seed", "--max_tokens", "hf:NAME"))


def test_command_fails_in_one_line(tmp_path):
    done = command("--data=hf:" + write_rows(tmp_path / "rows", ["text"])[3:] + ":none", f"--out={tmp_path / 'new'}")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("data.py: Cannot open hf:") and "BuilderConfig 'none' not found" in done.stderr


@pytest.mark.parametrize("words, said", [
    ([], "--data, --out"), (["--data={spec}"], "--out"),
    (["--data={spec}", "--out={new}", "--tokens=3"], "--tokens=3"),
    (["--data={spec}", "--out={new}", "--seed=x"], "--seed"),
    (["--data={spec}/none", "--out={new}"], "There is no file"),
    (["--data={spec}", "--out={new}", "--tokenizer=none"], "No tokenizer is called 'none'"),
    (["--data={spec}", "--out={spec}"], "is not empty"),
    (["--data={spec}", "--out=/dev/null/x"], "Cannot write into /dev/null/x (Not a directory)"),
    (["--data={spec}", "--out={spec}/0000.txt"], "Cannot write into"),
    (["--data={spec}", "--out={new}", "--max_tokens=-1"], "max_tokens"),
    (["--data={spec}/../empty", "--out={new}"], "There is no text"),
])
def test_command_refuses(words, said, tmp_path):
    spec = write_documents(tmp_path / "text", [f"document {i}\n" * 9 for i in range(60)])
    (tmp_path / "empty").mkdir()
    with pytest.raises((ValueError, OSError)) as caught:
        data.main([word.format(spec=spec, new=tmp_path / "new") for word in words])
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.glob("new/*"))


@pytest.mark.parametrize("limit", [4000, 5000, 200_000])
def test_no_room_is_said_and_leaves_nothing_that_looks_whole(limit, tmp_path):
    resource = pytest.importorskip("resource")
    spec, out = write_documents(tmp_path / "text", ["text\n" * 1000] * 60), str(tmp_path / "out")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))  # no file may grow beyond it
    try:
        with pytest.raises(OSError, match="Cannot write .*(val|train)-00000.bin .*: make room"):
            data.make_shards(spec, BYTES, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [name for name in os.listdir(out) if not name.startswith("val")] == []
    with pytest.raises(ValueError):
        data.open_data(out, BYTES, 0, 8, 2, 2)
    data.make_shards(spec, BYTES, out)
    data.open_data(out, BYTES, 0, 8, 2, 2)


def test_command_that_was_killed_leaves_nothing_that_looks_whole(tmp_path):
    spec = write_rows(tmp_path / "rows", ["text\n" * 1000] * 300)
    script = f"""
import data, time
data.BLOCK, data.SHARD_TOKENS, texts = 20, 300_000, data.HubRows._texts
data.HubRows._texts = lambda self, table: time.sleep(0.05) or texts(self, table)
data.make_shards({spec!r}, data.tokenizer("bytes"), {str(tmp_path / "out")!r})
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=HERE, stderr=subprocess.PIPE)
    until = time.monotonic() + 30
    while not (tmp_path / "out" / "train-00001.bin").exists() and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert (tmp_path / "out" / "train-00001.bin").exists() and list((tmp_path / "out").glob("*.part"))
    with pytest.raises(ValueError, match="lacks token shards of train"):
        data.open_data(str(tmp_path / "out"), BYTES, 0, 8, 2, 2)
    done = subprocess.run([sys.executable, "-c", script], cwd=HERE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "goes on behind" in done.stderr, done.stderr
    train, val = data.open_shards(tmp_path / "out", BYTES)
    assert (len(train), len(val)) == (285 * 5001, 15 * 5001)
