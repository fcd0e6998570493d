"""English text that ships with Python: `pydoc_data.topics`, and docstrings and comments of modules.

A tenth of it is kept from training, by a checksum of each document's name, so that the split is the
same wherever the same Python is: modules to choose a checkpoint by, topics to measure it on.
`python -m dsv4_jax.training.corpus FILE` writes all parts to a file, to train on a machine whose
Python came without them. With `--whole`, modules are taken with their code, which refers far back;
topics are all trained on then, and what is measured on are modules too.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import pathlib
import re
import sysconfig
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from dsv4_jax.regular_files import open_regular

BOS, EOS = 256, 257
VOCAB_SIZE = 258


class Corpus(NamedTuple):
    """Documents as UTF-8 bytes between BOS and EOS, i32[n] each.

    Attributes:
      train: most topics and modules.
      validation: modules, to choose a checkpoint by.
      held_out: topics, which are prose, to measure on.
    """

    train: np.ndarray
    validation: np.ndarray
    held_out: np.ndarray


def read_corpus(path: pathlib.Path | None = None, *, whole: bool = False) -> Corpus:
    """Reads this Python's own text, or a file that this module has written.

    Args:
      path: the file; None reads this Python's text.
      whole: takes modules with their code, and splits them into all three parts.

    Raises:
      ValueError: the file is none of this module's.
      OSError: it cannot be read.
    """
    if path is not None:
        return _read_file(path)
    train, validation, held_out = [], [], []
    if whole:
        train += [text for _, text in sorted(topics.items())]
        for name, text in _modules():
            kept = validation if _is_held_out(f"{name} again") else held_out
            (kept if _is_held_out(name) else train).append(text)
        return Corpus(_tokens(train), _tokens(validation), _tokens(held_out))
    for name, text in sorted(topics.items()):
        (held_out if _is_held_out(name) else train).append(text)
    for name, text in _module_texts():
        (validation if _is_held_out(name) else train).append(text)
    return Corpus(_tokens(train), _tokens(validation), _tokens(held_out))


def read_held_out(path: pathlib.Path | None = None) -> np.ndarray:
    """The part to measure on alone, which takes no reading of modules; as `read_corpus`."""
    if path is not None:
        return _read_file(path).held_out
    return _tokens([text for name, text in sorted(topics.items()) if _is_held_out(name)])


def _read_file(path: pathlib.Path) -> Corpus:
    try:
        with open_regular(path) as stream:
            arrays = np.load(stream, allow_pickle=False)
            if not isinstance(arrays, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array")
            with arrays:
                parts = {name: arrays[name] for name in Corpus._fields}
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} must be a file of dsv4_jax.training.corpus with {', '.join(Corpus._fields)}: "
            f"{error}"
        ) from error
    for name, part in parts.items():
        if part.ndim != 1 or not part.size or part.dtype.kind not in "iu":
            raise ValueError(
                f"{name} of {path} must be integers of one axis, got {part.dtype}{list(part.shape)}"
            )
        if part.min() < 0 or part.max() >= VOCAB_SIZE:
            raise ValueError(
                f"{name} of {path} must hold tokens in 0..{VOCAB_SIZE - 1}, got {part.min()} to "
                f"{part.max()}"
            )
    return Corpus(**{name: part.astype(np.int32) for name, part in parts.items()})


def held_out_rows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Cuts a text into i32[n, length + 1]; each row's last token is the next one's first.

    Raises:
      ValueError: the length is below 1, or the text is too short for one row.
    """
    if not 1 <= length < len(tokens):
        raise ValueError(f"length must be in 1..{len(tokens) - 1}, got {length}")
    starts = np.arange(0, len(tokens) - length, length)
    return tokens[starts[:, None] + np.arange(length + 1)]


def byte_tokenizer() -> Tokenizer:
    """Bytes 0 to 255 as tokens of that number, BOS before a text; `tokenizers` reads its file."""
    alphabet = bytes_to_characters()
    tokenizer = Tokenizer(BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    return tokenizer


def bytes_to_characters() -> dict[int, str]:
    """The printable character by which the byte-level convention of `tokenizers` shows each byte.

    Printable bytes stand for themselves; the others, in order, for U+0100 and up.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    return characters | {byte: chr(256 + index) for index, byte in enumerate(others)}


def _is_held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % 10 == 0


def _module_texts() -> Iterator[tuple[str, str]]:
    """File name, and long docstrings and comments, of every module of the standard library."""
    for name, source in _modules():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, nodes)]
        comments = re.findall(r"(?:^[ ]*# .*\n)+", source, re.MULTILINE)
        texts += [re.sub(r"^ *# ", "", comment, flags=re.MULTILINE) for comment in comments]
        text = "\n\n".join(text.strip() for text in texts if text and len(text) > 80)
        if text:
            yield name, text


def _modules() -> Iterator[tuple[str, str]]:
    """File name and source of every module of the standard library."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = str(path.relative_to(root))
        if name.startswith(("site-packages", "dist-packages", "pydoc_data", "encodings")):
            continue
        with contextlib.suppress(UnicodeDecodeError):
            yield name, path.read_text(encoding="utf-8")


def _tokens(texts: list[str]) -> np.ndarray:
    pieces = []
    for text in texts:
        body = np.frombuffer(text.strip().encode(), np.uint8).astype(np.int32)
        pieces += [np.array([BOS], np.int32), body, np.array([EOS], np.int32)]
    return np.concatenate(pieces)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Writes the corpus to a file.", allow_abbrev=False)
    parser.add_argument("file", type=pathlib.Path, help="an .npz file")
    parser.add_argument("--whole", action="store_true", help="modules with their code")
    args = parser.parse_args()
    file = args.file
    if not file.parent.is_dir():
        parser.error(f"file must be in a folder that is there, got {file}")
    parts = {
        name: part.astype(np.uint16)
        for name, part in read_corpus(whole=args.whole)._asdict().items()
    }
    np.savez_compressed(file, **parts)


if __name__ == "__main__":
    main()
