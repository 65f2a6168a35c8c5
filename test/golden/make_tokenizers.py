#!/usr/bin/env python3
"""Makes test/golden/tokenizers/: small tokenizers trained by the `tokenizers` package, and what the package encodes with them.

    python3 test/golden/make_tokenizers.py          needs: pip install tokenizers

gpt2.json llama3.json ...  tokenizer.json files with the pre-tokenizers, normalizers and post-processors of those families
fuzz.json                  what random strings are made of, read by this script and by test/unit/test_tokenizer.cpp
golden.json                per tokenizer: a hash of the ids of every block of random strings, and explicit strings with their ids

The random strings come from the same generator (class Random, random_string) in Python and in C++.
"""
import json
import os
import random
import re
import sys
import unicodedata

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tokenizers")
BLOCK, BLOCKS = 1000, 120
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

ATOMS = """
the The THE of and in to is was that it for with as on are by this trifold dictionary word Words worldwide training
I'm don't you're we've they'll he'd it's IT'S DON'T YOU'RE WE'VE I'M 'll 'LL 'd 'D 've 's 'S '' 's' 't 'T 're 'm ' ’s ’
naïve café cafe\u0301 Zürich Straße façade e\u0301\u0323 n\u0303o o\u0308\u0304 A\u030a \u212b \u1e9b\u0323 \u0344 ſ 'ſ ﬁ ǆ İ ı
привет мир Привет ёлка е\u0308 и\u0306 Ελληνικά Ω \u2126 שָׁלוֹם العربية لَا हिन्दी क\u093c ড\u09bc தமிழ் ภาษาไทย 한국어 \u1112\u1161\u11ab \u1100\u1161 한\u11a8
中文 汉字 漢字 日本語 カタカナ か\u3099 が ﾊﾟ 。 、 「」 全角 ＡＢＣ １２３ 𠮷 𪚥 豈 \uf900 \ufa10
😀 👍🏽 👨\u200d👩\u200d👧 🇩🇪 ❤\ufe0f ☃ ♥ ✓ → ∑ ½ ² Ⅷ ① ٣ ४ 𝟘 𝔸
0 1 7 42 123 1234 12345 1234567890 3.14 1,000 0x1F 1e-5 a1b2 ١٢٣
! ? . , ; : ... --- == != -> // /* */ () [] {} <> "quoted" `code` #include @user #tag $5 100% a_b a-b foo.bar() C++ &amp; \\n ~~ ^_^
<|endoftext|> <|im_start|> <|im_end|> <|begin_of_text|> <|eot_id|> <|start_header_id|> <| |> <|endoftext <|a|> <|a|><|b|> <|b|> <|a|><|c|> <mask> </s>
http://example.com/a?b=c&d=e user@example.org C:\\\\path ★★★★ ———— …… aaaaaaaaaaaaaaaa aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ababababababab
\u0301 \u0327\u0301 \u200b \u200c \u200d \ufeff \u180e \u00ad \ufffd \u0000 \u0001 \u007f \u0085 \u00a0 \u1680 \u2003 \u2028 \u2029 \u202f \u205f \u3000
\u1df9\u0364 \U00010f47\u0340 e\U0001e4ec\u0301 \U00011935\U00011930 \U00031350\U000323af \U0002ebf0 \u1c89\ua7cb \U0001e4f0\U00016d70 \U000105d2\u0307
"""
# Runs of white space, put between or instead of words.
SPACES = [" ", " ", " ", " ", " ", " ", "\n", "\n", "  ", "   ", "        ", "\t", "\t\t", "\n\n", "\n\n\n", "\r\n", "\r", " \n", "\n ",
          "  \n  ", " \t ", "\r\n\r\n", " \u00a0", "\u3000", "\u2003 ", "\x0b", "\x0c", "\u0085", "\n\t\n", ""]
ADDED = [
    AddedToken("<|endoftext|>", special=True, normalized=False),
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=True),
    AddedToken("<|a|>", special=True, normalized=False),
    AddedToken("<|a|><|b|>", special=False, normalized=False),
    AddedToken("<|", special=False, normalized=True),
]


class Random:
    """splitmix64"""

    def __init__(self, seed):
        self.state = seed

    def next(self, n):
        self.state = (self.state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        return (z ^ (z >> 31)) % n


def random_string(seed, fuzz):
    r = Random(seed)
    out = []
    for _ in range(1 + r.next(12)):
        kind = r.next(8)
        if kind < 4:
            out.append(fuzz["atoms"][r.next(len(fuzz["atoms"]))])
        elif kind < 6:
            out.append(fuzz["spaces"][r.next(len(fuzz["spaces"]))])
        elif kind == 6:
            first, last = fuzz["ranges"][r.next(len(fuzz["ranges"]))]
            out.append(chr(first + r.next(last - first + 1)))
        else:
            out.append(chr(33 + r.next(94)))
    return "".join(out)


def assigned_ranges():
    """Runs of code points that have existed since Unicode 3.2, so that no library is too old for them; long runs are rarer."""
    ranges = []
    for c in range(0x80, 0x30000):
        if unicodedata.ucd_3_2_0.category(chr(c)) in ("Cn", "Cs", "Co"):
            continue
        if ranges and ranges[-1][1] == c - 1 and ranges[-1][1] - ranges[-1][0] < 4095:
            ranges[-1][1] = c
        else:
            ranges.append([c, c])
    return ranges


def hash_ids(lists):
    """FNV-1a over the numbers, every list closed by -1."""
    h = 0xCBF29CE484222325
    for ids in lists:
        for i in ids:
            h = ((h ^ i) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
        h = ((h ^ 0xFFFFFFFFFFFFFFFF) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return "%016x" % h


def training_text(fuzz):
    r = random.Random(1)
    words = [a for a in fuzz["atoms"] if not a.startswith("<")]
    return ["".join(r.choice(words) + (r.choice(fuzz["spaces"]) if r.random() < 0.3 else " ") for _ in range(30))
            for _ in range(2000)]


def train(text, pre_tokenizer, normalizer=None, ignore_merges=False):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_tokens(ADDED)
    return tokenizer


def save(tokenizer, name, change=None):
    data = json.loads(tokenizer.to_str())
    if change:
        change(data)
    path = os.path.join(HERE, name + ".json")
    with open(path, "w", encoding="utf-8") as f:
        json.dump(data, f, ensure_ascii=False, separators=(",", ":"))
        f.write("\n")
    assert os.path.getsize(path) < 60000, (name, os.path.getsize(path))
    return Tokenizer.from_file(path)


def merges_as_strings(data):
    data["model"]["merges"] = [" ".join(m) for m in data["model"]["merges"]]


def unreachable_words(data):
    """Tokens that no merge makes: only ignore_merges finds them. The added tokens move up."""
    vocab = data["model"]["vocab"]
    for word in ["worldwide", "Ġworldwide", "training", "Ġdictionary", "ĠĠĠ", "123", "aaaaaaaaaaaaaaaa"]:
        if word not in vocab:
            for token in data["added_tokens"]:
                token["id"] += 1
            vocab[word] = len(vocab)


def make_tokenizers(fuzz):
    text = training_text(fuzz)
    split = lambda pattern: pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made = {}
    made["gpt2"] = save(train(text, pre_tokenizers.ByteLevel(add_prefix_space=False)), "gpt2", merges_as_strings)
    prefix = train(text[:500], pre_tokenizers.ByteLevel(add_prefix_space=True))
    prefix.add_special_tokens([AddedToken("<mask>", lstrip=True), AddedToken("</s>", rstrip=True)])
    made["gpt2_prefix"] = save(prefix, "gpt2_prefix")
    llama = train(text, split(LLAMA3), ignore_merges=True)
    llama.add_special_tokens(["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    made["llama3"] = save(llama, "llama3", unreachable_words)
    begin = made["llama3"].token_to_id("<|begin_of_text|>")
    made["llama3"].post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|> $B:1",
                                      special_tokens=[("<|begin_of_text|>", begin)])])
    made["llama3"] = save(made["llama3"], "llama3")
    qwen = train(text, split(QWEN2), normalizers.NFC())
    qwen.add_tokens([AddedToken("cafe\u0301", normalized=True), AddedToken("o\u0308\u0304", normalized=False)])
    made["qwen2"] = save(qwen, "qwen2")
    return made


def explicit_strings(fuzz):
    words = fuzz["atoms"]
    strings = ["", " ", "\n", "a", "Hello, world!", "  two  spaces ", "a\n\n\nb", "line\r\nline", "don't DON'T", "12345 1234567"]
    strings += words + [" " + w for w in words[::3]] + [w + "\n" for w in words[1::3]]
    strings += [" ".join(words[i:i + 5]) for i in range(0, len(words), 9)]
    return strings + ["a" * 3000, "ab" * 1500, " " * 1000 + "x", "\n" * 1000, "中" * 700, "!?" * 500]


def encode(tokenizer, strings):
    return [e.ids for e in tokenizer.encode_batch(strings, add_special_tokens=False)]


def main():
    os.makedirs(HERE, exist_ok=True)
    atoms = [a for a in re.split("[ \n]+", ATOMS) if a]  # not split(): some atoms are white space themselves
    fuzz = {"atoms": atoms, "spaces": SPACES, "ranges": assigned_ranges()}
    with open(os.path.join(HERE, "fuzz.json"), "w", encoding="utf-8") as f:
        json.dump(fuzz, f, ensure_ascii=True, separators=(",", ":"))
        f.write("\n")
    strings = explicit_strings(fuzz)
    golden = {"tokenizers": tokenizers.__version__, "python": sys.version.split()[0], "block": BLOCK, "strings": strings, "cases": []}
    blocks = [[random_string(BLOCK * b + i, fuzz) for i in range(BLOCK)] for b in range(BLOCKS)]
    for name, tokenizer in make_tokenizers(fuzz).items():
        for special in ("match", "plain"):
            tokenizer.encode_special_tokens = special == "plain"
            used = blocks if special == "match" else blocks[:BLOCKS // 6]
            golden["cases"].append({"tokenizer": name, "special": special, "hashes": [hash_ids(encode(tokenizer, b)) for b in used],
                                    "ids": encode(tokenizer, strings) if special == "match" else []})
    with open(os.path.join(HERE, "golden.json"), "w", encoding="utf-8") as f:
        json.dump(golden, f, ensure_ascii=True, separators=(",", ":"))
        f.write("\n")
    for name in sorted(os.listdir(HERE)):
        print("%7d %s" % (os.path.getsize(os.path.join(HERE, name)), name))


if __name__ == "__main__":
    main()
