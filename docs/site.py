"""Builds the documentation as a site in build/site, for reading from the disk or for a web server: `make docs`.

Its folders are those of the repository, so that links work in both. A broken link is an error.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from os.path import relpath
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = [
    "README.md",
    "AGENTS.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Dockerfile",
    "docs",
    "recipes",
    "examples",
]
NOT_SEARCHED = ["AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md"]  # words of every subject, and no answers
NO_SEARCH = "---\nsearch:\n  exclude: true\n---\n\n"
# The search of a page that is read from the disk needs this script. Zensical's pages load it from this URL.
SHIM = "https://unpkg.com/iframe-worker/shim"


def build() -> Path:
    """Builds the site and returns its folder; raises CalledProcessError if Zensical finds an error."""
    pages, site = (ROOT / "build" / name for name in ("pages", "site"))  # as in zensical.toml
    for folder in (pages, site):
        shutil.rmtree(folder, ignore_errors=True)
    for part in (*PARTS, *(path.relative_to(ROOT) for path in ROOT.glob("plugins/*/README.md"))):
        _copy(ROOT / part, pages / part)
    for part in NOT_SEARCHED:
        (pages / part).write_text(NO_SEARCH + (ROOT / part).read_text(encoding="utf-8"), encoding="utf-8")
    config = ROOT / "build/zensical.toml"
    config.write_text(_configuration(), encoding="utf-8")
    command = ["build", "--clean", "--strict", "--config-file", str(config)]
    subprocess.run([sys.executable, "-m", "zensical", *command], cwd=ROOT, check=True)
    for page in site.rglob("*.html"):
        own = relpath(site / "docs/assets/iframe-worker.js", page.parent)
        page.write_text(page.read_text(encoding="utf-8").replace(SHIM, own), encoding="utf-8")
    (worker,) = site.glob("assets/javascripts/workers/search.*.js")
    shutil.copy(ROOT / "docs/assets/search.js", worker)
    _write_for_tools(pages, site)
    return site


def _configuration() -> str:
    """Returns the contents of zensical.toml for the folder build, with links to edit a page.

    Without an address in [project.urls] of pyproject.toml there are no such links.
    """
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    text = (ROOT / "zensical.toml").read_text(encoding="utf-8").replace('_dir = "build/', '_dir = "')
    if "Repository" in urls:
        keys = f'repo_url = "{urls["Repository"]}"\nedit_uri = "edit/main/"\n'
        text = text.replace("[project]\n", f"[project]\n{keys}", 1).replace(
            'features = ["', 'features = ["content.action.edit", "'
        )
    return text


def _write_for_tools(pages: Path, site: Path) -> None:
    """Copies each page as Markdown next to its HTML, and writes llms.txt: an index for programs that read."""
    lines = ["# ddpforge", "", "> One TOML recipe becomes a distributed PyTorch training run.", "", "## Pages", ""]
    for page in sorted(pages.rglob("*.md")):
        place = page.relative_to(pages)
        (site / place).parent.mkdir(parents=True, exist_ok=True)
        text = page.read_text(encoding="utf-8").removeprefix(NO_SEARCH)
        (site / place).write_text(text, encoding="utf-8")
        title = re.search(r"^# (.+)$", text, re.MULTILINE)
        synonyms = re.search(r"^\*Also called: (.+?)\.?\*$", text, re.MULTILINE | re.DOTALL)
        about = f": {' '.join(synonyms[1].split())}" if synonyms else ""
        lines.append(f"- [{title[1] if title else place.stem}]({place.as_posix()}){about}")
    (site / "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "site.py", "generate.py"))
    else:
        shutil.copy(source, target)


if __name__ == "__main__":
    print(build() / "index.html")
