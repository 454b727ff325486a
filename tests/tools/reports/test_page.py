"""Page of a report: its content, and its behaviour in a browser."""

import json
import math
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page
from support.run_folders import made

from ddpforge.cli.report import server_of
from ddpforge.errors import SetupError
from ddpforge.runs.folder import RunFolder
from ddpforge.runs.media import encoded
from ddpforge.tools.reports import gather, render

ATTACK = "</script><script>document.title = 'taken'</script><b>bold</b>"


def rows(count: int, resumed_at: int) -> list[dict[str, Any]]:
    """Returns rows of a resumed run with three skipped steps and one loss that is not finite."""
    found = []
    for step in range(1, count + 1):
        row: dict[str, Any] = {"step": step, "attempt": 1 + (step >= resumed_at), "time": 1e9 + step, "lr": 0.1 / step}
        row |= {"train/loss": 2 * math.exp(-step / count), "train/grad_norm": 1.0 + step % 7, "samples": 8 * step}
        if step >= count // 2:
            row["train/skipped_steps"] = 3
        if step % 10 == 0:
            row |= {"eval/loss": 2.5 * math.exp(-step / count), "eval/accuracy": step / count}
        found.append(row)
    found[count // 4] |= {"train/loss": None, "nonfinite": ["train/loss"]}
    return found


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return filled(tmp_path / "runs" / "first", 100)


def filled(path: Path, count: int, **optimizer: float) -> RunFolder:
    metrics = {"train/loss": 0.75, "eval/loss": 0.9}
    folder = made(path, rows=rows(count, count // 3), metrics=metrics, recipe={"optimizer": optimizer})
    shown = {
        "samples/step-000000010.png": encoded(np.zeros((2, 2), np.uint8), "image"),
        "weights/step-000000010.json": json.dumps({"counts": [1, 2], "edges": [0, 1, 2], "nonfinite": 0}).encode(),
        "words/step-000000010.txt": ATTACK.encode(),
        "table/step-000000010.json": json.dumps([{"word": ATTACK, "p": 0.5}]).encode(),
    }
    for name, content in shown.items():
        file = path / "shown" / name
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
    return folder


def test_report_has_attempts_recipe_commands_and_media(run: RunFolder) -> None:
    run.path.joinpath("env.json").write_text(
        json.dumps(
            {
                "command": ["ddpforge", "run", "digits", "--set=optimizer.lr=0.001"],
                "packages": {"ddpforge": "0.4.0", "torch": "2.14.1", "deepspeed": None},
                "git": {"commit": "abc; touch it", "dirty": True},
            }
        )
    )
    told = gather([run])
    (one,) = told.runs
    assert [(attempt.number, attempt.step) for attempt in one.attempts] == [(1, 1), (2, 33)]
    assert one.skipped == [50]
    assert {key: origin for key, _, origin in one.recipe if key.startswith("optimizer")} == {
        "optimizer.use": "recipe",
        "optimizer.lr": "command line",
    }
    assert one.commands == [
        "git checkout 'abc; touch it'  # there were uncommitted changes",
        "pip install torch==2.14.1",
        "pip install .  # in a clone of ddpforge 0.4.0",
        f"ddpforge launch {run.resolved} --nproc 1 name=first-again",
    ]
    assert sorted((each.name, each.kind, each.step) for each in one.shown) == [
        ("samples", "image", 10),
        ("table", "table", 10),
        ("weights", "histogram", 10),
        ("words", "text", 10),
    ]


def test_page_has_the_newest_media_and_names_files_that_are_too_large(run: RunFolder) -> None:
    for step in range(20, 80, 10):
        (run.path / f"shown/samples/step-{step:09}.png").write_bytes(encoded(np.full((2, 2), step, np.uint8), "image"))
    (run.path / "shown/samples/step-000000080.png").write_bytes(bytes(700_000))
    (one,) = gather([run]).runs
    samples = [(each.step, each.value is None) for each in one.shown if each.name == "samples"]
    assert samples == [(50, False), (60, False), (70, False), (80, True)]
    assert one.left_out == 4


def test_run_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    page = render(gather([made(tmp_path / "new", state=None)]))
    assert "new" in page


# ---------------------------------------------------------------------------------------------- in a browser
class Seen:
    """Page in a browser, and its console messages, errors and requests."""

    def __init__(self, browser: Browser, **options: Any) -> None:
        self.page: Page = browser.new_page(**options)
        self.said: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.said.append(request.url) if "://" in request.url[:8] else None)


def opened(browser: Browser, folder: Path, runs: list[RunFolder], **options: Any) -> Seen:
    """Opens the report on `runs` as a file."""
    file = folder / "report.html"
    file.write_text(render(gather(runs)), encoding="utf-8")
    seen = Seen(browser, **options)
    seen.page.goto(file.as_uri())
    seen.said = [text for text in seen.said if text != file.as_uri()]
    return seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_page_of_two_runs_is_readable_and_accessible(
    browser: Browser, tmp_path: Path, run: RunFolder, width: int, scheme: Any
) -> None:
    """Checks: no errors, no requests, no horizontal scrolling, and the WCAG rules that a program can check."""
    other = filled(tmp_path / "runs" / "second", 50, lr=0.5)
    seen = opened(browser, tmp_path, [run, other], viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = seen.page
    assert seen.said == []
    assert page.title() == "first, second: ddpforge report"
    assert page.locator(".chart canvas").count() == 5  # loss, accuracy, learning rate, gradient norm, skipped steps
    assert page.locator(".histogram canvas").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for each in page.locator("details").all():
        each.evaluate("element => element.open = true")
    assert page.get_by_text(ATTACK).count() == 4  # as text
    assert page.locator("tr", has_text="optimizer.lr").first.locator("td").all_inner_texts() == ["0.001", "0.5"]
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_arrow_keys_move_between_points_and_announce_values(browser: Browser, tmp_path: Path, run: RunFolder) -> None:
    page = opened(browser, tmp_path, [run]).page
    page.locator(".chart").first.focus()
    for key, said in [("ArrowRight", "step 1: train/loss 1.9801"), ("End", "step 100: train/loss 0.73576")]:
        page.keyboard.press(key)
        assert page.locator("#announcer").inner_text().startswith(said)
    assert "eval/loss 0.9197" in page.locator("#announcer").inner_text()


def test_controls_change_runs_and_horizontal_axis(browser: Browser, tmp_path: Path, run: RunFolder) -> None:
    other = filled(tmp_path / "runs" / "second", 50)
    page = opened(browser, tmp_path, [run, other]).page
    legend = page.locator(".chart").first.locator(".u-label")
    curves = [f"{run} {kind}/loss" for run in ("first", "second") for kind in ("train", "eval")]
    assert legend.all_inner_texts() == ["step", *curves]
    page.get_by_role("checkbox", name="second").uncheck()
    page.get_by_label("Horizontal axis").select_option("hours")
    page.wait_for_function("document.querySelector('.chart .u-label').textContent === 'hours'")
    assert legend.all_inner_texts() == ["hours", *curves[:2]]


@pytest.mark.slow
def test_page_of_100000_rows_is_small(browser: Browser, tmp_path: Path) -> None:
    run = filled(tmp_path / "runs" / "long", 100_000)
    seen = opened(browser, tmp_path, [run])
    assert (tmp_path / "report.html").stat().st_size < 2e6
    assert seen.said == []
    assert "2,000 of 100,000 values" in seen.page.locator("figcaption", has_text="learning rate").inner_text()


def test_served_page_is_updated_with_its_run(browser: Browser, run: RunFolder) -> None:
    with server_of(lambda: render(gather([run]), live=0.2), 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page = Seen(browser).page
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.locator("#numbers-0 summary").click()
        with run.metrics.open("a") as file:
            file.write(json.dumps({"step": 101, "attempt": 2, "time": 1e9 + 101, "train/loss": 0.125}) + "\n")
        page.locator("#numbers-0 td", has_text="at step 101").first.wait_for()  # open details stay open
        server.shutdown()
    page.locator("#live", has_text="no longer live").wait_for()


def test_server_answers_only_this_host_and_reports_a_port_in_use() -> None:
    with server_of(lambda: "page", 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}/"
        assert urlopen(place).read() == b"page"
        with pytest.raises(HTTPError, match="403"):  # another host name that resolves to this address
            urlopen(Request(place, headers={"Host": "example.org:80"}))
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{place}other")
        with pytest.raises(SetupError, match=f"port {server.server_port} of this machine"):
            server_of(lambda: "", server.server_port)
        server.shutdown()
