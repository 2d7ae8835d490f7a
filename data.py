"""Text in, batches of token ids out. This file knows nothing of models.

How a document becomes a batch
------------------------------
*Tokenise.* A tokenizer is a `tiktoken.Encoding`. The default, `bytes`, is built here and needs no file: ids 0..255 are
the bytes themselves, 256 is end-of-text. Any tiktoken name works too (tiktoken downloads its ranks once into a cache),
and so does a `.tiktoken` rank file on disk, for which the network is never touched.

*End of text.* A document is one file, encoded as ordinary text: a file that spells <|endoftext|> (this one does) yields
those characters and not the control token. Then the true end-of-text id is appended, after every document and nowhere
else, so that the model can trust it.

*Split.* The documents, read in the order of their paths, go through one permutation drawn from the seed. The first 5 %
become validation text, the rest training text. Whole documents, since two halves of one file share names and phrases
and a model would be examined on what it has just read. Only with fewer than 20 documents is the text itself cut in two.

*Pack.* The documents of each part are laid end to end into one int32 stream: 4 bytes a token, for 16 bits would turn
id 100257 into 34721. The stream is cut every `seq_len` tokens, wherever that falls in a document; nothing is padded.
A sequence has seq_len + 1 tokens, its last is the first of the next, so each token but the very first is a target once:

    stream     t0 t1 t2 t3 t4 t5 t6 t7 t8 t9        seq_len = 4: two sequences, t9 is left over
    sequence 0 t0 t1 t2 t3 t4                       tokens t0..t3, targets t1..t4
    sequence 1             t4 t5 t6 t7 t8           tokens t4..t7, targets t5..t8

*Shuffle.* Each epoch visits the sequences in a permutation drawn from (seed, epoch) and nothing else. There is no
shuffle buffer: its contents would belong into every checkpoint, and readers that forget them lose some rows and repeat
others at each resume.

*Shard and resume.* Lay the epochs' permutations end to end: one endless list of sequences, whose state is one number,
how many of it all ranks together have drawn. A step of W ranks with B sequences each takes the next W * B of the list:

    drawn = 40, B = 2, W = 3      rank 0: 40 41   rank 1: 42 43   rank 2: 44 45      then drawn = 46

No rank has a position of its own, so a run saved on 2 ranks goes on with 1 or 4 and neither skips nor repeats. Where an
epoch ends inside a step, the step runs on into the next permutation; no sequence is dropped. The state also names the
data by a fingerprint, since a position in one text means nothing in another.

Shapes: B sequences of one rank's batch, S tokens of a sequence, N tokens of a stream.
"""

import base64
import glob
import hashlib
import os
import sys
import sysconfig
import tempfile
from array import array
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import tiktoken
import tiktoken.load
import torch
import torch.nn.functional as F
from tqdm import tqdm

END_OF_TEXT = "<|endoftext|>"
IGNORED = -100  # the target that a loss leaves out
FEW_DOCUMENTS = 20  # below this the split is by tokens
PIECE = 2**24  # characters encoded at once; bounds the Python list of ids that tiktoken returns
FIRST_RANK = os.environ.get("RANK", "0") == "0"  # torchrun's ranks all read the text; this one speaks
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
BYTES_PATTERN = r"[^\n]+\n?|\n"
# the split of GPT-4's tokenizer: contractions, words, numbers of up to three digits, punctuation, white space
WORDS_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)


def _say(line):
    if FIRST_RANK:
        print(line, file=sys.stderr)


# ---- tokenizer ----


def tokenizer(name):
    """The `tiktoken.Encoding` called `name`: "bytes", a tiktoken name, or the path of a `.tiktoken` rank file.

    A rank file holds no special tokens: end-of-text becomes the id after its last rank, and text is split as for GPT-4.
    ValueError or FileNotFoundError, in one line: no such name or file, a damaged file, or ranks that tiktoken could
    neither find in its cache nor download.
    """
    if name == "bytes":
        return _encoding(name, {bytes([i]): i for i in range(256)}, BYTES_PATTERN)
    if name.endswith(".tiktoken"):
        return _encoding(name, _read_ranks(os.path.expanduser(name)), WORDS_PATTERN)
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(tiktoken.list_encoding_names())
        raise ValueError(f"No tokenizer is called {name!r}: use bytes, a path ending in .tiktoken, or one of {known}.")
    try:
        return tiktoken.get_encoding(name)
    except (OSError, ImportError, ValueError) as error:
        raise ValueError(_how_to_get(name, type(error).__name__)) from None


def _encoding(name, ranks, pattern):
    special = {END_OF_TEXT: max(ranks.values()) + 1}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def _read_ranks(path):
    """Reads lines of a base64 token and its rank. tiktoken's reader caches by path, stale when the file changes."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"There is no tokenizer file {path}: give the path of an existing rank file.")
    ranks = {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"{path}, line {number}: expected a token in base64 and its rank.") from None
    every_byte, ids = all(bytes([i]) in ranks for i in range(256)), set(ranks.values())
    if not every_byte or len(ids) < len(ranks) or min(ids) < 0 or max(ids) >= 2**31 - 1:
        raise ValueError(f"{path} is cut off or damaged: each single byte needs a rank, and each rank is used once.")
    return ranks


def _how_to_get(name, reason):
    """The one line for a tokenizer that is not here. tiktoken calls a cached file by the SHA-1 of its address; which
    files `name` needs is seen by running its own constructor with a reader that only takes note."""
    needed, reader = [], tiktoken.load.read_file_cached

    def take_note(address, *_, **__):
        needed.append(hashlib.sha1(address.encode()).hexdigest())
        return b""

    tiktoken.load.read_file_cached = take_note
    try:
        tiktoken.registry.ENCODING_CONSTRUCTORS[name]()
    except Exception:  # an empty file is an error to it, but by then it has asked for every one
        pass
    finally:
        tiktoken.load.read_file_cached = reader
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")  # as in tiktoken
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR") or default
    return (
        f"The tokenizer {name} is not on this machine and could not be downloaded ({reason}). Where it was used before,"
        f" tiktoken's cache holds {' and '.join(needed)}: copy that into {folder} and set TIKTOKEN_CACHE_DIR to this"
        f" folder; or give --tokenizer the path of a .tiktoken file; or use --tokenizer=bytes."
    )


# ---- sources ----


def load(spec, encoding, seed, val_fraction=0.05):
    """Reads, encodes, shuffles, splits and packs the text that `spec` names; returns Splits.

    spec: "python" (the sources of the running interpreter's standard library, 12 MB), a folder, a glob, or one file;
    `./python` is a folder of that name. Empty and hidden files are passed over; binary ones (those with a NUL byte) are
    skipped and counted; bytes that are not UTF-8 become U+FFFD and are counted.
    FileNotFoundError: no such path. ValueError: no text there.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"The part kept for validation must lie between 0 and 1, not at {val_fraction}.")
    return split(_documents(spec, encoding), seed, val_fraction)


def _files(spec):
    """The paths that `spec` names, sorted as text with forward slashes: one order on every machine."""
    if spec == "python":
        found = [p for p in _walk(sysconfig.get_paths()["stdlib"], NOT_LIBRARY) if p.suffix == ".py"]
        # these two hold the paths and compiler flags of one build: the same release differs from machine to machine
        found = [p for p in found if "sysconfigdata" not in p.name and p.name != "python-config.py"]
    elif os.path.isdir(spec):
        found = list(_walk(spec))
    else:
        names = [spec] if os.path.isfile(spec) else glob.glob(spec, recursive=True)
        found = [p for p in map(Path, names) if p.is_file()]
        if not found:
            raise FileNotFoundError(f"There is no file or folder {spec!r}, and no file matches it as a pattern.")
    return sorted(found, key=Path.as_posix)


def _walk(root, leave_out=()):
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in leave_out and not f.startswith(".")]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        yield from (p for p in paths if p.is_file())  # a named pipe would wait for its writer for ever


def _documents(spec, encoding):
    """Encodes each file of `spec`: a list of 1-D int32 tensors, each ending in end-of-text."""
    paths, counts, documents = _files(os.path.expanduser(spec)), Counter(), []
    for path in tqdm(paths, desc="reading text", unit="file", delay=2, disable=not FIRST_RANK):
        text = _read(path, counts)
        if text:
            documents.append(encode(text, encoding))
    skipped = f"skipped {counts['binary']} binary and {counts['unreadable']} unreadable files"
    if not documents:
        raise ValueError(f"There is no text in {spec!r}: {len(paths)} files found, {skipped}. Name other files.")
    tokens, mended = sum(map(len, documents)), counts["mended"]
    _say(f"{spec}: {len(documents)} documents, {tokens} tokens; {mended} with invalid UTF-8 mended; {skipped}")
    return documents


def _read(path, counts):
    """The text of a file, None if it is none; `counts` learns of what could not be taken as it is."""
    try:
        raw = path.read_bytes()
        if b"\0" not in raw:
            return raw.decode("utf-8")
        counts["binary"] += 1
    except OSError:
        counts["unreadable"] += 1
    except UnicodeDecodeError:
        counts["mended"] += 1
        return raw.decode("utf-8", errors="replace")


def encode(text, encoding):
    """One document's ids as a 1-D int32 tensor: its text, whatever it spells, as ordinary text, then end-of-text."""
    ids, start = array("i"), 0
    while start < len(text):
        stop = start + PIECE
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop  # cut a very long document at a line end
        ids.fromlist(encoding.encode_ordinary(text[start:stop]))
        start = stop
    ids.append(encoding.eot_token)
    return torch.frombuffer(ids, dtype=torch.int32)


# ---- packing and order ----


class Splits(NamedTuple):
    train: torch.Tensor  # [N] int32, documents end to end, each followed by end-of-text
    val: torch.Tensor  # [N'] int32, likewise


def split(documents, seed, val_fraction):
    """Shuffles the documents and packs them into a training and a validation stream (Splits)."""
    order = _permutation(len(documents), seed, "documents").tolist()
    shuffled = [documents[i] for i in order]
    if len(documents) >= FEW_DOCUMENTS:
        cut = min(max(1, round(len(documents) * val_fraction)), len(documents) - 1)
        return Splits(train=torch.cat(shuffled[cut:]), val=torch.cat(shuffled[:cut]))
    _say(f"warning: only {len(documents)} documents, so not whole ones but the end of the text is kept for validation")
    stream = torch.cat(shuffled)
    cut = max(1, int(len(stream) * val_fraction))
    return Splits(train=stream[:-cut], val=stream[-cut:])


def _permutation(n, *key):
    """A permutation of 0..n-1 that depends on the key alone. Hashed: with a sum, (seed 0, epoch 1) would be (1, 0)."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.randperm(n, generator=torch.Generator().manual_seed(int.from_bytes(digest[:4], "little")))


def fingerprint(tokens_N):
    """Names a stream in a few words: its length and a hash of at most 131,071 tokens spread over it."""
    sample = tokens_N[:: max(1, len(tokens_N) // 2**16)]
    return f"{len(tokens_N)} tokens with hash {hashlib.sha256(array('i', sample.tolist())).hexdigest()[:12]}"


def _sequences(tokens_N, seq_len, needed, purpose):
    """A view [sequences, seq_len + 1] of the stream, nothing copied. ValueError if there are fewer than `needed`."""
    if min(seq_len, needed) < 1:
        raise ValueError(f"seq_len and the size of a batch must be at least 1, not {seq_len} and {needed}.")
    count = max(0, len(tokens_N) - 1) // seq_len
    if count < needed:
        raise ValueError(
            f"Too little text for {purpose}: {len(tokens_N)} tokens make {count} sequences of {seq_len}, one batch of"
            f" all ranks takes at least {needed}. Bring more text, or make seq_len or batch_size smaller."
        )
    return tokens_N.unfold(0, seq_len + 1, seq_len)


class Batches:
    """The endless, seeded, resumable order of training sequences; each rank takes its own part of every step.

    tokens_N: 1-D int32 stream, the same on all ranks. batch_size: sequences of one rank.
    ValueError: the stream holds less than one step of all ranks.
    """

    def __init__(self, tokens_N, seq_len, batch_size, seed, rank=0, world_size=1):
        self.sequences = _sequences(tokens_N, seq_len, batch_size * world_size, "training")
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.drawn = 0  # sequences handed out to all ranks since the first step of the run
        self.identity = {"seq_len": seq_len, "seed": seed, "data": fingerprint(tokens_N)}  # must not change
        self.order, self.order_epoch = None, None  # the permutation in use

    def next(self):
        """(tokens_BS, targets_BS), int64 on the CPU; targets are the tokens one place on."""
        start = self.drawn + self.rank * self.batch_size
        self.drawn += self.world_size * self.batch_size
        rows = self.sequences[self._numbers(start, start + self.batch_size)].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _numbers(self, start, stop):
        """Which sequences stand at start..stop-1 of the endless list; the range may cross from epoch to epoch."""
        parts, count = [], len(self.sequences)
        while start < stop:
            epoch, at = divmod(start, count)
            if epoch != self.order_epoch:
                self.order, self.order_epoch = _permutation(count, self.identity["seed"], epoch), epoch
            parts.append(self.order[at : at + stop - start])
            start += len(parts[-1])
        return torch.cat(parts)

    def state_dict(self):
        """Where the next batch begins, in sequences of all ranks: the same on every rank, a few numbers, JSON-able.

        It speaks of the batches handed out so far: who fetches ahead must take it before fetching.
        """
        epoch, position = divmod(self.drawn, len(self.sequences))
        return {"epoch": epoch, "position": position, **self.identity}

    def load_state_dict(self, state):
        """Goes on where `state` was taken, on any number of ranks. ValueError: other seq_len, seed or data."""
        for name, mine in self.identity.items():
            if state.get(name) != mine:
                raise ValueError(
                    f"Cannot resume the data: the checkpoint has {name} = {state.get(name)}, this run {name} = {mine}."
                    f" Resume with the checkpoint's {name}, or start a new run."
                )
        epoch, position, count = state.get("epoch"), state.get("position"), len(self.sequences)
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position < count:
            raise ValueError(f"Cannot resume the data: {epoch=} and {position=} among {count} sequences is no place.")
        self.drawn = epoch * count + position


def validation_batches(tokens_N, seq_len, batch_size, limit, rank=0, world_size=1):
    """This rank's list of (tokens_BS, targets_BS), made once so that every evaluation sees the same tokens.

    limit: sequences over all ranks; that many, or all, are taken at equal distances over the stream, whatever the
    number of ranks. All ranks get equally many batches (their collectives must meet), filled up with rows whose targets
    are -100, so divide a sum of losses by the number of other targets. ValueError: not one sequence.
    """
    sequences = _sequences(tokens_N, seq_len, min(limit, batch_size, 1), "validation")
    count = min(limit, len(sequences))
    chosen = torch.arange(count) * len(sequences) // count
    batches = []
    for start in range(rank * batch_size, count + rank * batch_size, batch_size * world_size):
        rows = sequences[chosen[start : start + batch_size]].long()
        filler = (0, 0, 0, batch_size - len(rows))
        batches.append((F.pad(rows[:, :-1], filler), F.pad(rows[:, 1:], filler, value=IGNORED)))
    return batches
