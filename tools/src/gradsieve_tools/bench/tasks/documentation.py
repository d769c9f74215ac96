"""Debian's documentation as byte pairs: what the held-out task learns from.

    linux-doc-6.1    sources of the kernel's manual, without translations
    perl-doc         Perl's manual
    python3.11-doc   sources of Python's manual

A hash of each file's name decides whether it is in the test (one in ten), and which files are taken: 20 MB of
42. Byte pairs are learned from the training files alone. The text and the tokens are pinned by their hashes:
other versions of the packages would make another task.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.tasks.data import DataSet, text_to_learn

CONTEXT = 128  # tokens that the model sees at once
SYMBOLS = 1024  # bytes and pairs, all of the vocabulary
_TESTED = 256 // 10  # share of a hash's first byte that goes to the tests


@dataclass(frozen=True, slots=True)
class Source:
    version: str
    folder: Path
    pattern: str


DEBIAN: Mapping[str, Source] = {
    "linux-doc-6.1": Source("6.1.192-1", Path("/usr/share/doc/linux-doc-6.1/Documentation"), "**/*.rst.gz"),
    "perl-doc": Source("5.36.0-7+deb12u4", Path("/usr/share/perl/5.36.0/pod"), "*.pod"),
    "python3.11-doc": Source(
        "3.11.2-6+deb12u9", Path("/usr/share/doc/python3.11/html/_sources"), "**/*.rst.txt"
    ),
}
TEXT = "2256179d95b5575ef3e6c525b74d55c18623b2a9a1386bf4c42040a7bfedfc94"
# SHA-256 of the text taken and of all tokens
TOKENS = "e94a8fdfc8693cf61c48cec82420962bdbf6520f04ea09aebb5fa2e097080356"


@dataclass(frozen=True, slots=True)
class Documentation:
    """Files by name, apart."""

    learned: dict[str, str]
    held_out: dict[str, str]

    @property
    def sha256(self) -> str:
        files = {**self.learned, **self.held_out}
        return _sha256("\0".join(part for name in sorted(files) for part in (name, files[name])).encode())


@cache
def documentation() -> DataSet:
    return learnable(read(DEBIAN), TEXT, TOKENS)


def learnable(text: Documentation, wanted: str, wanted_tokens: str, windows: int = 512) -> DataSet:
    if text.sha256 != wanted:
        raise ConfigError(
            f"this learns from other versions of Debian's documentation than are installed: "
            f"{_install(DEBIAN)} (of Debian 12; the archive keeps the newest only, snapshot.debian.org all)"
        )
    learned, held_out = tokens(text)
    if _sha256(learned.numpy().tobytes() + held_out.numpy().tobytes()) != wanted_tokens:
        raise ConfigError("this version of tokenizers makes other byte pairs of the text: install 0.23.3")
    return text_to_learn(learned, held_out, CONTEXT, windows)


def read(sources: Mapping[str, Source], most_bytes: int = 20_000_000) -> Documentation:
    """Return as many files as `most_bytes` hold, in the order of their names' hashes."""
    places = {
        f"{package}/{path.relative_to(source.folder)}": path
        for package, source in sources.items()
        for path in _files(package, source, sources)
        if "translations" not in path.parts
    }
    text = Documentation({}, {})
    for name in sorted(places, key=_digest):
        content = places[name].read_bytes()
        content = gzip.decompress(content) if name.endswith(".gz") else content
        most_bytes -= len(content)
        if most_bytes < 0:
            break
        part = text.held_out if is_tested(name) else text.learned
        part[name] = content.decode(errors="replace")
    return text


def _files(package: str, source: Source, sources: Mapping[str, Source]) -> list[Path]:
    found = [path for path in source.folder.glob(source.pattern) if path.is_file()]
    if not found:
        raise ConfigError(
            f"this learns from Debian's documentation, but {source.folder} of {package} has none; to install "
            f"it: {_install(sources)} (or choose what learns from something else)"
        )
    return found


def _install(sources: Mapping[str, Source]) -> str:
    return "apt-get install " + " ".join(f"{name}={source.version}" for name, source in sources.items())


def is_tested(name: str) -> bool:
    return _digest(name)[-1] < _TESTED


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def tokens(text: Documentation, symbols: int = SYMBOLS) -> tuple[Tensor, Tensor]:
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ConfigError(f"{error}: pip install 'gradsieve-tools[text]'") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=symbols, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text.learned.values(), trainer)

    def encoded(files: Mapping[str, str]) -> Tensor:
        found = tokenizer.encode_batch_fast(list(files.values()))
        return torch.cat([torch.tensor(each.ids, dtype=torch.int16, device="cpu") for each in found])

    return encoded(text.learned), encoded(text.held_out)
