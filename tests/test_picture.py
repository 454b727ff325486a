"""Pictures of the documentation: each is what its command draws, for light and dark pages, with a text alternative."""

import importlib
import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs/assets"
SVG = "{http://www.w3.org/2000/svg}"
sys.path.append(str(ROOT / "docs"))
curves, diagrams, picture = (importlib.import_module(name) for name in ("curves", "diagrams", "picture"))

FIRST = "\x1b[32m━━\x1b[0m   3/10 30% forward\r\nloss 2 & <more>"
SECOND = "\x1b[32m━━━━\x1b[0m 6/10 60% forward\r\nloss 1"
ERASED = "\r\x1b[2K\x1b[1A\x1b[2K"
OUTPUT = (
    f"\x1b[1mdigits\x1b[0m\r\n{FIRST}{ERASED}\x1b[36meval step 5\x1b[0m\r\n{SECOND}{ERASED}\x1b[1;31mdone\x1b[0m\r\n"
)


def lines(percent: int) -> list[str]:
    return ["".join(letter for letter, _ in line) for line in picture.chosen(OUTPUT, percent)]


def test_screen_is_the_last_one_up_to_a_percentage() -> None:
    assert lines(59) == ["digits", "━━   3/10 30% forward", "loss 2 & <more>"]
    assert lines(60) == ["digits", "eval step 5", "━━━━ 6/10 60% forward", "loss 1"]
    with pytest.raises(SystemExit, match="no progress bar"):
        picture.chosen(OUTPUT, 29)


def test_svg_has_the_colors_and_the_text() -> None:
    root = ElementTree.fromstring(picture.drawn(picture.chosen(OUTPUT, 59), picture.RUN, "About."))
    found = [(text.get("class", ""), text.text) for text in root.iter(f"{SVG}text")]
    assert found == [
        ("bold", "$ ddpforge run digits"),
        ("bold", "digits"),
        ("green", "━━"),
        ("", "   3/10 30% forward"),
        ("", "loss 2 & <more>"),
    ]
    assert [picture.styled("bold green", codes) for codes in ("", "0", "31", "39", "22", "1;96")] == [
        "",
        "",
        "bold red",
        "bold",
        "green",
        "bold cyan",
    ]


def test_of_a_plan_the_table_is_drawn() -> None:
    lines = picture.table(
        "1,234 parameters\r\nbatch: 8\r\n\r\nstrategy  peak\r\nddp  4 GB\r\n\r\nddp, on each rank\r\n"
    )
    assert ["".join(letter for letter, _ in line) for line in lines][-2:] == ["strategy  peak", "ddp  4 GB"]


@pytest.mark.parametrize("name", sorted(path.name for path in ASSETS.glob("*.svg")))
def test_a_picture_is_small_and_has_a_title_a_description_and_both_colors(name: str) -> None:
    text = (ASSETS / name).read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert len(text) < 200_000
    assert [len(root.findtext(f"{SVG}{part}", "")) > 20 for part in ("title", "desc")] == [True, True]
    assert root.attrib["role"] == "img"
    assert "@media (prefers-color-scheme: dark)" in text
    # Colors are variables, so a dark page has no white background.
    drawn = text.partition("</style>")[2]
    assert re.findall(r'(?:fill|stroke|style)="[^"]*"', drawn) == []
    assert re.search(r"fill: (white|#)", text) is None


def test_every_picture_of_a_page_is_there_and_has_a_text_alternative() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found: dict[str, list[str]] = {}
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        shown = re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", text)
        shown += [
            (*re.findall(r'alt="([^"]*)"', tag), *re.findall(r'src="([^"]*)"', tag))
            for tag in re.findall(r"<img [^>]*>", text)
        ]
        for alternative, source in shown:
            found.setdefault(Path(source).name, []).append(alternative)
            assert (page.parent / source).is_file(), f"{page}: {source}"
    assert {name for name, alternatives in found.items() if min(map(len, alternatives)) < 20} == set()
    assert {path.name for path in ASSETS.glob("*.svg")} <= found.keys()


def test_the_pictures_of_a_report_are_small_and_for_light_and_dark_pages() -> None:
    files = {path.name: path.stat().st_size for path in ASSETS.glob("*.webp")}
    assert files.keys() == {"report-light.webp", "report-dark.webp"}
    assert 10_000 < max(files.values()) < 150_000
    page = (ROOT / "docs/guides/report.md").read_text(encoding="utf-8")
    assert '<source media="(prefers-color-scheme: dark)" srcset="../assets/report-dark.webp">' in page


# ---------------------------------------------------------------------------------------------- loss curves
DATA = json.loads(curves.DATA.read_text(encoding="utf-8"))


def test_the_committed_curves_are_drawn_from_the_committed_numbers_of_the_committed_command() -> None:
    assert curves.PICTURE.read_text(encoding="utf-8") == curves.drawn(DATA), "run: python docs/curves.py --draw"
    assert DATA["command"] == f"ddpforge {' '.join(curves.COMMAND)}", "run: python docs/curves.py"


def test_losses_of_five_strategies_on_two_and_four_ranks_are_those_of_one_process_to_rounding() -> None:
    reference, *runs = DATA["runs"]
    assert (reference["strategy"], reference["ranks"]) == ("single", 1)
    assert [(run["strategy"], run["ranks"]) for run in runs] == [
        (name, n) for name in curves.STRATEGIES for n in (2, 4)
    ]
    assert {len(run["loss"]) for run in DATA["runs"]} == {curves.STEPS}
    largest = max(max(curves.differences(run, reference)) for run in runs)
    assert 0 < largest < 1e-7 < DATA["tolerance"] == 1e-5
    assert reference["loss"][0] > 5.3 > 3.4 > reference["loss"][-1]  # they train
    for page in ("README.md", "docs/guides/parity.md"):
        assert f" {curves.power(largest)}" in (ROOT / page).read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------- diagrams
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "checkpoint" else ()) for name in diagrams.DIAGRAMS]
)
def test_the_committed_diagram_is_drawn_by_the_code(name: str) -> None:
    drawn = (ASSETS / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn == diagrams.DIAGRAMS[name](), "run: python docs/diagrams.py"


def test_in_the_diagram_of_a_step_two_ranks_share_twelve_samples_in_micro_batches_of_three() -> None:
    ranks = diagrams.batches_of_ranks()
    assert [[len(batch) for batch in batches] for batches in ranks] == [[3, 3], [3, 3]]
    assert len({sample for batches in ranks for batch in batches for sample in batch}) == 12


def test_in_the_diagram_of_layouts_tensor_ranks_are_neighbours_and_share_samples() -> None:
    for places in (diagrams.fsdp_places(), diagrams.pipeline_places()):
        assert [place.tensor for place in places] == [0, 1] * 8
        assert all(one._replace(tensor=1) == two for one, two in zip(places[::2], places[1::2], strict=True))
        assert len({(place.row, place.column) for place in places}) == 8


def test_in_the_diagram_of_schedules_the_idle_time_is_that_of_the_page() -> None:
    """(p - 1) / (v·m + p - 1) for p stages, m micro-batches and v parts on each rank."""
    work = {name: diagrams.timed(name) for name in ("GPipe", "1F1B", "Interleaved1F1B")}
    assert [diagrams.idle(each) for each in work.values()] == pytest.approx([3 / 11, 3 / 11, 3 / 19])
    assert [diagrams.most_held(name, each[0]) for name, each in work.items()] == [8, 4, 5.5]
    assert [sum(map(len, each.values())) for each in work.values()] == [64, 64, 128]
