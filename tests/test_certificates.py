"""docs/certificates.md: made from the rows of `ddpforge certify` for the present recipes; a hundred layouts."""

from types import ModuleType

import pytest
from support.docs_modules import docs_module


@pytest.fixture(scope="module")
def certificates() -> ModuleType:
    return docs_module("certificate")


def test_page_and_pictures_are_made_from_the_rows(certificates: ModuleType) -> None:
    old = [path.name for path, text in certificates.files().items() if path.read_text(encoding="utf-8") != text]
    assert old == [], "run: python docs/certificate.py"


def test_rows_are_of_the_present_recipes(certificates: ModuleType) -> None:
    for name in certificates.NAMES:
        kept, certificate = certificates.measured(name)
        assert kept["digest"] == certificates.digest(name), f"run: python docs/certificate.py --train {name}"
        assert certificate.subject["steps"] >= 20


def test_a_hundred_layouts_of_four_models_train_like_one_process(certificates: ModuleType) -> None:
    rows = [row for name in certificates.NAMES for row in certificates.measured(name)[1].rows]
    assert [row.layout for row in rows if row.verdict != "same"] == []
    assert len(rows) >= 100
    assert {row.use for row in rows} >= {"single", "ddp", "fsdp", "pipeline", "deepspeed"}
    assert max(row.ranks for row in rows) == 8
