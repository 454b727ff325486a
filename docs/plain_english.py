"""Checks the English of docstrings, comments, messages and Markdown pages against the rules in CONTRIBUTING.md.

`python docs/plain_english.py [PATH …]` prints one line per sentence that breaks a rule, and exits with 1 if there is
one.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("AGENTS.md", "docs", "recipes", "plugins")
FOLDERS = ("ddpforge", "plugins", "examples", "benchmarks", "docs", "tests")

# What to look for, and what to write instead. A sentence that needs such a word is in EXCEPTIONS.
RULES = {
    r"\b([Ww]ho|[Ww]hoever|[Ss]omebody|[Nn]obody|[Aa]nybody|[Ee]verybody)\b": "name the actor: the rank, the caller",
    r"\b(told|tells?|says?|said|asks?|asked|hears?|heard)\b": "code receives, reports, logs, requests, returns, raises",
    r"(^|[.;:,(] )[Ww]here (?!to\b)": "`where` is a place: write `if` or `when` for a condition",
    r"\b[Ww]hat (is|are|was|it|they|a|the|of|this|that|each)\b": "write the noun",
    r"\b(of|by|from) (which|whom)\b": "write two sentences",
    r"\b[Bb]eside\b": "next to, in addition to, auxiliary",
    r"\bso (many|much)\b": "name the parameter",
    r"\b(stands?|stood|lies|lain)\b(?! for)": "write `is`",
    r"\balike\b": "identical, equal, the same",
    r"\b[Tt]hose that\b": "write the noun",
    r"(?<![Tt]here )\b(is|are) no (?!longer|more|difference|better|faster|use)[a-z]+\b": "write `is not a`",
}
FUNCTION = r"(The|A|An|What|Who|Whether|Where|How|Its|Those) "
FIRST = "a function's docstring begins with a verb: Returns, Raises, Checks, …"

# Code, names of arguments and quoted texts of others are not sentences: words between backticks, `name:` in `Args:`.
CODE = r"`[^`]*`|(?m:^ +\w+:)"
# No sentences of a Markdown page: code, generated blocks (their sentences are docstrings), titles, texts of links.
NO_PROSE = r"(?ms:^( *)```.*?^\1```)|(?s:<!-- generated.*?<!-- end -->)|`[^`]*`|(?m:^#.*)|\[[^]]*\]\([^)]*\)"
# (path, words of the text): texts that are right as they are.
EXCEPTIONS = frozenset(
    {
        ("ddpforge/launchers/slurm.py", "$asked"),  # a shell script
    }
)


def sentences(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yields line, text, and True for a function's docstring, for each docstring, message and comment of a file."""
    source = path.read_text()
    tree = ast.parse(source)
    docstrings, of_functions = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(body=[ast.Expr(value), *_]) | ast.AsyncFunctionDef(body=[ast.Expr(value), *_]):
                of_functions.add(id(value))
                docstrings.add(id(value))
            case ast.ClassDef(body=[ast.Expr(value), *_]) | ast.Module(body=[ast.Expr(value), *_]):
                docstrings.add(id(value))
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if text.count(" ") > 2 and (
            id(node) in docstrings or "tests" not in path.parts
        ):  # a test's strings are recipes and code
            yield getattr(node, "lineno"), text, id(node) in of_functions  # noqa: B009
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " "), False  # a test's name is a sentence
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# "), False


def faults(path: Path) -> Iterator[str]:
    """Yields `path:line: words: what to write` for each rule that a sentence of the file breaks."""
    place = str(path.relative_to(ROOT))
    for line, text, of_function in sentences(path):
        if any(file == place and words in text for file, words in EXCEPTIONS):
            continue
        if of_function and re.match(FUNCTION, text):
            yield f"{place}:{line}: {text[:60]!r}: {FIRST}"
        yield from _found(place, line, re.sub(CODE, lambda code: "x" * len(code.group()), text))


def faults_of_page(path: Path) -> Iterator[str]:
    """Yields the same for a Markdown page."""
    text = path.read_text(encoding="utf-8")
    prose = re.sub(NO_PROSE, lambda part: re.sub(r"[^\n]", "x", part.group()), text)
    yield from _found(str(path.relative_to(ROOT)), 1, prose)


def _found(place: str, line: int, text: str) -> Iterator[str]:
    for pattern, advice in RULES.items():
        for found in re.finditer(pattern, text):
            at = line + text[: found.start()].count("\n")
            around = text[max(0, found.start() - 25) : found.end() + 25]
            yield f"{place}:{at}: {around!r}: {advice}"


def _files(roots: Sequence[Path], ending: str) -> list[Path]:
    found = [
        file
        for root in roots
        for file in ([root] if root.is_file() else sorted(root.rglob(f"*{ending}")))
        if file.suffix == ending
    ]
    return [file for file in found if file != Path(__file__).resolve()]


def main(paths: list[str]) -> int:
    """Checks files and folders, all of the repository's if none is named; returns the exit code."""
    given = [Path(path).resolve() for path in paths]
    files = _files(given or [ROOT / folder for folder in FOLDERS], ".py")
    pages = _files(given or [ROOT / name for name in PAGES], ".md")
    found = [fault for file in files for fault in faults(file)] + [
        fault for page in pages for fault in faults_of_page(page)
    ]
    print("\n".join(found))
    print(
        f"{len(found)} sentences to rewrite in {len(files) + len(pages)} files"
        if found
        else f"{len(files) + len(pages)} files in plain English"
    )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
