"""Page of a report: its content, and its behaviour in a browser."""

import json
import math
from importlib.resources import files
from itertools import combinations, product
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
                "packages": {"ddpforge": "0.4.0", "torch": "2.14.1+cpu", "deepspeed": None},
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
        f"ddpforge launch {run.resolved} --nproc 1 name=first-again  # with ddpforge 0.4.0",
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


def settled(page: Page) -> None:
    """Waits until all charts are drawn."""
    page.wait_for_timeout(70)  # a change of a control is drawn 60 ms later
    page.wait_for_function("document.body.dataset.waiting === '0'")


def opened(browser: Browser, folder: Path, runs: list[RunFolder], **options: Any) -> Seen:
    """Opens the report on `runs` as a file."""
    file = folder / "report.html"
    file.write_text(render(gather(runs)), encoding="utf-8")
    seen = Seen(browser, **options)
    seen.page.goto(file.as_uri())
    settled(seen.page)
    seen.said = [text for text in seen.said if text != file.as_uri()]
    return seen


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
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
    assert page.locator("section[aria-labelledby=differences] tr", has_text="optimizer.lr").first.locator(
        "td"
    ).all_inner_texts() == ["0.001", "0.5"]
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_arrow_keys_move_between_points_and_announce_values(browser: Browser, tmp_path: Path, run: RunFolder) -> None:
    page = opened(browser, tmp_path, [run]).page
    page.locator(".chart").first.focus()
    for key, said in [("ArrowRight", "step 1: train/loss 1.9801"), ("End", "step 100: train/loss 0.73576")]:
        page.keyboard.press(key)
        assert page.locator("#announcer").inner_text().startswith(said)
    assert "eval/loss 0.9197" in page.locator("#announcer").inner_text()


# Chart as it is drawn: names of its curves, colors, labels of its axes. The page keeps none of this in the document.
SPY = """
window.uPlot = new Proxy(uPlot, { construct(target, [options, data, element]) {
  const plot = new target(options, data, element);
  if (element) element.drawn = () => ({
    x: plot.axes[0].label, curves: plot.series.slice(1).map(one => one.stroke(plot)),
    y: plot.axes[1].values(plot, plot.axes[1]._splits, 1), at: plot.axes[0].values(plot, plot.axes[0]._splits, 0),
    points: plot.data.slice(1).map(each => each.filter(value => value != null)) });
  return plot;
} });
"""


def drawn(page: Page, number: int) -> dict[str, Any]:
    """Returns the contents of a chart."""
    settled(page)
    code = "element => element.querySelector('canvas') ? element.drawn() : { curves: [] }"
    found: dict[str, Any] = page.locator(".chart").nth(number).evaluate(code)
    return found


@pytest.fixture
def sweep(tmp_path: Path) -> list[RunFolder]:
    """Returns a sweep of three learning rates and two seeds; the last rate is best."""
    found = []
    for number, (lr, seed) in enumerate(product([3e-5, 3e-4, 3e-3], [0, 1])):
        steps = [
            {"step": step, "lr": lr, "train/loss": 2 - 0.1 * number, "eval/accuracy": (number + step / 100) / 10}
            for step in (10, 20, 30)
        ]
        metrics = {"eval/accuracy": number / 10 + 0.03, "train/loss": 2 - 0.1 * number}
        path = tmp_path / "runs" / "my-sweep" / f"lr-{lr}_seed-{seed}"
        found.append(made(path, rows=steps, metrics=metrics, recipe={"optimizer": {"lr": lr}, "train": {"seed": seed}}))
    return found


def spied(browser: Browser, folder: Path, runs: list[RunFolder]) -> Seen:
    """Opens the report with charts that reveal their contents."""
    file = folder / "report.html"
    page = render(gather(runs)).replace(
        '"use strict";\n(() => {\n  const DASHES', SPY + '"use strict";\n(() => {\n  const DASHES'
    )
    assert SPY in page
    file.write_text(page, encoding="utf-8")
    seen = Seen(browser, viewport={"width": 1280, "height": 900})
    seen.page.goto(file.as_uri())
    settled(seen.page)
    return seen


def test_controls_change_runs_and_horizontal_axis_of_all_charts(
    browser: Browser, tmp_path: Path, run: RunFolder
) -> None:
    other = filled(tmp_path / "runs" / "second", 50)
    page = spied(browser, tmp_path, [run, other]).page
    before = [len(drawn(page, number)["curves"]) for number in range(4)]
    assert before == [4, 2, 2, 2]
    page.get_by_role("checkbox", name="second").uncheck()
    page.get_by_label("Horizontal axis").select_option("hours")
    assert [len(drawn(page, number)["curves"]) for number in range(4)] == [2, 1, 1, 1]
    assert drawn(page, 0)["x"] == "hours"
    page.locator("figure").first.get_by_role("button", name="train/loss").click()  # the curve in its chart's caption
    assert len(drawn(page, 0)["curves"]) == 1


def test_labels_of_an_axis_differ(browser: Browser, tmp_path: Path, sweep: list[RunFolder]) -> None:
    page = spied(browser, tmp_path, sweep[:1]).page
    lr = page.locator("figcaption").all_inner_texts().index("learning rate")
    assert "3e-5" in [label.replace(".0", "") for label in drawn(page, lr)["y"]]
    page = spied(browser, tmp_path, sweep).page
    for logarithmic in (False, True):
        page.get_by_label("logarithmic").set_checked(logarithmic)
        for number in range(page.locator(".chart").count()):
            chart = drawn(page, number)
            for labels in (chart["y"], chart["at"]):
                assert len(set(labels)) == len(labels) > 1


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0, 1e-5, 2e-5, 3e-5], ["0", "1e-5", "2e-5", "3e-5"]),
        ([0, 0.25, 0.5, 0.75], ["0", "0.25", "0.50", "0.75"]),
        ([0.0005, 0.001, 0.0015], ["0.0005", "0.0010", "0.0015"]),
        ([-2, 0, 2], ["-2", "0", "2"]),
        ([2e6, 2.5e6, 3e6], ["2.0e6", "2.5e6", "3.0e6"]),
        ([1000001, 1000002], ["1.000001e6", "1.000002e6"]),
        ([0.3 - 0.1, 0.3, 0.4], ["0.2", "0.3", "0.4"]),
    ],
)
def test_labels_have_as_few_digits_as_differ(browser: Browser, values: list[float], labels: list[str]) -> None:
    script = (files("ddpforge.tools.reports") / "assets" / "report.js").read_text()
    function = script[script.index("  function labels(") : script.index("  function ticks(")]
    page = browser.new_page()
    assert page.evaluate(f"values => {{ {function}; return labels(values); }}", values) == labels


def test_sweep_has_its_name_and_a_column_per_key_and_its_best_run_first(
    browser: Browser, tmp_path: Path, sweep: list[RunFolder]
) -> None:
    page = opened(browser, tmp_path, sweep).page
    assert page.title() == "my-sweep: ddpforge report"
    heads = page.locator("#table thead th:visible").all_inner_texts()
    assert [head.strip(" ▲▼") for head in heads][1:5] == ["eval/accuracy", "optimizer.lr", "train.seed", "train/loss"]
    first = page.locator("#table tbody tr").first
    assert first.locator("td").all_inner_texts()[1:5] == ["0.53", "0.003", "1", "1.5"]
    page.get_by_role("button", name="optimizer.lr").first.click()
    assert first.locator("td").all_inner_texts()[2] == "3e-5"
    head = page.locator("#table th[aria-sort]")
    assert (head.inner_text(), head.get_attribute("aria-sort")) == ("optimizer.lr", "ascending")
    head.get_by_role("button").click()
    assert first.locator("td").all_inner_texts()[2] == "0.003"
    page.locator("select[name=metric]").select_option("eval/accuracy (best)")  # a metric without a column gets one
    assert page.locator("#table thead th:visible").last.inner_text() == "eval/accuracy (best)"
    assert first.locator("td:visible").last.inner_text() == "0.53"


def test_search_and_the_legend_show_and_hide_runs(browser: Browser, tmp_path: Path, sweep: list[RunFolder]) -> None:
    page = spied(browser, tmp_path, sweep).page
    rows = page.locator("#table tbody tr:visible")
    page.get_by_label("Search runs").fill("seed=1 optimizer.lr=3e-0")
    settled(page)
    assert rows.count() == 0
    page.get_by_label("Search runs").fill("SEED=1 optimizer.lr=3e-")
    settled(page)
    assert rows.count() == 3
    assert [len(drawn(page, number)["curves"]) for number in range(3)] == [3, 3, 3]
    page.get_by_role("checkbox", name="Show all runs").uncheck()
    assert drawn(page, 0)["curves"] == []
    page.get_by_label("Search runs").fill("")
    settled(page)
    assert page.locator("#shown").inner_text() == "3 of 6 runs are shown"
    page.get_by_label("Colors by").select_option("optimizer.lr")
    settled(page)
    legend = page.locator("#legend button")
    assert legend.all_inner_texts() == ["3e-5", "0.0003", "0.003"]
    legend.nth(2).click()
    assert legend.nth(2).get_attribute("aria-pressed") == "false"
    assert [len(drawn(page, number)["curves"]) for number in range(3)] == [2, 2, 2]


def test_colors_are_by_run_or_by_key_and_seeds_can_be_averaged(
    browser: Browser, tmp_path: Path, sweep: list[RunFolder]
) -> None:
    page = spied(browser, tmp_path, sweep).page
    assert len(set(drawn(page, 0)["curves"])) == 6
    page.get_by_label("Colors by").select_option("optimizer.lr")
    assert len(set(drawn(page, 0)["curves"])) == 3
    page.get_by_label("Average over").select_option("train.seed")
    assert drawn(page, 0)["points"] == [pytest.approx([value] * 3) for value in (1.95, 1.75, 1.55)]


def test_each_key_has_a_chart_of_the_metric(browser: Browser, tmp_path: Path, sweep: list[RunFolder]) -> None:
    page = spied(browser, tmp_path, sweep).page
    titles = page.locator("figcaption").all_inner_texts()
    by_lr = titles.index("eval/accuracy by optimizer.lr")
    chart = drawn(page, by_lr)
    assert chart["at"] == ["3e-5", "0.0003", "0.003"]
    assert sum(chart["points"], []) == pytest.approx([0.03, 0.13, 0.23, 0.33, 0.43, 0.53])


def test_two_dozen_runs_have_different_colors(browser: Browser) -> None:
    """Checks the distance of any two colors in OKLab, light and dark: 0.02 is a difference that people just see."""
    script = (files("ddpforge.tools.reports") / "assets" / "report.js").read_text()
    line = next(line for line in script.splitlines() if "const palette" in line)
    page = browser.new_page()
    for dark in ("true", "false"):
        code = f"() => {{ const dark = () => {dark}; {line}; return [...Array(24).keys()].map(palette); }}"
        colors = [[float(word) for word in text[6:-1].split()] for text in page.evaluate(code)]
        lab = [(light, c * math.cos(math.radians(hue)), c * math.sin(math.radians(hue))) for light, c, hue in colors]
        assert min(math.dist(one, other) for one, other in combinations(lab, 2)) > 0.04


@pytest.mark.slow
def test_page_of_200_runs_is_usable(browser: Browser, tmp_path: Path) -> None:
    runs = []
    for number in range(200):
        lr = 1e-5 * 1.05**number
        steps = [
            {"step": step, "lr": lr, "train/loss": 2 + math.sin(step + number), "train/grad_norm": 1 + step % 7}
            | ({"eval/accuracy": step / 6000 + number / 1000} if step % 500 == 0 else {})
            for step in range(50, 3001, 50)
        ]
        metrics = {"eval/accuracy": 0.5 + number / 1000}
        path = tmp_path / "runs" / "large" / f"run-{number:03}"
        runs.append(made(path, rows=steps, metrics=metrics, recipe={"optimizer": {"lr": lr}}))
    seen = spied(browser, tmp_path, runs)
    assert seen.said == [(tmp_path / "report.html").as_uri()]
    assert (tmp_path / "report.html").stat().st_size < 3e6
    assert len(drawn(seen.page, 0)["curves"]) == 200
    assert len(set(drawn(seen.page, 0)["curves"])) > 100  # a color scale
    assert seen.page.locator("#table tbody tr").first.locator("th").inner_text() == "run-199"


@pytest.mark.full  # a page of 200 runs has as many points
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
