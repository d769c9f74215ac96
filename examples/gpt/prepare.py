"""Makes tokens of Debian's documentation: 20 MB, split by file, in byte pairs. Nothing is downloaded.

apt-get install linux-doc-6.1=6.1.192-1 perl-doc=5.36.0-7+deb12u4 python3.11-doc=3.11.2-6+deb12u9
pip install tokenizers==0.23.3
python examples/gpt/prepare.py text
"""

import argparse
import gzip
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PACKAGES = {
    "linux-doc-6.1": ("/usr/share/doc/linux-doc-6.1/Documentation", "**/*.rst.gz"),
    "perl-doc": ("/usr/share/perl/5.36.0/pod", "*.pod"),
    "python3.11-doc": ("/usr/share/doc/python3.11/html/_sources", "**/*.rst.txt"),
}
TEXT = "2256179d95b5575ef3e6c525b74d55c18623b2a9a1386bf4c42040a7bfedfc94"
TOKENS = "e94a8fdfc8693cf61c48cec82420962bdbf6520f04ea09aebb5fa2e097080356"
"""Hashes of what all machines must have: the files with their names, and with 1,024 symbols the tokens."""


def read(packages, most_bytes=20_000_000):
    """Files by name, as many as fit, in the order of their names' hashes: a sample that anybody can draw."""
    places = {
        f"{package}/{path.relative_to(folder)}": path
        for package, (folder, pattern) in packages.items()
        for path in Path(folder).glob(pattern)
        if path.is_file() and "translations" not in path.parts
    }
    files = {}
    for name in sorted(places, key=digest):
        content = places[name].read_bytes()
        content = gzip.decompress(content) if name.endswith(".gz") else content
        most_bytes -= len(content)
        if most_bytes < 0:
            break
        files[name] = content.decode(errors="replace")
    return files


def digest(name):
    return hashlib.sha256(name.encode()).digest()


def is_unseen(name):
    """Decided by the name alone: one file in ten is for evaluation."""
    return digest(name)[-1] < 256 // 10


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def sha256_of(files):
    return sha256("\0".join(part for name in sorted(files) for part in (name, files[name])).encode())


def write(files, folder, symbols):
    """Byte pairs are learned from the training files alone. Returns the hash of all tokens."""
    parts = {"train": [], "unseen": []}
    for name, text in files.items():
        parts["unseen" if is_unseen(name) else "train"].append(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=symbols, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(parts["train"], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    content = b""
    for part, texts in parts.items():
        ids = [each.ids for each in tokenizer.encode_batch_fast(texts)]
        tokens = np.concatenate(ids).astype("<u2").tobytes()
        (folder / f"{part}.bin").write_bytes(tokens)
        content += tokens
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.json").write_text(json.dumps({"symbols": symbols, "tokens_sha256": sha256(content)}))
    return sha256(content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the tokens")
    parser.add_argument("--symbols", type=int, default=1024, help="bytes and pairs, all of the vocabulary")
    args = parser.parse_args()
    files = read(PACKAGES)
    if sha256_of(files) != TEXT:
        sys.exit(f"these are not the files that everybody trains on; install these versions:\n{__doc__}")
    made = write(files, args.folder, args.symbols)
    if args.symbols == 1024 and made != TOKENS:
        sys.exit("this version of tokenizers makes other byte pairs of the text: install 0.23.3")
    print(f"{args.folder}: {len(files):,} files, {args.symbols:,} symbols, tokens {made[:12]}")
