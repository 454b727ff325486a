"""Writes data of Python's standard library: descriptions of functions, and the functions to find.

    python recipes/prepare.py [FOLDER]

FOLDER (default: library) gets train.jsonl {anchor, positive}, a folder `search` in BEIR's layout with descriptions of
other functions as queries and all functions as the corpus, and a tokenizer. Nothing is downloaded.
"""

import importlib
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from tokenizers import BertWordPieceTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

NAMES = """abc argparse array ast asyncio base64 bisect bz2 calendar cmath cmd code codecs collections colorsys
configparser contextlib copy csv dataclasses datetime decimal difflib dis email.message email.utils enum filecmp
fileinput fnmatch fractions ftplib functools gc getopt getpass gettext glob gzip hashlib heapq hmac html html.parser
http.client http.cookies http.server imaplib importlib importlib.util inspect io ipaddress itertools json keyword
linecache locale logging logging.handlers lzma mailbox math mimetypes mmap multiprocessing netrc operator optparse os
os.path pathlib pdb pickle pkgutil platform plistlib poplib pprint profile pstats queue quopri random re reprlib
sched secrets selectors shelve shlex shutil signal smtplib socket socketserver sqlite3 ssl stat statistics string
struct subprocess sys sysconfig tarfile tempfile textwrap threading time timeit tokenize trace traceback tracemalloc
types typing unicodedata unittest unittest.mock urllib.parse urllib.request urllib.robotparser uuid wave weakref
webbrowser xml.dom.minidom xml.etree.ElementTree zipfile zlib"""


def members() -> Iterator[tuple[str, Any]]:
    """Yields the path and the object of public functions, classes and methods."""
    for name in NAMES.split():
        module = importlib.import_module(name)
        for key, found in list(vars(module).items()):
            if key.startswith("_") or not (inspect.isroutine(found) or inspect.isclass(found)):
                continue
            if str(getattr(found, "__module__", name)).lstrip("_").split(".")[0] not in (
                name.split(".")[0],
                "builtins",
            ):
                continue
            yield f"{name}.{key}", found
            for method, inner in list(vars(found).items()) if inspect.isclass(found) else ():
                if not method.startswith("_") and inspect.isroutine(inner):
                    yield f"{name}.{key}.{method}", inner


def pairs() -> Iterator[tuple[str, str]]:
    """Yields the first sentence of each docstring, and the path and the parameters of its object as words."""
    seen: set[str] = set()
    for path, found in members():
        text = re.sub(r"\s+", " ", (inspect.getdoc(found) or "").split("\n\n")[0]).strip()
        sentence = text.split(". ")[0]
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|[._]", " ", path)
        if len(sentence.split()) < 4 or "->" in sentence or sentence in seen or words in seen:
            continue
        seen |= {sentence, words}
        try:
            names = " ".join(
                one for one in inspect.signature(found).parameters if one not in ("self", "args", "kwargs")
            )
        except (TypeError, ValueError):
            names = ""
        yield sentence, f"{words} ( {names.replace('_', ' ')} )" if names else words


def write_rows(file: Path, rows: Iterable[dict[str, str]]) -> None:
    """Writes a .jsonl file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(folder: Path) -> None:
    """Writes all files."""
    warnings.simplefilter("ignore")
    (folder / "search" / "qrels").mkdir(parents=True, exist_ok=True)
    found = list(pairs())
    tested = [sha256(document.encode()).digest()[0] % 8 == 0 for _, document in found]
    train = [pair for pair, is_test in zip(found, tested, strict=True) if not is_test]
    write_rows(folder / "train.jsonl", ({"anchor": one, "positive": other} for one, other in train))
    search = folder / "search"
    write_rows(search / "corpus.jsonl", ({"_id": f"d{n}", "text": text} for n, (_, text) in enumerate(found)))
    places = [number for number, is_test in enumerate(tested) if is_test]
    write_rows(search / "queries.jsonl", ({"_id": f"q{n}", "text": found[n][0]} for n in places))
    lines = ["query-id\tcorpus-id\tscore", *(f"q{n}\td{n}\t1" for n in places)]
    (search / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    words = BertWordPieceTokenizer()
    words.train_from_iterator([text for pair in train for text in pair], vocab_size=4000, show_progress=False)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    backend = words._tokenizer
    special = [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder / "tokenizer")
    print(f"{folder}: {len(train)} pairs to train on, {len(places)} queries, {len(found)} documents")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "library"))
