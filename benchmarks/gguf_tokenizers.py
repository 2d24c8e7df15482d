"""Tokenizers of GGUF files, beside llama.cpp, transformers and the tokenizers they come from.

    python -m benchmarks.gguf_tokenizers NAME=SOURCE... --peer PYTHON --transformers PYTHON
        [--texts 2400] [--json benchmarks/results/gguf_tokenizers.json]

A source is a .gguf file, a folder with a tokenizer.json, a SentencePiece .model file or a
tekken.json of Mistral's (`pip install sentencepiece tiktoken`). Of all but the first, a GGUF file
is made: of a folder by our converter, else with the keys of llama.cpp's. The tokenizer that we
rebuild from the file is held to three others, text by text:

  llama.cpp     reading the same metadata, in a file with a small model;
  transformers  reading the folder that `convert` writes from that file;
  the original  tokenizer.json, .model or tekken.json, if the source is one.

PYTHON are interpreters with `xllamacpp` and with `transformers`; each may be left out. Where
llama.cpp lacks the normalisation of the published tokenizer (NFC), texts that it changes are
counted as `normalised`, and llama.cpp is given the normalised text. A folder whose NAME begins
with gemma4 becomes a file of that kind. Of texts that differ from another, `as_original` counts
those where the original gives our ids.
"""

import argparse
import base64
import collections
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from benchmarks.environment import write_result
from benchmarks.llama_cpp.worker import Worker, prebuilt_command
from dflash_jax.config import is_gguf
from dflash_jax.converters.convert import convert
from dflash_jax.converters.export import Weights, export
from dflash_jax.converters.formats.gguf.file import STRING, open_gguf
from dflash_jax.converters.formats.gguf.writer import BOOL, F32, I32, U32, Typed
from dflash_jax.converters.forms import GGUF
from dflash_jax.converters.gguf.tokenizer import tokenizer_files
from dflash_jax.converters.gguf.tokenizer_export import tokenizer_metadata
from dflash_jax.converters.models import companions, open_model
from dflash_jax.converters.tree_source import TreeSource
from dflash_jax.errors import TokenizerError
from dflash_jax.networks import build_pair
from dflash_jax.testing import random_params, tiny_target

# A worker with transformers, run with the Python that has them.
WITH_TRANSFORMERS = """
import json, os, pathlib, sys
os.environ["HF_HUB_OFFLINE"] = "1"
import transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
print(json.dumps({"version": f"transformers {transformers.__version__}"}), flush=True)
for line in sys.stdin:
    path = pathlib.Path(line.split()[1])
    texts = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps([tokenizer(text).input_ids for text in texts]), encoding="utf-8")
    print(json.dumps({"texts": len(texts)}), flush=True)
"""
LLAMA = "llama.cpp"
TRANSFORMERS = "transformers"
ORIGINAL = "original"
# Values of `tokenizer.ggml.model`.
BYTE_LEVEL = "gpt2"
GEMMA4 = "gemma4"
SHOWN = 1  # differing texts kept of each kind
Ids = list[list[int]]
Read = Sequence[list[int] | None]  # None where a text is not compared
Original = Callable[[str], list[int] | None]
Case = dict[str, Any]

# Texts.

WORDS = [
    *("the", "a", "of", "I", "It's", "don't", "WE'LL", "they're", "x", "=", "1", "def", "return"),
    *("self", "print(x)", "lambda:", "[1,2]", "{}", "//", "->", "++", "HTML", "camelCase"),
    *("snake_case", "3.14", "1234567", "0x1F", "2024-01-01", "user@example.com"),
    *("https://a.b/c?d=e&f", "naïve", "façade", "Straße", "Ünïcödé", "Привет", "мир"),
    *("Ελληνικά", "שלום", "مرحبا", "हिन्दी", "नमस्ते", "ไทย", "日本語", "東京"),
    *("中文", "你好", "한국어"),
    *("ệ", "½", "Ⅳ", "²", "™", "…", "“quoted”", "—", "\u2013", "•", "\u00ad", "\u200b", "\ufeff"),
    *("\u2028", "\u3000"),
]
CODE = (
    "def f(x):\n{i}if x:\n{i}{i}return [y ** 2 for y in x]\n\n\n{i}return None\n",
    "int main() {{\n{i}for (int i = 0; i < 10; ++i) {{\n{i}{i}a[i] += 1; // ok\n{i}}}\n}}\n",
    '{{\n{i}"key": [\n{i}{i}1,\n{i}{i}true\n{i}]\n}}',
    "<ul>\n{i}<li>one</li>\n{i}<li>\n{i}{i}two\n{i}</li>\n</ul>\r\n",
    "| a | b |\n|:--|--:|\n{i}| 1 | 2 |   \n",
)
INDENTS = (" ", "  ", "   ", "    ", "        ", "\t", "\t\t", " \t", "\u00a0\u00a0")
SPACES = ("\u00a0", "\u2003", "\u3000", "\u200b", "\u2028", "\u0085", "\x0b", "\x0c", "\x1c")
EMOJI = [
    *("😀", "👍🏽", "👩\u200d👩\u200d👧\u200d👦", "🏳️\u200d🌈", "🇩🇪", "❤️", "✅", "🦙", "🎉", "☃"),
    *("⌚", "🫠", "1️⃣", "🧑\u200d🚀"),
]
MARKS = "\u0300\u0301\u0302\u0303\u0308\u030a\u0327\u0328\u0345\u05b0\u064b\u093c\u094d\u0e31\u3099"
SCRIPTS = (
    (0x4E00, 0x9FFF), (0x3040, 0x30FF), (0xAC00, 0xD7A3), (0x1100, 0x11FF), (0x0900, 0x097F),
    (0x0600, 0x06FF), (0x0590, 0x05FF), (0x0E00, 0x0E7F), (0x0400, 0x04FF), (0x20000, 0x2A6DF),
)  # fmt: skip


class Texts:
    """Makes texts of several kinds, the same ones for the same vocabulary.

    Attributes:
      specials: the tokens that are found in raw text, which are written out in some.
    """

    def __init__(self, specials: Sequence[str], seed: int = 0):
        self._random = random.Random(seed)
        self.specials = list(specials) or ["<s>"]
        self.kinds: dict[str, Callable[[], str]] = {
            "words": self.words,
            "spaces": lambda: self.runs(" "),
            "tabs": lambda: self.runs("\t"),
            "line ends": lambda: self.runs(*self.choices(("\n", "\r\n", "\r", "\n\n"), 2)),
            "white space": lambda: self.runs(*self.choices((" ", "\t", "\n", *SPACES), 4)),
            "code": self.code,
            "digits": self.digits,
            "punctuation": lambda: self.letters(range(33, 65)) + self.letters(range(91, 127)),
            "emoji": lambda: self.joined(EMOJI),
            "scripts": lambda: self.letters(range(*self._random.choice(SCRIPTS))),
            "combining marks": self.marked,
            "special tokens": lambda: self.joined([*self.choices(self.specials, 4), *WORDS]),
            "parts of special tokens": self.damaged,
            "spelt spaces and bytes": lambda: self.joined(
                ("\u2581", "\u2581\u2581", "<0x0A>", "<0xE2>", "Ġ", "Ċ", " ", "a", "[UNK]", "##a")
            ),
            "random characters": lambda: self.letters(range(1, 0x3000)),
            "random bytes": self.bytes,
        }

    def draw(self, count: int) -> list[tuple[str, str]]:
        """Return pairs of kind and text, of every kind alike many."""
        names = itertools.islice(itertools.cycle(self.kinds), count)
        return [(name, self.kinds[name]()) for name in names]

    def choices(self, among: Sequence[str], most: int) -> list[str]:
        """Return one to `most` of the texts."""
        return self._random.choices(among, k=self._random.randint(1, most))

    def joined(self, among: Sequence[str]) -> str:
        """Return some of the texts one after the other, with or without a space between them."""
        return self._random.choice(("", " ", "  ")).join(self.choices(among, 8))

    def words(self) -> str:
        """Return words of languages and of code."""
        return self._random.choice(("", "", " ")) + " ".join(self.choices(WORDS, 12))

    def runs(self, *spaces: str) -> str:
        """Return words with runs of white space before, between and after them."""
        draw = self._random
        parts = [""] * draw.randint(0, 1) + self.choices(WORDS, 4) + [""] * draw.randint(0, 1)
        lengths = (1, 2, 3, 4, 7, 8, 12, 16, 31, 32, 33, 40)
        text = parts[0]
        for part in parts[1:]:
            text += "".join(draw.choice(spaces) for _ in range(draw.choice(lengths))) + part
        return text

    def code(self) -> str:
        """Return indented code."""
        return "".join(self.choices(CODE, 3)).format(i=self._random.choice(INDENTS))

    def digits(self) -> str:
        """Return numbers."""
        numbers = [str(self._random.getrandbits(self._random.randint(1, 60))) for _ in range(5)]
        return self._random.choice((" ", ",", ".", "", " + ", "\n")).join(numbers)

    def letters(self, points: range) -> str:
        """Return characters of a range of code points, at times with spaces."""
        text = "".join(chr(self._random.choice(points)) for _ in range(self._random.randint(1, 24)))
        return text if self._random.random() < 0.5 else " ".join(text)

    def marked(self) -> str:
        """Return letters with combining marks, some of which have a composed form."""
        letters = self._random.choices("aeioucnAEO yकदかき\u0391ω", k=self._random.randint(1, 12))
        return "".join(c + "".join(self._random.choices(MARKS, k=self._random.randint(0, 2)))
                       for c in letters)  # fmt: skip

    def damaged(self) -> str:
        """Return special tokens that lack a character or have one more, and whole ones."""
        tokens = []
        for token in self.choices(self.specials, 4):
            at = self._random.randrange(len(token))
            changed = (token, token[:at] + token[at + 1 :], token[:at] + " " + token[at:],
                       token.upper(), token + token)  # fmt: skip
            tokens.append(self._random.choice(changed))
        return self._random.choice(("", " ", "\n")).join(tokens)

    def bytes(self) -> str:
        """Return random bytes as text, with what is no UTF-8 replaced."""
        raw = self._random.randbytes(self._random.randint(1, 40))
        return raw.replace(b"\0", b"\1").decode("utf-8", "replace")


# Sources.


def metadata_of(source: Path, *, gemma4: bool) -> tuple[dict[str, Any], Original | None]:
    """Return a tokenizer as GGUF metadata, and how the original encodes a text if it is known."""
    if is_gguf(source):
        kept = ("tokenizer.", "general.")
        metadata = {k: v for k, v in open_gguf(source).metadata.items() if k.startswith(kept)}
        return metadata, None
    if ".model" in source.name:
        return of_sentencepiece(source)
    if source.name.startswith("tekken"):
        return of_tekken(source)
    core = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    size = core.get_vocab_size(with_added_tokens=True)
    metadata = dict(tokenizer_metadata(companions(source), size, gemma4=gemma4))
    return metadata, lambda text: core.encode(text).ids


def of_sentencepiece(path: Path) -> tuple[dict[str, Any], Original]:
    """Return the metadata of a SentencePiece model, and how SentencePiece encodes a text."""
    import sentencepiece

    core = sentencepiece.SentencePieceProcessor(model_file=str(path))
    every = range(core.vocab_size())
    kinds = [
        2 if core.is_unknown(i) else 3 if core.is_control(i) else 5 if core.is_unused(i)
        else 6 if core.is_byte(i) else 1 for i in every
    ]  # fmt: skip
    marks = [core.id_to_piece(i) for i in every if kinds[i] in (2, 3)]  # it does not read these
    return {
        "tokenizer.ggml.model": Typed(STRING, "llama"),
        "tokenizer.ggml.pre": Typed(STRING, "default"),
        "tokenizer.ggml.tokens": Typed(STRING, [core.id_to_piece(i) for i in every]),
        "tokenizer.ggml.scores": Typed(F32, [core.get_score(i) for i in every]),
        "tokenizer.ggml.token_type": Typed(I32, kinds),
        "tokenizer.ggml.bos_token_id": Typed(U32, core.bos_id()),
        "tokenizer.ggml.eos_token_id": Typed(U32, core.eos_id()),
        "tokenizer.ggml.unknown_token_id": Typed(U32, core.unk_id()),
        "tokenizer.ggml.add_bos_token": Typed(BOOL, True),
    }, lambda text: None if any(mark in text for mark in marks) else core.encode(text, add_bos=True)


def of_tekken(path: Path) -> tuple[dict[str, Any], Original]:
    """Return the metadata of a byte-level vocabulary of Mistral's, and how tiktoken reads it."""
    import tiktoken

    tekken = json.loads(path.read_text(encoding="utf-8"))
    specials = tekken["config"]["default_num_special_tokens"]
    kept = tekken["config"]["default_vocab_size"] - specials
    ranks = {base64.b64decode(t["token_bytes"]): t["rank"] for t in tekken["vocab"][:kept]}
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
    names += [f"<SPECIAL_{i}>" for i in range(len(names), specials)]
    core = tiktoken.Encoding(
        "tekken",
        pat_str=tekken["config"]["pattern"],
        mergeable_ranks=ranks,
        special_tokens={name: kept + i for i, name in enumerate(names)},
    )
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {b: chr(256 + i) for i, b in enumerate(moved)}
    spelt = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        " ".join(spelt[part] for part in parts_of(token, ranks))
        for token in ranks
        if len(token) > 1
    ]

    def original(text: str) -> list[int]:
        ids = core.encode(text, allowed_special="all")
        return [1, *(i + specials if i < kept else i - kept for i in ids)]

    return {
        "tokenizer.ggml.model": Typed(STRING, "gpt2"),
        "tokenizer.ggml.pre": Typed(STRING, "tekken"),
        "tokenizer.ggml.tokens": Typed(STRING, [*names, *spelt.values()]),
        "tokenizer.ggml.token_type": Typed(I32, [3] * specials + [1] * kept),
        "tokenizer.ggml.merges": Typed(STRING, merges),
        "tokenizer.ggml.bos_token_id": Typed(U32, 1),
        "tokenizer.ggml.eos_token_id": Typed(U32, 2),
        "tokenizer.ggml.unknown_token_id": Typed(U32, 0),
        "tokenizer.ggml.add_bos_token": Typed(BOOL, True),
    }, original


def parts_of(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """Return the two tokens that are merged last into a token."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def write_model(path: Path, metadata: Mapping[str, Any]) -> None:
    """Write a file with the smallest model for a vocabulary."""
    tokens = metadata["tokenizer.ggml.tokens"]
    size = len(tokens.value if isinstance(tokens, Typed) else tokens)
    config = tiny_target(model_type="llama", vocab_size=size, num_layers=1)
    params = random_params(build_pair(config))["target"]
    weights = Weights(config, TreeSource(params, config), tokenizer=metadata)
    export(weights, path, layout=GGUF, dtype="float16", overwrite=True)


# Comparing.


def other_ids(command: Sequence[str], texts: Sequence[str]) -> tuple[str, Read]:
    """Return the version of the program that a worker runs, and its ids of texts."""
    with tempfile.TemporaryDirectory() as folder, Worker(command, 1) as worker:
        path = Path(folder, "texts")
        path.write_text(json.dumps(texts), encoding="utf-8")
        worker.ask(f"tokens {path}")
        return worker.first["version"], json.loads(path.read_text(encoding="utf-8"))


def differences(
    drawn: Sequence[tuple[str, str]], ours: Ids, theirs: Read, original: Read
) -> dict[str, Any]:
    """Return the differing texts by kind: how many, and the first ones with both ids.

    Args:
      original: ids by the original; differing texts whose ids are ours are counted.
    """
    counts: collections.Counter[str] = collections.Counter()
    examples: list[dict[str, Any]] = []
    agreeing = 0
    for (kind, text), own, other, first in zip(drawn, ours, theirs, original, strict=True):
        if other is None or own == other:
            continue
        counts[kind] += 1
        if own == first:
            agreeing += 1
        if counts[kind] <= SHOWN:
            examples.append({"text": text, "ours": own, "theirs": other})
    return {
        "texts": len(theirs) - theirs.count(None),
        "differ": counts.total(),
        "as_original": agreeing,
        "kinds": dict(counts),
        "examples": examples,
    }


def judged(name: str, source: Path, count: int, peers: Mapping[str, str], folder: Path) -> Case:
    """Return how the tokenizer of one source compares with the others."""
    metadata, reader = metadata_of(source, gemma4=name.startswith(GEMMA4))
    file = folder / "model.gguf"
    write_model(file, metadata)
    stored = open_gguf(file).metadata
    core = tokenizers.Tokenizer.from_str(tokenizer_files(stored)["tokenizer.json"])
    added = core.get_added_tokens_decoder().values()
    drawn = Texts([token.content for token in added]).draw(count)
    texts = [text for _, text in drawn]
    ours = [core.encode(text).ids for text in texts]
    original: Read = [None if reader is None else reader(text) for text in texts]
    versions: dict[str, str] = {}
    theirs: dict[str, Read] = {} if reader is None else {ORIGINAL: original}
    composes = core.normalizer if stored["tokenizer.ggml.model"] == BYTE_LEVEL else None
    composed = [composes.normalize_str(text) if composes else text for text in texts]
    if LLAMA in peers:
        command = prebuilt_command(peers[LLAMA], file, cores=1, context=256)
        versions[LLAMA], theirs[LLAMA] = other_ids(command, composed)
    if TRANSFORMERS in peers:
        written = folder / "folder"
        convert(open_model(file), written, overwrite=True)
        command = [peers[TRANSFORMERS], "-P", "-c", WITH_TRANSFORMERS, str(written)]
        versions[TRANSFORMERS], theirs[TRANSFORMERS] = other_ids(command, texts)
    return {
        "model": stored["tokenizer.ggml.model"],
        "pre": stored.get("tokenizer.ggml.pre"),
        "tokens": len(stored["tokenizer.ggml.tokens"]),
        "source": "".join(source.suffixes[-2:]) if source.is_file() else "tokenizer.json",
        "texts": len(texts),
        "normalised": len([a for a, b in zip(texts, composed, strict=True) if a != b]),
        "versions": versions,
        "compared": {
            other: differences(drawn, ours, ids, original) for other, ids in theirs.items()
        },
    }


def main() -> None:
    """Compare the given tokenizers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="+", metavar="NAME=SOURCE")
    parser.add_argument("--peer", metavar="PYTHON", help="with xllamacpp")
    parser.add_argument("--transformers", metavar="PYTHON", help="with transformers")
    parser.add_argument("--texts", type=int, default=2400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pythons = {LLAMA: options.peer, TRANSFORMERS: options.transformers}
    peers = {name: python for name, python in pythons.items() if python}
    cases: dict[str, Any] = {}
    for item in options.sources:
        name, _, source = item.partition("=")
        with tempfile.TemporaryDirectory() as folder:
            try:
                cases[name] = judged(name, Path(source), options.texts, peers, Path(folder))
            except TokenizerError as error:
                cases[name] = {"refused": str(error)}
                print(f"{name} is refused: {error}", flush=True)
                continue
        compared = cases[name]["compared"]
        line = ", ".join(
            f"{other} {r['differ']} ({r['as_original']})" for other, r in compared.items()
        )
        print(f"{name}: of {cases[name]['texts']} texts differ from {line}", flush=True)
        write_result(options.json, "gguf_tokenizers", {"cases": cases})


if __name__ == "__main__":
    sys.exit(main())
