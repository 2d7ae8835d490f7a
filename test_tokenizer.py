"""Tests of --tokenizer=hf:DIR: a byte-level BPE tokenizer.json gives the ids that the tokenizers library gives."""

import copy
import itertools
import json
import pickle
import random
import socket
import sys
import threading

import pytest
import regex

tokenizers = pytest.importorskip("tokenizers", reason="compares with the tokenizers library, which transformers brings")
from tokenizers import models, pre_tokenizers, trainers

import data

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# the letters of DeepSeek V2's second cut, as its checkpoint spells them; the ends that NFC would change are escaped
V2_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7d"
    "ᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ"
    "ﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
V2 = [
    "[\r\n]",
    rf"\s?[{V2_LETTERS}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    "[一-龥\u0800-一가-\ud7ff]+",
]
V3 = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"""
    "\r\n"
    r"""\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+["""
    "\r\n"
    r"""]*|\s*["""
    "\r\n"
    r"""]+|\s+(?!\S)|\s+""",
]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern, **changes):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, **changes}


def byte_level(**changes):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False, **changes}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


DIGITS = {"type": "Digits", "individual_digits": True}
CUTS = {
    "V2": sequence(*map(split, V2), DIGITS, byte_level()),
    "V3": sequence(*map(split, V3), byte_level()),
    "GPT-2": byte_level(use_regex=True),
    "Llama 3": sequence(split(LLAMA3), byte_level()),
    "more": sequence(
        sequence({**DIGITS, "individual_digits": False}),
        {**split("x"), "pattern": {"String": "(a."}, "invert": True},
        split(r"(?=[A-Z])|^b|(?<!c)d+?e|$"),
        byte_level(use_regex=True),
    ),
    "none": byte_level(),
}
TEXTS = [
    "",
    " ",
    "\n",
    "Hello world's end, don't I'LL  we've 12345 ½³ x86_64 it\u2019s THE\u017f '\u017f",
    "def f(x):\n    return x[0] ** 2  # 3.14159\n\n\n\tif a != b:\r\n\t\tpass   \r\n   \n ",
    "Straße über öl ÿ Ångström naïve A\u030a e\u0301\u0302 \u0301x ﬁ ŉ ǆ Ὗώ ΐ ί ι Ω K",
    "中文字符，标点。「引号」日本語のテキスト・カタカナー 한국어 문장。　全角　ＡＢＣ１２３！",
    "العربية ١٢٣ हिन्दी १२३ ไทย ๑๒๓ עברית Ελληνικά Кириллица tiếng Việt ქართული ᎣᏏᏲ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 ❤️ ☃ a👍b  👍",
    "\x00\x01\x1c\x1f\x7f\x85\xa0\xad\u2028\u2029\u200b\u200d\ufeff\ufffd\ufffe\uffff\ue000\U0010ffff\U000f0000 a\x00b",
    "　　a　 b 　!　!a !　a\u3000\n　\t\u2003x\u2003“Hello” ‘a’ \u2003ế tiếng 　５　6",
    "a" * 1000 + " " * 1000 + "\n" * 300 + "ab" * 1000 + "1" * 300 + "中" * 500 + "!" * 400,
    f"{EOS}{BOS}<|endoftext|></s><think>ü</think><｜User｜> <|keep|>",
    "\u0378\U0001ffff \u0378a \u0378 a\u0378\u0378b",
]


def make(path, cuts, size=700, missing=(), shuffle=False, **settings):
    """Trains a byte-level BPE of `size` tokens on TEXTS, laid out like a checkpoint of DeepSeek in a folder, and gives
    (folder, spec). The first ids are special tokens, the last added ones; `missing` bytes have no letter but are among
    these, as in V2."""
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(missing))
    shell = tokenizers.Tokenizer(models.BPE()).to_str()
    trained = tokenizers.Tokenizer.from_str(json.dumps({**json.loads(shell), "pre_tokenizer": cuts}))
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=[BOS, EOS, PAD])
    trained.train_from_iterator([*TEXTS[:11], *TEXTS[12:], "a" * 20 + " " * 40] * 2, trainer)
    spec = json.loads(trained.to_str())
    spec["model"] |= settings
    if shuffle:  # ids that follow no order
        vocab, ids = spec["model"]["vocab"], list(spec["model"]["vocab"].values())
        random.Random(3).shuffle(ids)
        spec["model"]["vocab"] = dict(zip(vocab, ids, strict=True))
        for token in spec["added_tokens"]:
            token["id"] = spec["model"]["vocab"][token["content"]]
    for token in [*missing, "<think>", "<｜User｜>"]:
        add(spec, token)
    path.mkdir(exist_ok=True)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"__type": "AddedToken", "content": EOS}}))
    return save(path, spec), spec


def add(spec, token, **changes):
    """An added token, with the id that tokenizers gives it; returns that."""
    number = max(len(spec["model"]["vocab"]), 1 + max((t["id"] for t in spec["added_tokens"]), default=0))
    number = spec["model"]["vocab"].get(token, number)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    spec["added_tokens"].append({"id": number, "content": token, **flags, **changes})
    return number


def save(path, spec):
    (path / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
    return str(path)


def theirs(folder):
    """text -> ids of tokenizers, with special tokens in the text taken as text."""
    tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.encode_special_tokens = True
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def assert_same(folder, texts):
    ours, reference = data.HubEncoding(folder), theirs(folder)
    for text in texts:
        for _ in range(2):  # the second time from what was remembered
            ids = ours.encode_ordinary(text)
            assert ids == reference(text), ascii(text)
        assert ours.decode(ids) == text
        assert ours.eot_token not in ids


@pytest.fixture(scope="module")
def characters():
    """All characters but those so new that only one of the two regex engines knows them, and less of the planes where
    there are none."""
    ranges = range(0xD800), range(0xE000, 0x40000), range(0xE0000, 0xE1000), range(0x10FF00, 0x110000)
    every = "".join(map(chr, itertools.chain(*ranges)))
    unknown = set(every).difference(*known_to_tokenizers(r"[^\p{Cn}]+", every))
    return [c for c in every if c not in unknown or regex.fullmatch(r"\p{Cn}", c)]


def known_to_tokenizers(pattern, text):
    cut = pre_tokenizers.Split(tokenizers.Regex(pattern), "removed", invert=True)
    return (piece for piece, _ in cut.pre_tokenize_str(text))


def nasty(characters, count, seed):
    """Random strings: all characters, the first 12,544, those that cuts look for, and pieces of TEXTS."""
    rng, words = random.Random(seed), " ".join(TEXTS[3:]).split(" ")
    few = " \u3000\n\r\t'“!ab1中ế\u2003\u0301"
    kinds = [lambda: rng.choice(few), lambda: rng.choice(few), lambda: rng.choice(characters[:0x3100])]
    kinds += [lambda: rng.choice(characters), lambda: rng.choice(words)[:30]]
    for _ in range(count):
        yield "".join(rng.choice(kinds)() for _ in range(rng.randrange(40)))


@pytest.mark.parametrize("name", CUTS)
def test_ids_are_those_of_tokenizers(tmp_path, characters, name):
    folder, _ = make(tmp_path, CUTS[name], missing="õö÷øùúûüýþÿÀÁ" if name == "V2" else "", shuffle=name == "Llama 3")
    assert_same(folder, TEXTS)
    assert_same(folder, nasty(characters, 1000, seed=name))


def test_split_classes_agree(characters):
    """Over all code points, as far as both engines know them: letters, numbers, punctuation, symbols, marks, space."""
    text = "".join(characters)
    for pattern in (r"\p{L}", r"\p{N}", r"\p{P}", r"\p{S}", r"\p{M}", r"\s", r"\d", r"\p{Lu}", r"(?i:[sdmtrevl])", "."):
        assert [*known_to_tokenizers(f"{pattern}+", text)] == regex.findall(f"{pattern}+", text), pattern
    apart = pre_tokenizers.Digits(individual_digits=False).pre_tokenize_str(text)
    assert [piece for piece, _ in apart] == [piece for piece in regex.split(r"(\p{N}+)", text) if piece]


def test_every_character_alone_and_behind_a_space(tmp_path, characters):
    folder, _ = make(tmp_path, CUTS["V3"])
    assert_same(folder, [" ".join(characters[i : i + 500]) for i in range(0, len(characters), 50_000)])
    assert_same(folder, ["a'".join(characters[i : i + 500]) for i in range(0, 0x3000, 500)])


@pytest.mark.parametrize("merges", ["pairs", "strings"])
def test_merges_count_and_not_what_tokens_spell(tmp_path, merges):
    # "abc" and "xyz" are tokens that no pair of the merges makes where "ab" and "xy" come first; "never" is in no merge
    pairs = [["a", "b"], ["b", "c"], ["a", "bc"], ["x", "y"], ["x", "yz"], ["y", "z"], ["bc", "d"], ["ab", "ab"]]
    folder, spec = make(tmp_path, CUTS["none"], size=259)
    vocab, spec["added_tokens"] = spec["model"]["vocab"], spec["added_tokens"][:3]
    for i, token in enumerate(["never", *map("".join, pairs)]):
        vocab[token] = 900 - i  # falls while the rank rises
    spec["model"]["merges"] = pairs if merges == "pairs" else [" ".join(pair) for pair in pairs]
    alphabet = "abcdxyz"
    rng = random.Random(0)
    texts = ["".join(rng.choice(alphabet) for _ in range(rng.randrange(12))) for _ in range(2000)] + ["never"]
    with pytest.raises(ValueError, match="its merge of 'x' and 'yz' stands before the merges that make them"):
        data.HubEncoding(save(tmp_path, spec))
    del spec["model"]["merges"][4]
    assert_same(save(tmp_path, spec), texts)
    ours = data.HubEncoding(folder)
    assert ours.encode_ordinary("abc") == [vocab["ab"], vocab["c"]]
    assert (ours.decode_single_token_bytes(vocab["abc"]), ours.n_vocab) == (b"abc", 901)


def test_all_merges_of_a_token_and_whole_words(tmp_path):
    """Llama 3: each way to make a token is a merge, in the order of the tokens; whole words skip the merges."""
    _, spec = make(tmp_path, CUTS["Llama 3"])
    vocab = spec["model"]["vocab"]
    made = ["".join(pair) for pair in spec["model"]["merges"]]
    ways = [[(t[:i], t[i:]) for i in range(1, len(t)) if t[:i] in vocab and t[i:] in vocab] for t in made]
    spec["model"]["merges"] = [pair for way in ways for pair in sorted(way, key=lambda w: (vocab[w[0]], vocab[w[1]]))]
    assert len(spec["model"]["merges"]) > len(made)
    hello = len(vocab)
    vocab |= {"Hullo": hello, "Ġworldly": hello + 1}  # made by no merge
    spec["added_tokens"] = spec["added_tokens"][:3]
    for whole in (False, True):
        spec["model"]["ignore_merges"] = whole
        folder = save(tmp_path, spec)
        assert_same(folder, TEXTS + ["Hullo worldly", "aHullo worldly1", "Hullo", "Hulloo"])
        assert (hello in data.HubEncoding(folder).encode_ordinary("Hullo")) == whole


def test_settings_that_change_nothing_with_a_whole_alphabet(tmp_path):
    settings = {"unk_token": BOS, "fuse_unk": True, "byte_fallback": True, "dropout": 0.0, "end_of_word_suffix": ""}
    folder, _ = make(tmp_path, CUTS["V3"], **settings)
    assert_same(folder, TEXTS)


def test_added_tokens(tmp_path):
    folder, spec = make(tmp_path, CUTS["V3"])
    think = spec["added_tokens"][-2]["id"]
    for token in ("<|keep|>", "<|keep|>>", "<a>b", "ab"):
        add(spec, token)
    add(spec, "keep", normalized=False)
    for token in ("x<a>", "ab<c>"):
        add(spec, token, special=True)
    last = add(spec, "qq", special=True, single_word=True)
    texts = ["<|keep|>", "a<|keep|>>b", "keep<|keep|>", "x<a>b", "<a>b", "ab<c>ab", "zab", "ab<ab", "x<ab<a>b", "qqqq"]
    assert_same(save(tmp_path, spec), [*texts, *TEXTS])
    ours = data.HubEncoding(folder)
    assert ours.encode_ordinary("<think>") == [think]
    assert not {0, 1, 2} & {*ours.encode_ordinary(BOS + EOS + PAD)}
    assert (ours.eot_token, ours.n_vocab, ours.decode([think, 1])) == (1, last + 1, f"<think>{EOS}")
    spec["added_tokens"][1]["special"] = False
    ours = data.HubEncoding(save(tmp_path, spec))
    assert ours.eot_token not in ours.encode_ordinary(f"a{EOS}b")  # even where it is not marked special


@pytest.mark.parametrize("missing", ["", "ÿü"])
def test_every_id_decodes(tmp_path, missing):
    folder, spec = make(tmp_path, CUTS["V2"], missing=missing)
    ours, last = data.HubEncoding(folder), spec["added_tokens"][-1]["id"]
    spelled = {i: token for token, i in ours._mergeable_ranks.items()}
    spelled |= {i: token.encode() for token, i in ours._special_tokens.items()}
    assert sorted(spelled) == list(range(ours.n_vocab)) == list(range(last + 1))
    assert all(ours.decode_single_token_bytes(i) == token for i, token in spelled.items())
    assert all(bytes([i]) in spelled.values() for i in range(256) if chr(i) not in missing)
    assert ours.decode(ours.encode_ordinary("ü")) == "ü"
    for absent in (last + 1, 10**6):
        with pytest.raises(KeyError):
            ours.decode_single_token_bytes(absent)


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"tokenizer_config.json": {"eos_token": PAD}, "config.json": {"eos_token_id": 1}}, 2),
        ({"tokenizer_config.json": {"eos_token": {"content": BOS}}}, 0),
        ({"tokenizer_config.json": {"eos_token": None}, "config.json": {"eos_token_id": 2}}, 2),
        ({"config.json": {"eos_token_id": [0, 1]}}, 0),
        ({"config.json": {"eos_token_id": 12345}}, 1),
        ({}, 1),
        ({"tokenizer_config.json": {"eos_token": "<eos>"}}, "name an added token as eos_token, not '<eos>'"),
        ({"tokenizer_config.json": []}, "tokenizer_config.json holds no JSON object"),
    ],
)
def test_end_of_text(tmp_path, files, end):
    folder, _ = make(tmp_path, CUTS["GPT-2"])
    (tmp_path / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    if isinstance(end, int):
        assert data.HubEncoding(folder).eot_token == end
    else:
        with pytest.raises(ValueError, match=end):
            data.HubEncoding(folder)


def change(**changes):
    return lambda spec: spec.update(changes)


def model(**changes):
    return lambda spec: spec["model"].update(changes)


def rename(token):
    return lambda spec: spec["model"]["vocab"].update(other=spec["model"]["vocab"].pop(token))


def cuts(*steps):
    return change(pre_tokenizer=sequence(*steps))


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (model(type="Unigram"), "its model is Unigram, not BPE"),
        (model(dropout=0.1), "its dropout is 0.1, which is not supported"),
        (model(continuing_subword_prefix="##"), "its continuing_subword_prefix is '##'"),
        (model(end_of_word_suffix="</w>"), "its end_of_word_suffix is '</w>'"),
        (change(normalizer={"type": "NFC"}), "its normalizer NFC is not supported"),
        (change(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]}), "its normalizer Sequence is not"),
        (change(pre_tokenizer=None), "its pre_tokenizer None is not supported"),
        (change(pre_tokenizer={"type": "Metaspace"}), "its pre_tokenizer Metaspace is not supported"),
        (cuts({"type": "Punctuation", "behavior": "Contiguous"}, byte_level()), r"Punctuation \(behavior Contiguous\)"),
        (cuts(split("a", behavior="Removed"), byte_level()), r"its pre_tokenizer Split \(behavior Removed\)"),
        (cuts(byte_level(add_prefix_space=True)), r"ByteLevel \(add_prefix_space True\) is not supported"),
        (cuts(byte_level(), DIGITS), "its pre_tokenizer ByteLevel"),
        (cuts(DIGITS), "its pre_tokenizer does not end in ByteLevel"),
        (cuts(split(r"\w+"), byte_level()), r"has '\\\\w' in the pattern '\\\\w\+', which is not supported"),
        (cuts(split(r"[a[b]]"), byte_level()), r"has '\[' in the pattern"),
        (cuts(split(r"[a&&b]"), byte_level()), r"has '\[' in the pattern"),
        (cuts(split(r"a{1,2}+"), byte_level()), r"has '}\+' in the pattern"),
        (cuts(split(r"(a)b"), byte_level()), r"has '\(' in the pattern"),
        (cuts(split(r"a)"), byte_level()), r"has a faulty pattern 'a\)'"),
        (rename("a"), "it has no token for 1 of the bytes that text is made of"),
        (lambda s: s["model"]["vocab"].update(a=7, b=7), "ids of its tokens are not whole numbers, each used once"),
        (lambda s: s["model"]["vocab"].update(a="7"), "ids of its tokens are not whole numbers, each used once"),
        (lambda s: add(s, "xx", lstrip=True), "added token 'xx' has single_word, lstrip or"),
        (lambda s: s["model"].pop("merges"), "tokenizer.json is damaged: KeyError 'merges'. Fetch it anew."),
        (rename("ld"), "tokenizer.json is damaged: KeyError 'ld'. Fetch it anew."),
        (lambda s: s["added_tokens"][-1].update(id=999), "added token '<｜User｜>' has id 999, but comes to "),
        (model(vocab=[]), "tokenizer.json is damaged: "),
        (change(model=None), "tokenizer.json is damaged: "),
        (change(added_tokens=[]), "no token ends a text"),
    ],
)
def test_refused_in_one_line(tmp_path, shared_spec, spoil, line):
    spec = copy.deepcopy(shared_spec)
    spoil(spec)
    with pytest.raises(ValueError, match=line) as caught:
        data.HubEncoding(save(tmp_path, spec))
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.fixture(scope="module")
def shared_spec(tmp_path_factory):
    return make(tmp_path_factory.mktemp("spec"), CUTS["GPT-2"])[1]


def test_no_file(tmp_path, shared_spec):
    with pytest.raises(FileNotFoundError, match="There is no folder .*/none: --tokenizer=hf:DIR takes a folder"):
        data.HubEncoding(str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="There is no file .*tokenizer.json: --tokenizer=hf:DIR takes a folder"):
        data.HubEncoding(str(tmp_path))
    whole = json.dumps(shared_spec).encode()
    for content in (b"", whole[:-9], whole[:5000], b"\xff\xfe", b"text"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ValueError, match="tokenizer.json is not JSON, or is cut off.$"):
            data.HubEncoding(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match="tokenizer.json holds no JSON object.$"):
        data.HubEncoding(str(tmp_path))


def test_needs_no_request_and_no_other_package(tmp_path, shared_spec, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network in this test")

    for owner, name in ((socket, "getaddrinfo"), (socket, "create_connection"), (socket.socket, "connect")):
        monkeypatch.setattr(owner, name, refuse)
    for package in ("tokenizers", "transformers", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    ours = data.HubEncoding(save(tmp_path, shared_spec))
    assert ours.decode(ours.encode_ordinary(TEXTS[4])) == TEXTS[4]


def test_lone_surrogates_copies_and_threads(tmp_path):
    folder, _ = make(tmp_path, CUTS["V3"])
    ours = data.HubEncoding(folder)
    assert ours.encode_ordinary("a\ud800 \ud83d\ude00b") == ours.encode_ordinary("a\ufffd 😀b")
    for twin in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert (twin._pat_str, twin._mergeable_ranks) == (ours._pat_str, ours._mergeable_ranks)
        assert twin.encode_ordinary(TEXTS[5]) == ours.encode_ordinary(TEXTS[5])
    wanted, found = [data.HubEncoding(folder).encode_ordinary(text) for text in TEXTS], []
    fresh = data.HubEncoding(folder)
    work = [threading.Thread(target=lambda: found.append([*map(fresh.encode_ordinary, TEXTS)])) for _ in range(4)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert found == [wanted] * 4
    assert fresh.encode_ordinary_batch(TEXTS) == wanted
    with pytest.raises(NotImplementedError, match="use encode_ordinary"):
        ours.encode("a")


def test_long_documents(tmp_path):
    """Pieces of megabytes; and no more is remembered than the bound."""
    folder, _ = make(tmp_path, CUTS["none"])
    ours, reference = data.HubEncoding(folder), theirs(folder)
    text = TEXTS[5] * 300
    assert ours.encode_ordinary(text) == reference(text)
    text = "ab" * 2**20
    assert ours.decode(ours.encode_ordinary(text)) == text


def test_what_it_is_is_told_apart(tmp_path, shared_spec):
    """Ranks, pattern and special tokens differ wherever ids can: data.py compares tokenizers by them."""
    seen = set()
    for spoil in (
        change(),
        model(ignore_merges=True),
        cuts(DIGITS, byte_level(use_regex=True)),
        lambda s: s["model"]["merges"].pop(),
        lambda s: add(s, "new"),
        lambda s: add(s, "new", special=True),
    ):
        spec = copy.deepcopy(shared_spec)
        spoil(spec)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
        ours = data.HubEncoding(save(tmp_path, spec))
        seen.add((ours._pat_str, str(sorted(ours._mergeable_ranks.items())), str(ours._special_tokens)))
    assert len(seen) == 6
