"""Text in, batches of token ids out. This file knows nothing of models.

    python data.py --data=SPEC --tokenizer=NAME --out=FOLDER    writes token shards, so that text is tokenised once

SPEC is "python" (the standard library's sources), a folder, glob or file of text, a folder of token shards, or
hf:NAME[:CONFIG[:SPLIT[:COLUMN]]], a dataset of the Hugging Face Hub or in a local folder.

How a document becomes a batch
------------------------------
*Tokenise.* A tokenizer is a `tiktoken.Encoding`. The default, `bytes`, is built here and needs no file: ids 0..255 are
the bytes themselves, 256 is end-of-text. Any tiktoken name works too (tiktoken downloads its ranks once into a cache),
and so does a `.tiktoken` rank file on disk, for which the network is never touched.

*End of text.* A document is one file or one row, encoded as ordinary text: a file that spells <|endoftext|> (this one
does) yields those characters and not the control token. Then the true end-of-text id is appended, after every document
and nowhere else, so that the model can trust it.

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

*Share and resume.* Lay the epochs' permutations end to end: one endless list of sequences, whose state is one number,
how many of it all ranks together have drawn. A step of W ranks with B sequences each takes the next W * B of the list,
rank r every W-th:

    drawn = 40, B = 2, W = 3      rank 0: 40 43   rank 1: 41 44   rank 2: 42 45      then drawn = 46

No rank has a position of its own, so a run saved on 2 ranks goes on with 1 or 4 and neither skips nor repeats. Where an
epoch ends inside a step, the step runs on into the next permutation; no sequence is dropped. The state also names the
data by a fingerprint, since a position in one text means nothing in another.

Token shards
------------
The two streams, written to train-00000.bin ... and val-00000.bin ..., and mapped into memory instead of read. Order and
resume are those of the text itself, to the bit. A shard is a header of 4096 bytes (MAGIC, the SHA-256 of what follows,
JSON, blanks), then the ids as little-endian uint16, or uint32 where the tokenizer has more than 65,536. The header
names the tokenizer with a hash of all it does, the counts, and the shard's place: its number, whether it is the last,
and "sha256" over that of the shard before and the ids. What is foreign, cut off, missing or mixed is refused. A shard
gets its name when it is whole.

Streams from the Hub
--------------------
A set too large to be read before training cannot be permuted as a whole, nor cut into numbered sequences: where the
millionth begins depends on every document before it, and no rank should tokenise them all. So LANES = 192 streams are
packed side by side, and sequence k of the endless list is the next one of lane k % LANES. Ranks draw every W-th
sequence; where W divides LANES, a rank needs the lanes of one residue only. It reads all rows, tokenises its own.

Rows come in file order, in blocks of 1024 that are permuted by (seed, epoch, row): a shuffle without a buffer. Each
document goes to the lane that has been dealt the fewest bytes. Every rank can work that out, and unlike dealing in turn
it keeps the lanes about level, so that few documents wait and a resume has little to read again. With 3 lanes, bytes as
tokens and seq_len = 4:

    documents (with end-of-text)   a 6   b 3   c 4   d 5   e 4         dealt to lanes   0 1 2 1 2   (a tie: the lower)
    lane 0   a a a a a a               sequence 0: a a a a a           next 3: a a ...
    lane 1   b b b d d d d d           sequence 1: b b b d d           next 4: d d d d ...
    lane 2   c c c c e e e e           sequence 2: c c c c e           next 5: e e e e ...

The state: sequences drawn; for each lane a cursor (document, tokens of it used up): after the step above 0: (a, 4),
1: (d, 1), 2: (e, 0); and a bookmark, the latest start of a block before all cursors, with the bytes dealt until there.
A rank knows its own lanes; `merge_states` unites them into a state for any number of ranks. A resume opens the
bookmark's file and reads on from the block; files before it are not touched.

Every 20th of the first 20,000 rows is kept for validation. A set sorted by topic stays sorted in a stream, up to a
block: make token shards of it, which are permuted as a whole.

Shapes: B sequences of one rank's batch, S tokens of a sequence, N tokens of a stream.
"""

import argparse
import atexit
import base64
import glob
import hashlib
import json
import math
import os
import re
import sys
import sysconfig
import tempfile
import threading
from array import array
from bisect import bisect_right
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, islice, pairwise, zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import regex
import tiktoken
import tiktoken.load
import torch
import torch.nn.functional as F
from tqdm import tqdm

END_OF_TEXT = "<|endoftext|>"
IGNORED = -100  # the target that a loss leaves out
FEW_DOCUMENTS = 20  # below this the split is by tokens
# what usually ends a text, where no file of a Hugging Face tokenizer says so
END_NAMES = ("<｜end▁of▁sentence｜>", END_OF_TEXT, "</s>")
NOT_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}  # bytes that no text has: DeepSeek V2 knows no tokens for them
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
REMEMBERED, LONGEST = 2**17, 32  # how many pieces, of at most how many characters, a cut keeps the ids of
PIECE = 2**24  # characters encoded at once; bounds the Python list of ids that tiktoken returns
FIRST_RANK = os.environ.get("RANK", "0") == "0"  # torchrun's ranks all read the text; this one speaks
LANES = 192  # of a stream; divisible by 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96: numbers of ranks
BLOCK = 1024  # rows of a stream read and permuted at once
PORTION = 2**18  # tokens that a stream makes ahead, and that are written to a shard at once
HELD_OUT_EVERY, HELD_OUT_ROWS = 20, 20_000  # of the first rows of a stream, which are kept for validation
SHARD_TOKENS = 2**28  # a shard ends with the portion that reaches this many
HEADER_BYTES = 4096
MAGIC = b"nanofp4 tokens 1"
SHARD_NAME = re.compile(r"(train|val)-\d{5}\.bin(\.part)?")
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


def _line(error):
    return " ".join(str(error).split()) or type(error).__name__


# ---- tokenizer ----


def tokenizer(name):
    """The `tiktoken.Encoding` called `name`: "bytes", a tiktoken name, the path of a `.tiktoken` rank file, or hf:DIR,
    whose tokenizer.json is a Hugging Face checkpoint's (see HubEncoding).

    A rank file holds no special tokens: end-of-text becomes the id after its last rank, and text is split as for GPT-4.
    ValueError or FileNotFoundError, in one line: no such name or file, a damaged file, or ranks that tiktoken could
    neither find in its cache nor download.
    """
    if name == "bytes":
        return _encoding(name, {bytes([i]): i for i in range(256)}, BYTES_PATTERN)
    if name.startswith("hf:"):
        return HubEncoding(os.path.expanduser(name[3:]))
    if name.endswith(".tiktoken"):
        return _encoding(name, _read_ranks(os.path.expanduser(name)), WORDS_PATTERN)
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(tiktoken.list_encoding_names())
        raise ValueError(f"No tokenizer is called {name!r}: use bytes, a path ending in .tiktoken, hf:DIR, or one of"
                         f" {known}.")
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


def tokenizer_hash(encoding):
    """A hash of all that decides which ids a document becomes: ranks, pattern, special tokens; not of the name."""
    ranks, special = sorted(encoding._mergeable_ranks.items()), sorted(encoding._special_tokens.items())
    parts = (ranks, encoding._pat_str, special, encoding.eot_token)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


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


class HubEncoding(tiktoken.Encoding):
    """The byte-level BPE of a Hugging Face `tokenizer.json` (DeepSeek V2 and V3, GPT-2, Llama 3), id for id.

    *Cuts.* Patterns cut the text one after the other, each within the pieces that the one before left. No alternation
    does that: V2's second cut makes one piece of U+3000 and the word behind it, its third parts them again. Each cut
    keeps the ids of short pieces in a dictionary, which makes for 4 to 7 MB/s.

    *Merges.* tiktoken joins what is left, by rank; then the ids are looked up, for they need not follow the merges.

    *Added tokens.* The "special" ones and the end of text are never found in text, whatever it spells. The others are,
    as by tokenizers with `encode_special_tokens`: V2 has letters such as "ö" there. All decode to what they spell.

    Not exact for characters new to Unicode: whether `\\p{L}` has them depends on the version of `regex` here, and on
    that of tokenizers there.

    folder: has tokenizer.json, and says in tokenizer_config.json or config.json what ends a text. FileNotFoundError:
    not there. ValueError, in one line: damaged, no byte-level BPE, or a setting that would give other ids here.
    """

    def __init__(self, folder):
        path = os.path.join(folder, "tokenizer.json")
        if not os.path.isfile(path):
            what = f"file {path}" if os.path.isdir(folder) else f"folder {folder}"
            raise FileNotFoundError(f"There is no {what}: --tokenizer=hf:DIR takes a folder with a tokenizer.json.")
        try:
            self._build(folder, _read_json(path))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {type(error).__name__} {error}. Fetch it anew.") from None
        except ValueError as error:
            raise ValueError(f"The tokenizer in {folder} cannot be used: {error}.") from None
        self.folder = folder

    def _build(self, folder, spec):
        cuts, model, letters, added = _cuts(spec), spec["model"], _byte_letters(), spec.get("added_tokens") or []
        vocab, special = model["vocab"], {}
        for token in added:
            following = max(len(vocab), max(special.values(), default=0) + 1)
            number = special[token["content"]] = vocab.get(token["content"], following)
            if number != token["id"]:  # the file's ids mean nothing to tokenizers, which counts on
                raise ValueError(f"its added token {token['content']!r} has id {token['id']}, but comes to {number}")
        end = _end_of_text(folder, special)
        special |= {token: i for token, i in vocab.items() if not letters.keys() >= set(token)}  # not made of bytes
        ids = {_bytes(token, letters): i for token, i in vocab.items() if token not in special}
        every_id = [*ids.values(), *special.values()]
        if len(set(every_id)) < len(every_id) or not all(type(i) is int and 0 <= i < 2**31 - 1 for i in every_id):
            raise ValueError("the ids of its tokens are not whole numbers, each used once")
        if missing := {byte for letter, byte in letters.items() if letter not in vocab} - NOT_UTF8:
            raise ValueError(f"it has no token for {len(missing)} of the bytes that text is made of")
        ranks = _merge_ranks([letter for letter in letters if letter in vocab], model["merges"])
        by_rank = {_bytes(token, letters): rank for token, rank in ranks.items()}
        merges = tiktoken.Encoding("merges", pat_str=".", mergeable_ranks=by_rank, special_tokens={})
        id_of, whole = [vocab[token] for token in ranks], ids if model.get("ignore_merges") else {}

        def encode(piece):
            piece = piece.encode()
            return [whole[piece]] if piece in whole else [id_of[rank] for rank in merges._encode_single_piece(piece)]

        for pattern in reversed(cuts):
            encode = _cut(pattern, encode)
        for pattern, found in _added_cuts([{**t, "special": t["special"] or t["content"] == end} for t in added]):
            cuts, encode = [pattern, *cuts], _cut(pattern, encode, {token: [special[token]] for token in found})
        super().__init__(f"hf:{folder}", pat_str=".", mergeable_ranks=ids, special_tokens=special)  # this one decodes
        self._encode, self._end = encode, special[end]
        # all that makes the ids besides ranks and special tokens, for who compares encodings
        self._pat_str = json.dumps([cuts, bool(whole), hashlib.sha256("\n".join(ranks).encode()).hexdigest()])

    def encode_ordinary(self, text):
        try:
            return self._encode(text) if text else []
        except UnicodeEncodeError:  # lone surrogates: as in tiktoken, pairs are joined, others become U+FFFD
            return self._encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

    def encode(self, *_, **__):
        raise NotImplementedError("This encoding finds no special tokens in text: use encode_ordinary.")

    encode_to_numpy = encode_with_unstable = encode

    @property
    def eot_token(self):
        return self._end

    def __getstate__(self):
        return {"folder": self.folder}


def _read_json(path):
    """The object in a JSON file, {} if there is no such file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8")) if os.path.exists(path) else {}
    except ValueError:
        raise ValueError(f"{path} is not JSON, or is cut off") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


def _byte_letters():
    """Which byte each letter of a byte-level vocabulary stands for: a printable one is its own letter."""
    printable, others = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}, iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


def _bytes(token, letters):
    return bytes(map(letters.__getitem__, token))


def _end_of_text(folder, special):
    """The token that ends a text: the eos_token, else the one with the eos_token_id, else one of the usual names."""
    token = _read_json(os.path.join(folder, "tokenizer_config.json")).get("eos_token")
    number = _read_json(os.path.join(folder, "config.json")).get("eos_token_id")
    number = number[0] if isinstance(number, list) and number else number
    if token is None:
        names = [name for name, i in special.items() if i == number] + [name for name in END_NAMES if name in special]
        token = names[0] if names else None
    token = token["content"] if isinstance(token, dict) else token
    if token not in special:
        said = "" if token is None else f", not {token!r}"
        raise ValueError(f"no token ends a text: let tokenizer_config.json name an added token as eos_token{said}")
    return token


def _cuts(spec):
    """The patterns that cut a text, one after the other. ValueError: a setting that patterns and merges cannot give."""
    model, steps, cuts = spec["model"], [spec.get("pre_tokenizer")], []
    if (kind := model.get("type", "BPE")) != "BPE":
        raise ValueError(f"its model is {kind}, not BPE")
    for setting in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(setting):
            raise ValueError(f"its {setting} is {model[setting]!r}, which is not supported")
    if (normalizer := spec.get("normalizer")) and normalizer.get("normalizers") != []:
        raise ValueError(f"its normalizer {normalizer['type']} is not supported, for it changes the text")
    while steps:
        step = steps.pop(0) or {"type": None}
        if step["type"] == "Sequence":
            steps = step["pretokenizers"] + steps
        elif step["type"] == "Split" and step["behavior"] == "Isolated":
            [(kind, pattern)] = step["pattern"].items()
            cuts.append(_checked(pattern) if kind == "Regex" else regex.escape(pattern))
        elif step["type"] == "Digits":
            cuts.append(r"\p{N}" if step["individual_digits"] else r"\p{N}+")
        elif step["type"] == "ByteLevel" and not steps and not step["add_prefix_space"]:
            return cuts + [GPT2_PATTERN] * step.get("use_regex", True)
        else:
            setting = "".join(f" ({key} {step[key]})" for key in ("behavior", "add_prefix_space") if key in step)
            raise ValueError(f"its pre_tokenizer {step['type']}{setting} is not supported at this place")
    raise ValueError("its pre_tokenizer does not end in ByteLevel")


def _checked(pattern):
    """The pattern, if `regex` reads it as Oniguruma does, which tokenizers uses: without nested or intersected classes,
    capturing groups, {n}+, {n}? and the rarer escapes. To both, a look-around sees the end of the piece as that of a
    text, and ^ and $ are those of a line."""
    bare = regex.sub(r"\\([pP]\{\^?\w+\}|[dDsSrnt]|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|\W)", "", pattern)
    bare = regex.sub(r"\[\^?((?!&&)[^][\\])*\]", "", bare)
    if odd := regex.search(r"\\.?|[][]|\((?!\?(i?:|[=!>]|<[=!]))|\}\+|\{\d+\}\?", bare):
        raise ValueError(f"its pre_tokenizer has {odd[0]!r} in the pattern {pattern!r}, which is not supported")
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"its pre_tokenizer has a faulty pattern {pattern!r} ({error})") from None
    return pattern


def _merge_ranks(letters, merges):
    """Tokens in the order in which merges make them, as {token: rank}, the letters first.

    tiktoken joins whichever neighbours make a token; a merge names both. That comes to the same if each token, taken
    alone and joined by the earlier ranks, is left as the two parts that its merge names: as long as no merge crosses
    its borders, the text around it changes nothing inside. A merge for which this fails can never come about, and
    makes no token. ValueError: a merge that stands before one that makes its part, so that ranks fall again.
    """
    ranks, unmade = {letter: rank for rank, letter in enumerate(letters)}, []
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        if left not in ranks or right not in ranks:
            unmade.append((left, right))
        elif left + right not in ranks and _last_two(left + right, ranks) == [left, right]:
            ranks[left + right] = len(ranks)
    for left, right in unmade:
        # harmless if a part is never made, or later than the whole
        if left in ranks and right in ranks and ranks.get(left + right, len(ranks)) > max(ranks[left], ranks[right]):
            raise ValueError(f"its merge of {left!r} and {right!r} stands before the merges that make them")
    return ranks


def _last_two(token, ranks):
    """The token's letters, joined by rank until two parts are left or nothing more can be joined."""
    parts, never = list(token), len(ranks)
    while len(parts) > 2:
        joined = [ranks.get(left + right, never) for left, right in pairwise(parts)]
        if (rank := min(joined)) == never:
            break
        i = joined.index(rank)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _added_cuts(added):
    """Patterns that find added tokens, each with those it may find: the innermost first, that of tokens "normalized".

    As in tokenizers, the leftmost and then longest token counts; a special one in the text is passed over as text, and
    so is what begins inside it.
    """
    for normalized in (True, False):
        tokens = [token for token in added if token["normalized"] is normalized and token["content"]]
        found = [token["content"] for token in tokens if not token["special"]]
        passed = [token["content"] for token in tokens if token["special"] and _overlap(token["content"], found)]
        for token in tokens:
            if not token["special"] and (token["single_word"] or token["lstrip"] or token["rstrip"]):
                raise ValueError(f"its added token {token['content']!r} has single_word, lstrip or rstrip set")
        if found:
            every = sorted(found + passed, key=len, reverse=True)
            yield "|".join(regex.escape(token) + "(*SKIP)(*FAIL)" * (token in passed) for token in every), found


def _overlap(token, others):
    """Whether one of the others can begin inside the token, or where it begins."""
    return any(o.startswith(token[i:]) or token.startswith(o, i) for o in others for i in range(len(token)))


def _cut(pattern, then, known=()):
    """A function from text to ids, which lets `then` encode what the pattern finds and what lies between, each as a
    piece of its own. `known`: ids of some pieces."""
    pieces, known = regex.compile(f"({pattern})", regex.MULTILINE).split, dict(known)

    def encode(text):
        out = []
        for piece in pieces(text):
            if piece:
                ids = known.get(piece)
                if ids is None:
                    ids = then(piece)
                    if len(piece) <= LONGEST and len(known) < REMEMBERED:
                        known[piece] = ids
                out += ids
        return out

    return encode


# ---- text files ----


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
        raise ValueError(f"There is no text in {spec!r}: {len(paths)} files found, {skipped}. Name other files; a"
                         f" folder of parquet or jsonl files is hf:FOLDER.")
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


# ---- packing ----


class Splits(NamedTuple):
    train: torch.Tensor  # [N] int32, documents end to end, each followed by end-of-text; or Tokens
    val: torch.Tensor  # [N'], likewise


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


class Tokens:
    """A stream of token ids in parts that lie end to end: 1-D tensors, in memory or mapped. `name` tells the data."""

    def __init__(self, parts, n_vocab, name=None):
        self.parts, self.n_vocab, self.name = parts, n_vocab, name or fingerprint(parts[0])
        self.ends = list(accumulate(map(len, parts)))

    def __len__(self):
        return self.ends[-1]

    def cut(self, start, stop):
        """Tokens start..stop-1, int64. ValueError: one of them is no id of the tokenizer."""
        pieces, at = [], bisect_right(self.ends, start)
        while start < stop:
            offset = self.ends[at] - len(self.parts[at])
            pieces.append(self.parts[at][start - offset : stop - offset].long())
            start, at = start + len(pieces[-1]), at + 1
        ids = torch.cat(pieces)
        if ids.max() >= self.n_vocab:
            raise ValueError(f"There is a token id {ids.max()} in the data, but the tokenizer has {self.n_vocab} ids: a"
                             f" token shard is damaged. Make the shards anew.")
        return ids


# ---- order and resume ----


def _count(tokens, seq_len, needed, purpose):
    """How many sequences the stream makes. ValueError if there are fewer than `needed`."""
    if min(seq_len, needed) < 1:
        raise ValueError(f"seq_len and the size of a batch must be at least 1, not {seq_len} and {needed}.")
    count = max(0, len(tokens) - 1) // seq_len
    if count < needed:
        raise ValueError(
            f"Too little text for {purpose}: {len(tokens)} tokens make {count} sequences of {seq_len}, one batch of"
            f" all ranks takes at least {needed}. Bring more text, or make seq_len or batch_size smaller."
        )
    return count


def _batch(rows, seq_len):
    """(tokens_BS, targets_BS) from rows of seq_len + 1 ids; int64 on the CPU. Targets are the tokens one place on."""
    rows = torch.cat([torch.empty(0, dtype=torch.int64), *rows]).view(-1, seq_len + 1)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _check_identity(identity, state):
    for name, mine in identity.items():
        if state.get(name) != mine:
            raise ValueError(
                f"Cannot resume the data: the checkpoint has {name} = {state.get(name)}, this run {name} = {mine}."
                f" Resume with the checkpoint's {name}, or start a new run."
            )


class Batches:
    """The endless, seeded, resumable order of training sequences; each rank takes its own part of every step.

    tokens: Tokens, the same on all ranks. batch_size: sequences of one rank.
    ValueError: the stream holds less than one step of all ranks.
    """

    def __init__(self, tokens, seq_len, batch_size, seed, rank=0, world_size=1):
        self.tokens, self.count = tokens, _count(tokens, seq_len, batch_size * world_size, "training")
        self.seq_len, self.batch_size, self.rank, self.world_size = seq_len, batch_size, rank, world_size
        self.drawn = 0  # sequences handed out to all ranks since the first step of the run
        self.identity = {"seq_len": seq_len, "seed": seed, "data": tokens.name}  # must not change
        self.order, self.order_epoch = None, None  # the permutation in use

    def next(self):
        """This rank's (tokens_BS, targets_BS), int64 on the CPU; targets are the tokens one place on."""
        first, self.drawn = self.drawn + self.rank, self.drawn + self.world_size * self.batch_size
        starts = [self._number(place) * self.seq_len for place in range(first, self.drawn, self.world_size)]
        return _batch([self.tokens.cut(start, start + self.seq_len + 1) for start in starts], self.seq_len)

    def _number(self, place):
        """Which sequence stands at this place of the endless list."""
        epoch, at = divmod(place, self.count)
        if epoch != self.order_epoch:
            self.order, self.order_epoch = _permutation(self.count, self.identity["seed"], epoch), epoch
        return int(self.order[at])

    def state_dict(self):
        """Where the next batch begins, in sequences of all ranks: the same on every rank, a few numbers, JSON-able.

        It speaks of the batches handed out so far: who fetches ahead must take it before fetching.
        """
        epoch, position = divmod(self.drawn, self.count)
        return {"epoch": epoch, "position": position, **self.identity}

    def load_state_dict(self, state):
        """Goes on where `state` was taken, on any number of ranks. ValueError: other seq_len, seed or data."""
        _check_identity(self.identity, state)
        epoch, position, count = state.get("epoch"), state.get("position"), self.count
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position < count:
            raise ValueError(f"Cannot resume the data: {epoch=} and {position=} among {count} sequences is no place.")
        self.drawn = epoch * count + position


def validation_batches(tokens, seq_len, batch_size, limit, rank=0, world_size=1):
    """This rank's list of (tokens_BS, targets_BS), made once so that every evaluation sees the same tokens.

    tokens: Tokens. limit: sequences over all ranks; that many, or all, are taken at equal distances over the stream,
    whatever the number of ranks. All ranks get equally many batches (their collectives must meet), filled up with rows
    whose targets are -100, so divide a sum of losses by the number of other targets. ValueError: not one sequence.
    """
    total, batches = _count(tokens, seq_len, min(limit, batch_size, 1), "validation"), []
    count = min(limit, total)
    for start in range(rank * batch_size, count + rank * batch_size, batch_size * world_size):
        starts = [i * total // count * seq_len for i in range(start, min(start + batch_size, count))]
        filler = (0, 0, 0, batch_size - len(starts))
        tokens_BS, targets_BS = _batch([tokens.cut(at, at + seq_len + 1) for at in starts], seq_len)
        batches.append((F.pad(tokens_BS, filler), F.pad(targets_BS, filler, value=IGNORED)))
    return batches


# ---- token shards ----


def make_shards(spec, encoding, out, seed=0, max_tokens=0):
    """Writes the text that `spec` names as token shards into the folder `out`; max_tokens > 0 cuts the training text.

    An interrupted run over a Hub dataset goes on behind its last whole shard, one over files starts over.
    ValueError: `out` holds something else, or there is no text. OSError: it cannot be written, or the disk is full.
    """
    kind = {"data": spec, "seed": seed, "max_tokens": max_tokens, "tokenizer": encoding.name}
    kind |= {"tokenizer_hash": tokenizer_hash(encoding), "n_vocab": encoding.n_vocab, "eot": encoding.eot_token}
    kind["dtype"] = "uint16" if encoding.n_vocab <= 2**16 else "uint32"
    whole = _whole_shards(out, kind) if os.path.isdir(out) else []
    try:
        os.makedirs(out, exist_ok=True)
        for name in set(os.listdir(out)) - set(map(_shard_name, whole)):
            os.unlink(os.path.join(out, name))
    except OSError as error:
        raise OSError(f"Cannot write into {out} ({error.strerror}): name another folder as --out.") from None
    if spec.startswith("hf:"):
        rows = HubRows(spec, seed)
        train = _encode_blocks(rows, encoding, whole[-1]["next"] if whole else {})
        val = _portions(rows.held_out(encoding))
    else:
        train, val = map(_portions, load(spec, encoding, seed))
    done, before = sum(header["tokens"] for header in whole), ""
    with tqdm(initial=done, total=max_tokens or None, unit="token", unit_scale=True, mininterval=0.5) as bar:
        before = _write_shards(out, kind | {"split": "val", "shard": 0, "before": ""}, val, tqdm(disable=True))
        before = whole[-1]["sha256"] if whole else before
        train = _cut_off(train, max_tokens - done if max_tokens else math.inf)
        _write_shards(out, kind | {"split": "train", "shard": len(whole), "before": before}, train, bar)
    enough = -(-encoding.n_vocab // 128) * 128
    _say(f"{out}: {bar.n} tokens to train on, by train.py --data={out} --tokenizer={encoding.name}"
         f" --model.vocab_size={enough}")


def _whole_shards(out, kind):
    """The headers of the shards in `out` behind which an interrupted run of this very command can go on."""
    names, whole = sorted(os.listdir(out)), []
    for name in names:
        is_shard = SHARD_NAME.fullmatch(name)
        if is_shard and name.endswith(".part"):
            continue
        header = _read_header(Path(out, name)) if is_shard else {}
        if not kind.items() <= header.items() or header["split"] == "train" and header["last"]:
            raise ValueError(f"--out={out} is not empty, it holds {name}: name a new folder, or remove that one.")
        whole += [header] if header["next"] else []
    if names:
        _say(f"{out}: an interrupted run " + (f"goes on behind {len(whole)} shards" if whole else "starts over"))
    return whole


def _encode_blocks(rows, encoding, place):
    """(place where it begins, tokens) of the blocks of the first epoch. tiktoken lets threads run side by side; a
    HubEncoding is Python, and twice as slow in several."""
    with ThreadPoolExecutor(1 if isinstance(encoding, HubEncoding) else None) as pool:
        for behind, texts, _ in rows.blocks(**place):
            if texts:
                yield place, torch.cat(list(pool.map(partial(encode, encoding=encoding), texts)))
            place = behind


def _portions(stream):
    return ((None, ids) for ids in stream.split(PORTION))


def _cut_off(portions, tokens):
    for place, ids in portions:
        yield place, ids[: min(tokens, len(ids))]
        tokens -= len(ids)
        if tokens <= 0:
            return


def _shard_name(header):
    return f"{header['split']}-{header['shard']:05d}.bin"


def _write_shards(out, header, portions, bar):
    """Writes portions (place, tokens) as shards of one split, the first as `header` says; returns the last's hash."""
    code, portion = {"uint16": "H", "uint32": "I"}[header["dtype"]], next(portions, None)
    if not portion:
        raise ValueError(f"There is no text to train on in {header['data']!r}.")
    while portion:
        path, tokens, documents = Path(out, _shard_name(header)), 0, 0
        aside, digest = Path(f"{path}.part"), hashlib.sha256(header["before"].encode())
        try:
            with open(aside, "wb") as file:
                file.write(bytes(HEADER_BYTES))
                while portion and tokens < SHARD_TOKENS:
                    ids = array(code, portion[1].tolist())
                    file.write(ids)
                    digest.update(ids)
                    bar.update(len(ids))
                    tokens, documents = tokens + len(ids), documents + ids.count(header["eot"])
                    portion = next(portions, None)
                header |= {"tokens": tokens, "documents": documents, "sha256": digest.hexdigest()}
                header |= {"last": not portion, "next": portion and portion[0]}
                file.seek(0)
                file.write(_header_bytes(header))
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except OSError as error:
            if error.errno is None:  # of reading, and in words already
                raise
            raise OSError(f"Cannot write {path} ({error.strerror}): make room, or name another --out.") from None
        finally:
            aside.unlink(missing_ok=True)
        header |= {"shard": header["shard"] + 1, "before": header["sha256"]}
    return header["before"]


def _header_bytes(header):
    text = json.dumps(header).encode().ljust(HEADER_BYTES - len(MAGIC) - 66)  # 64 digits, a blank, a line end
    if len(text) + len(MAGIC) + 66 > HEADER_BYTES:
        raise ValueError("The names given as --data and --tokenizer are too long for the header of a shard.")
    return MAGIC + b" " + hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def _read_header(path):
    """The header of a token shard, a dict. ValueError: it is none, or not whole."""
    with open(path, "rb") as file:
        line, _, text = file.read(HEADER_BYTES).partition(b"\n")
    magic, _, digest = line.rpartition(b" ")
    if magic != MAGIC:
        raise ValueError(f"{path} is not a token shard, or one of another version: move it away or make it anew.")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise ValueError(f"{path} has a damaged header: copy the file again or make the shards anew.")
    header, size = json.loads(text), os.path.getsize(path)
    expected = HEADER_BYTES + header["tokens"] * getattr(torch, header["dtype"]).itemsize
    if size != expected:
        raise ValueError(f"{path} is cut off or damaged, {size} bytes in place of {expected}: copy the file again.")
    return header


def _holds_shards(folder):
    return os.path.isdir(folder) and any(map(SHARD_NAME.fullmatch, os.listdir(folder)))


def open_shards(folder, encoding):
    """The token shards in `folder`, mapped and not read: Splits of Tokens. ValueError: not a whole set, or of another
    tokenizer than `encoding`."""
    names = sorted(name for name in os.listdir(folder) if SHARD_NAME.fullmatch(name) and name.endswith(".bin"))
    mine, before, splits = tokenizer_hash(encoding), "", {}
    for split in ("val", "train"):
        headers = [_read_header(Path(folder, name)) for name in names if name.startswith(split)]
        if [h["shard"] for h in headers] != list(range(len(headers))) or not any(h["last"] for h in headers):
            raise ValueError(f"{folder} lacks token shards of {split}, it has {len(headers)}: run the same `python"
                             f" data.py` command to its end, or copy the missing files.")
        for header in headers:
            if header["tokenizer_hash"] != mine:
                raise ValueError(f"{folder} was made with the tokenizer {header['tokenizer']} (hash"
                                 f" {header['tokenizer_hash']}), this run has {encoding.name} (hash {mine}): name the"
                                 f" first as --tokenizer, or make shards with the second.")
            if header["before"] != before:
                raise ValueError(f"{_shard_name(header)} in {folder} belongs to another set than the shards before it:"
                                 f" make them anew.")
            before = header["sha256"]
        parts = [_map(Path(folder, _shard_name(header)), header) for header in headers]
        splits[split] = Tokens(parts, encoding.n_vocab, f"{sum(map(len, parts))} tokens with hash {before[:12]}")
    return Splits(**splits)


def _map(path, header):
    dtype = getattr(torch, header["dtype"])
    skipped = HEADER_BYTES // dtype.itemsize
    return torch.from_file(str(path), shared=False, size=skipped + header["tokens"], dtype=dtype)[skipped:]


# ---- streams from the Hub ----


class HubRows:
    """The rows of a dataset that is streamed: "hf:NAME[:CONFIG[:SPLIT[:COLUMN]]]", NAME on the Hub or a local folder.

    Rows without text count as rows and give nothing. ValueError: no such dataset, config, split or column of text.
    OSError: the Hub cannot be reached, or a file cannot be read.
    """

    def __init__(self, spec, seed):
        defaults, parts = (None, None, "train", "text"), spec.split(":")[1:]
        if not parts[0] or len(parts) > len(defaults):
            raise ValueError(f"{spec!r} names no dataset: write hf:NAME[:CONFIG[:SPLIT[:COLUMN]]].")
        name, config, split, self.column = (part or default for part, default in zip_longest(parts, defaults))
        self.spec, self.seed = spec, seed
        self.rows = _open_dataset(spec, os.path.expanduser(name), config, split).with_format("arrow")
        self.files = self.rows.num_shards
        self.name = f"{name}, config {config}, split {split}, column {self.column}, {self.files} files"

    def blocks(self, epoch=0, file=0, block=0, row=0):
        """From a place to the end of its epoch, block by block: (the place behind it, texts to train on in the order of
        this epoch, texts kept for validation). Of a place, `block` counts within the file, `row` within the epoch."""
        for file in range(file, self.files):
            for table in islice(self._tables(file), block, None):
                texts = self._texts(table)
                order = _permutation(len(texts), self.seed, "rows", epoch, row).tolist()
                kept = range(-row % HELD_OUT_EVERY, min(len(texts), HELD_OUT_ROWS - row), HELD_OUT_EVERY)
                train, val = [i for i in order if texts[i] and i not in kept], [i for i in kept if texts[i]]
                row, block = row + len(texts), block + 1
                place = {"epoch": epoch, "file": file, "block": block, "row": row}
                yield place, [texts[i] for i in train], [texts[i] for i in val]
            block = 0

    def _tables(self, file):
        try:
            yield from self.rows.shard(self.files, file).iter(batch_size=BLOCK)
        except Exception as error:  # of the network, file systems, decompressors and parsers: there is no list of them
            raise OSError(f"{self.spec} broke off in file {file + 1} of {self.files} ({type(error).__name__}:"
                          f" {_line(error)}). If it was the network, begin again; train.py goes on with --resume=auto."
                          ) from error

    def _texts(self, table):
        kinds = {field.name: str(field.type) for field in table.schema}
        if kinds.get(self.column) not in ("string", "large_string"):
            found = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
            raise ValueError(f"{self.spec} has no column of text {self.column!r}, but {found}: write"
                             f" hf:NAME:CONFIG:SPLIT:COLUMN.")
        return table[self.column].to_pylist()

    def held_out(self, encoding, enough=math.inf):
        """The tokens kept for validation: whole documents, until they make `enough` tokens, or all. 1-D int32."""
        documents, count = [torch.empty(0, dtype=torch.int32)], 0
        for place, _, texts in self.blocks():
            for text in texts if count < enough else ():
                documents.append(encode(text, encoding))
                count += len(documents[-1])
            if count >= enough or place["row"] >= HELD_OUT_ROWS:
                break
        _say(f"{self.spec}: {self.files} files; {len(documents) - 1} documents, {count} tokens read for validation")
        return torch.cat(documents)


def _open_dataset(spec, name, config, split):
    """A `datasets.IterableDataset`. The Hub is asked once, briefly, where `datasets` would try for half a minute."""
    import datasets  # slow, and for streams alone
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    datasets.disable_progress_bars()
    if os.path.isfile(name):
        raise ValueError(f"{name} is a file: name its folder, hf:{os.path.dirname(name) or '.'}.")
    try:
        if not os.path.isdir(name):
            huggingface_hub.HfApi().dataset_info(name, timeout=10)
    except (RepositoryNotFoundError, HFValidationError):
        raise ValueError(f"There is no dataset {name!r}, neither as a folder nor on the Hub; or it is private or gated:"
                         f" then `hf auth login`.") from None
    except Exception as error:  # of the client's own kinds, not all of them OSErrors
        raise OSError(f"There is no folder {name!r}, and the Hub cannot be reached ({type(error).__name__}:"
                      f" {_line(error)}). Offline, use a local copy, hf:FOLDER, or token shards made before.") from None
    try:
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # it lists the configs or splits there are
        raise ValueError(f"Cannot open {spec}: {_line(error)}") from None


class Lane:
    """One lane of a stream: documents that wait to be used up, end to end, and where the next sequence begins."""

    def __init__(self, document=0, start=0):
        self.document, self.start = document, start  # the next sequence begins with token `start` of this document
        self.size = -start  # tokens that wait
        self.waiting = deque()  # (document, its ids from the first on)

    def add(self, document, ids):
        resumes = not self.waiting and (self.document, self.start) > (0, 0)
        if resumes and (document != self.document or len(ids) <= self.start):
            raise ValueError("Cannot resume the data: its rows are not those of the checkpoint. Start a new run.")
        self.waiting.append((document, ids))
        self.size += len(ids)

    def take(self, seq_len):
        """The next seq_len tokens and the one behind them, which the next sequence begins with: int64."""
        row, left = [], seq_len
        while left:
            row.append(self.waiting[0][1][self.start : self.start + left])
            left, self.start = left - len(row[-1]), self.start + len(row[-1])
            if self.start == len(self.waiting[0][1]):
                self.waiting.popleft()
                self.start = 0
        self.document, ids = self.waiting[0]
        self.size -= seq_len
        return torch.cat([*row, ids[self.start : self.start + 1]]).long()


class Stream:
    """What Batches is, for rows that are read while training goes on (HubRows). The first `next` starts the reading.

    ValueError: the ranks cannot share the lanes evenly. `next` may raise what HubRows raises.
    """

    def __init__(self, rows, encoding, seq_len, batch_size, rank=0, world_size=1):
        if LANES % world_size:
            raise ValueError(f"{world_size} ranks cannot share the {LANES} lanes of a stream evenly: use a number of"
                             f" ranks that divides {LANES}, or make token shards first.")
        self.rows, self.encoding, self.seq_len, self.batch_size = rows, encoding, seq_len, batch_size
        self.rank, self.world_size = rank, world_size
        named = f"{rows.name}, tokenizer with hash {tokenizer_hash(encoding)}"
        self.identity = {"seq_len": seq_len, "seed": rows.seed, "data": named}  # must not change
        start = {"place": {"epoch": 0, "file": 0, "block": 0, "row": 0}, "document": 0, "loads": [0] * LANES}
        self._go_to(0, {lane: (0, 0) for lane in range(LANES)}, start)

    def _go_to(self, drawn, cursors, bookmark):
        self.drawn, self.blocks, self.bookmarks = drawn, None, deque([bookmark])
        mine = range((drawn + self.rank) % self.world_size, LANES, self.world_size)
        self.lanes = {lane: Lane(*cursors[lane]) for lane in mine}

    def next(self):
        """This rank's (tokens_BS, targets_BS), int64 on the CPU; targets are the tokens one place on."""
        first, end = self.drawn + self.rank, self.drawn + self.world_size * self.batch_size
        lanes = [self.lanes[place % LANES] for place in range(first, end, self.world_size)]
        for lane, times in Counter(lanes).items():
            while lane.size <= times * self.seq_len:
                self._read_block()
        self.drawn = end
        return _batch([lane.take(self.seq_len) for lane in lanes], self.seq_len)

    def _read_block(self):
        if self.blocks is None:
            self.blocks = _ahead(self._deal(self.bookmarks[0], {lane: at.document for lane, at in self.lanes.items()}))
        bookmark, documents = next(self.blocks)
        for lane, document, ids in documents:
            self.lanes[lane].add(document, ids)
        self.bookmarks += [bookmark] if bookmark else []
        self._bookmark()

    def _deal(self, bookmark, wanted):
        """Endless: (None, or behind a block the bookmark there; [(lane, document, ids)] of documents for this rank).

        wanted: {lane: its first document that is not used up}; earlier and others' documents are not tokenised.
        """
        place, document, loads = bookmark["place"], bookmark["document"], bookmark["loads"]
        while True:
            before, whole_epoch = document, place["row"] == 0
            for place, texts, _ in self.rows.blocks(**place):
                mine, size, least = [], 0, min(loads)
                loads = [load - least for load in loads]
                for text in texts:
                    lane = loads.index(min(loads))
                    loads[lane] += len(text.encode()) + 1
                    if document >= wanted.get(lane, math.inf):
                        mine.append((lane, document, encode(text, self.encoding)))
                        size += len(mine[-1][2])
                    document += 1
                    if size >= PORTION:
                        yield None, mine
                        mine, size = [], 0
                yield {"place": place, "document": document, "loads": loads}, mine
            if whole_epoch and document == before:
                raise ValueError(f"There is no text to train on in {self.rows.spec}.")
            place = {"epoch": place["epoch"] + 1, "file": 0, "block": 0, "row": 0}

    def _bookmark(self):
        """The latest bookmark before all cursors; those before it are forgotten."""
        earliest = min(lane.document for lane in self.lanes.values())
        while len(self.bookmarks) > 1 and self.bookmarks[1]["document"] <= earliest:
            self.bookmarks.popleft()
        return self.bookmarks[0]

    def state_dict(self):
        """This rank's part of the state, for `merge_states`; it speaks of the batches handed out so far. JSON-able."""
        lanes = {str(lane): [at.document, at.start] for lane, at in self.lanes.items()}
        return {"drawn": self.drawn, "lanes": lanes, "bookmark": self._bookmark(), **self.identity}

    def load_state_dict(self, state):
        """Goes on where the merged `state` was taken, on any number of ranks. ValueError: other seq_len, seed, data."""
        _check_identity(self.identity, state)
        try:
            drawn, bookmark = state["drawn"], state["bookmark"]
            cursors = {int(lane): tuple(cursor) for lane, cursor in state["lanes"].items()}
            whole = len(bookmark["loads"]) == len(cursors) == LANES
            whole &= min(cursors.values()) >= (bookmark["document"], 0)
            self._go_to(drawn, cursors, bookmark)
        except (KeyError, TypeError, ValueError, AttributeError):
            whole = False
        if not whole:
            raise ValueError("Cannot resume the data: the checkpoint's state is damaged, or not of all ranks.")


def _ahead(items):
    """Yields what an endless iterator yields, made one item ahead by a thread; an error there is raised here."""
    made = SimpleQueue()

    def make():
        try:
            made.put((next(items), None))
        except BaseException as error:
            made.put((None, error))

    def start():
        threading.Thread(target=make, name="reader", daemon=True).start()

    start()
    while True:
        item, error = made.get()
        if error is not None:
            raise error
        start()
        yield item


@atexit.register
def _wait_for_readers():
    """A thread that the exit cuts off inside a C++ library aborts the process; but no exit waits for a dead network."""
    for thread in threading.enumerate():
        if thread.name == "reader" and thread.is_alive():
            thread.join(3)


def merge_states(states):
    """One state for any number of ranks, from the `state_dict` of every rank."""
    merged = dict(states[0])
    if "lanes" in merged:
        merged["lanes"] = {lane: at for state in states for lane, at in state["lanes"].items()}
        merged["bookmark"] = min((state["bookmark"] for state in states), key=lambda bookmark: bookmark["document"])
    return merged


# ---- all sources ----


def open_data(spec, encoding, seed, seq_len, batch_size, eval_sequences, rank=0, world_size=1):
    """(training batches, list of validation batches) of one rank, from any source that the top of this file names.

    The first has next(), state_dict(), load_state_dict(state) and `identity`, what must not change on resume.
    """
    ranks = {"rank": rank, "world_size": world_size}
    if spec.startswith("hf:"):
        rows = HubRows(spec, seed)
        batches = Stream(rows, encoding, seq_len, batch_size, **ranks)
        val = Tokens([rows.held_out(encoding, eval_sequences * seq_len + 1)], encoding.n_vocab)
    else:
        folder = os.path.expanduser(spec)
        streams = open_shards(folder, encoding) if _holds_shards(folder) else load(spec, encoding, seed)
        train, val = (s if isinstance(s, Tokens) else Tokens([s], encoding.n_vocab) for s in streams)
        batches = Batches(train, seq_len, batch_size, seed, **ranks)
    return batches, validation_batches(val, seq_len, batch_size, eval_sequences, **ranks)


# ---- command line ----


def main(words):
    """Makes token shards as the flags say; see --help."""
    def fail(message):
        raise ValueError(f"{message}; see --help")

    about, layout = __doc__.partition("\n\nHow a document")[0], argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("data.py", description=about, formatter_class=layout, allow_abbrev=False)
    parser.error = fail
    parser.add_argument("--data", metavar="SPEC", required=True, help="what to tokenise")
    parser.add_argument("--tokenizer", metavar="NAME", default="bytes", help="as in train.py [bytes]")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="a new folder for the shards")
    parser.add_argument("--seed", type=int, default=0, help="of split and order; train with the same one [0]")
    parser.add_argument("--max_tokens", type=int, default=0, help="cuts the training text; 0 takes all of it [0]")
    args = parser.parse_args(words)
    if args.max_tokens < 0:
        fail(f"--max_tokens={args.max_tokens} is negative")
    make_shards(args.data, tokenizer(args.tokenizer), args.out, args.seed, args.max_tokens)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError, ImportError) as error:
        print("data.py:", _line(error), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("data.py: stopped; over a Hub dataset the same command goes on behind its last whole shard",
              file=sys.stderr)
        sys.exit(130)
