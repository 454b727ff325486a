"""Documentation site: every page is in its menu, it makes no requests, and its search works from the disk."""

import ast
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).parent.parent
PAGES = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}


def leaves(menu: Any) -> Iterator[str]:
    if isinstance(menu, str):
        yield menu
    else:
        for part in menu.values() if isinstance(menu, dict) else menu:
            yield from leaves(part)


def test_every_page_is_in_the_menu_and_in_the_index() -> None:
    menu = {*leaves(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"])}
    assert {page for page in menu if page.startswith("docs/")} == PAGES
    index = ROOT / "docs/index.md"
    linked = {f"docs/{link}" for link in re.findall(r"\]\(([\w/-]+\.md)\)", index.read_text())}
    assert linked | {"docs/index.md"} == PAGES


def package_strings() -> str:
    """Returns all strings in ddpforge's code."""
    constants = (
        node.value
        for path in sorted((ROOT / "ddpforge").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return "\n".join(constants)


def test_messages_on_the_troubleshooting_page_are_in_the_code() -> None:
    rows = re.findall(r"^\| (`.+?) \| ", (ROOT / "docs/guides/troubleshooting.md").read_text(), re.MULTILINE)
    others = {"SIGBUS", "unable to write to file </torch_", "Connection reset by peer", "Connection closed by peer"}
    messages = {message for row in rows for message in re.findall(r"`([^`]+)`", row)} - others
    code = package_strings()
    assert len(messages) > 20
    assert [message for message in sorted(messages) if message not in code] == []


@pytest.fixture(scope="module")
def site() -> Path:
    spec = importlib.util.spec_from_file_location("site_of_docs", ROOT / "docs/site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    built: Path = module.build()  # strict: a link or a name without a target is an error
    return built


def test_every_page_is_built_with_the_docstrings_it_names(site: Path) -> None:
    assert {str(path.relative_to(site).with_suffix(".md")) for path in (site / "docs").rglob("*.html")} >= PAGES
    python = (site / "docs/reference/python.html").read_text()
    for name in ("ddpforge.app.run.run", "ddpforge.app.api.TrainedRun.model", "ddpforge.interfaces.task.Task.loss"):
        assert f'id="{name}"' in python


def test_search_works_from_the_disk_without_requests(site: Path, browser: "Browser") -> None:
    page = browser.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("request", lambda request: complaints.append(request.url) if request.url.startswith("http") else None)
    page.goto((site / "docs/guides/launch.html").as_uri(), wait_until="domcontentloaded")
    page.get_by_role("button", name="Search").first.click()
    page.get_by_role("combobox", name="Search").press_sequentially("pipeline schedules")
    found = page.locator("a[href*='docs/guides/pipeline-parallel.html']:visible", has_text="1F1B").first
    found.wait_for()
    assert complaints == []
