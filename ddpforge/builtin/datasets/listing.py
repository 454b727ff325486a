"""Lists the files of a folder that count as data, for all datasets; the rest is counted and named in one warning."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddpforge.errors import SetupError

__all__ = ["BINARY", "LeftOut", "files_below", "is_leftover", "listed", "other_kind", "without_mark"]

log = logging.getLogger("ddpforge")

# Endings of files that are not text.
BINARY = (
    *(".gz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".rar", ".tar", ".tgz", ".jar", ".whl"),
    *(".npy", ".npz", ".bin", ".idx", ".pt", ".pth", ".pkl", ".safetensors", ".onnx", ".h5", ".hdf5"),
    *(".parquet", ".arrow", ".feather", ".orc", ".avro", ".db", ".sqlite", ".xls", ".xlsx", ".doc", ".docx", ".pdf"),
    *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ico", ".heic", ".mp3", ".wav", ".mp4"),
    *(".pyc", ".o", ".a", ".so", ".dll", ".exe", ".class", ".woff", ".woff2", ".ttf"),
)
# Files of another kind, by their first bytes, and what to do with them. Longer marks come first.
_OTHER_KINDS = (
    (b"\x1f\x8b", "is compressed with gzip", "unpack it: gunzip FILE"),
    (b"PK\x03\x04", "is a zip archive or a workbook (.xlsx)", "unpack it, or export its sheet as CSV"),
    (b"BZh", "is compressed with bzip2", "unpack it: bunzip2 FILE"),
    (b"\xfd7zXZ", "is compressed with xz", "unpack it: unxz FILE"),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstandard", "unpack it: unzstd FILE"),
    (b"PAR1", "is a parquet file", 'set use = "parquet"'),
    (b"version https://git-lfs", "is only a pointer of Git LFS", "download its content: git lfs pull"),
    (b"%PDF-", "is a PDF", "export its text or its tables"),
    (b"\xff\xfe\x00\x00", "is text in UTF-32", "write it as UTF-8: iconv -f UTF-32 -t UTF-8"),
    (b"\xff\xfe", "is text in UTF-16", "write it as UTF-8: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "is text in UTF-16", "write it as UTF-8: iconv -f UTF-16 -t UTF-8"),
)
_NAMES = {"__macosx", "__pycache__", "thumbs.db", "ehthumbs.db", "desktop.ini"}
_ENDINGS = ("~", ".swp", ".swo", ".tmp", ".bak", ".orig", ".part", ".crdownload")
_MARK = b"\xef\xbb\xbf"  # the byte order mark of UTF-8
_SHOWN = 3  # names in a warning, for each reason


def is_leftover(name: str) -> bool:
    """True for the name of a hidden file or folder, and for leftovers of editors, systems and downloads."""
    lower = name.lower()
    return name.startswith((".", "~$")) or lower in _NAMES or lower.endswith(_ENDINGS) or name[:1] + name[-1:] == "##"


def other_kind(begin: bytes) -> tuple[str, str] | None:
    """Returns the kind of a file with these first bytes, and what to do, if it is compressed or no text in UTF-8."""
    return next(((what, way) for mark, what, way in _OTHER_KINDS if begin.startswith(mark)), None)


@dataclass
class LeftOut:
    """Entries of a folder that are not data, by the reason."""

    folder: Path
    found: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, path: Path) -> None:
        """Records an entry."""
        self.found.setdefault(reason, []).append(str(path.relative_to(self.folder)))

    def warn(self) -> None:
        """Logs one warning with the number and the first names of the entries for each reason, if there are any."""
        parts = []
        for reason, names in sorted(self.found.items()):
            shown = ", ".join(sorted(names)[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
            parts.append(f"{len(names):,} {reason} ({shown})")
        if parts:
            log.warning("%s: left out: %s", self.folder, "; ".join(parts))


def files_below(
    folder: Path,
    endings: Sequence[str] = (),
    *,
    left: LeftOut,
    cased: bool = False,
    deep: bool = True,
    but: Sequence[str] = (),
) -> list[Path]:
    """Returns the regular files of a folder that count as data, in the order of their paths.

    Links to files are followed, links to folders only if `folder` itself is one.

    Args:
        folder: the folder; its own name does not matter.
        endings: endings of the names that count; empty: any.
        left: receives the entries that do not count.
        cased: whether capitals matter in `endings`.
        deep: whether files in folders below count.
        but: endings of names that do not count, in small letters.

    Raises SetupError if a folder cannot be read.
    """
    found, waiting = [], [folder]
    wanted = tuple(endings if cased else map(str.lower, endings))
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    path = Path(entry.path)
                    if is_leftover(entry.name):
                        left.add("hidden or left behind by a program", path)
                    elif entry.is_dir(follow_symlinks=False) and deep:
                        waiting.append(path)
                    elif entry.is_dir():
                        left.add("in folders below" if not entry.is_symlink() else "linked folders", path)
                    elif not entry.is_file():
                        left.add("not regular files", path)
                    elif wanted and not (entry.name if cased else entry.name.lower()).endswith(wanted):
                        left.add("with other endings", path)
                    elif entry.name.lower().endswith(tuple(but)):
                        left.add("of a kind that is not read", path)
                    else:
                        found.append(path)
        except OSError as error:
            raise SetupError(f"a folder of the data cannot be read: {error}") from error
    return sorted(found)


def listed(
    folder: Path, endings: Sequence[str] = (), *, cased: bool = False, deep: bool = True, but: Sequence[str] = ()
) -> list[Path]:
    """Returns the files of a folder as `files_below` does, and logs a warning for the entries that are left out."""
    left = LeftOut(folder)
    found = files_below(folder, endings, left=left, cased=cased, deep=deep, but=but)
    left.warn()
    return found


def without_mark(content: bytes) -> bytes:
    """Returns the content of a text file without the byte order mark, which is not text."""
    return content.removeprefix(_MARK)
