"""The museum: its page is what its results give, and no case is wrong or crashes for ddpforge."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS: dict[str, Any] = json.loads((ROOT / "museum" / "results.json").read_text())
FAST = ["accumulation-last-window", "tokens-over-micro-batches", "nan-in-a-step", "resume-with-changed-decay"]


@pytest.fixture
def museum(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    import museum.page

    return museum


def judged(trainer: str, *cases: str) -> dict[str, str]:
    command = [sys.executable, "-m", "museum.worker", trainer, *cases]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = map(json.loads, done.stdout.splitlines())
    return {row["case"]: f"{row['verdict']}: {row['text']}" for row in rows}


def test_the_page_is_made_of_the_results(museum: Any) -> None:
    assert (ROOT / "docs" / "museum.md").read_text() == museum.page.page(RESULTS), (
        "run .venv/bin/python -m museum --page"
    )


def test_results_are_those_of_the_cases(museum: Any) -> None:
    cases = museum.case.all_cases()
    assert list(RESULTS["cases"]) == list(cases)
    assert len(cases) >= 60
    for name, rows in RESULTS["cases"].items():
        assert sorted(rows) == sorted(cases[name].tried_by()), name


def test_every_case_has_a_reference_that_becomes_a_link(museum: Any) -> None:
    for case in museum.case.all_cases().values():
        assert case.references, case.name
        for text in case.references:
            assert re.search(r"\]\(https://", museum.page.reference(text))


def test_no_result_of_ddpforge_is_wrong_or_a_crash() -> None:
    found = {name: rows["forge"]["verdict"] for name, rows in RESULTS["cases"].items() if "forge" in rows}
    assert {name for name, verdict in found.items() if verdict not in ("right", "refused")} == set()


def test_wrong_results_have_a_number() -> None:
    for name, rows in RESULTS["cases"].items():
        for row in rows.values():
            assert row["verdict"] != "wrong" or "in place of" in row["text"], name


@pytest.mark.slow
def test_cases_are_right_for_ddpforge_now() -> None:
    assert {name: verdict.partition(":")[0] for name, verdict in judged("forge", *FAST).items()} == dict.fromkeys(
        FAST, "right"
    )


@pytest.mark.slow
def test_the_loop_of_tutorials_is_wrong_with_its_number() -> None:
    assert judged("loop", "accumulation-last-window") == {
        "accumulation-last-window": "wrong: weights.w[0]: -3.75 in place of -7.5"
    }


@pytest.mark.full
def test_all_cases_are_right_or_refused_by_ddpforge(museum: Any) -> None:
    names = [name for name, case in museum.case.all_cases().items() if "forge" in case.tried_by()]
    found = judged("forge", *names)
    wrong = {name: verdict for name, verdict in found.items() if not verdict.startswith(("right", "refused"))}
    assert wrong == {}
    assert found.keys() == set(names)
