"""`ddpforge plugins list` and `plugins show`, as text and as JSON."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.fake_distributions import forgetting_modules_below, install

from ddpforge.cli.plugins import plugins
from ddpforge.cli.tables import print_table
from ddpforge.components.errors import AmbiguousComponent, BrokenComponent
from ddpforge.components.registry import Registry
from ddpforge.errors import PluginError, UsageError

NETS = """
    from collections.abc import Sequence
    from typing import Annotated
    from pydantic import Field
    from ddpforge.interfaces import Metric

    class WideNet:
        '''A net that is wide.'''
        def __init__(
            self,
            *,
            classes: Annotated[int, Field(ge=2, description="Number of classes.")],
            scale: Annotated[tuple[float, float], Field(description="[low, high]")] = (0.5, 1.5),
        ) -> None: ...

    def open_ended(**rest): ...

    def topk(k: Annotated[int, Field(ge=1)]): ...

    def plain(): ...
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    site = tmp_path / "site"
    install(
        site,
        "wide-nets",
        {
            "ddpforge.model": {"widenet": "wide_nets:WideNet", "open": "wide_nets:open_ended", "twice": "a:a"},
            "ddpforge.data": {"widenet-data": "wide_nets:plain", "open": "wide_nets:plain"},
            "ddpforge.metric": {"wide-top": "wide_nets:topk", "wide-plain": "wide_nets:plain"},
            "ddpforge.callback": {"watch": "wide_nets:topk"},
            "ddpforge.tracker": {"notebook": "wide_nets:plain"},
            "ddpforge.task": {"broken": "wide_broken:Task"},
        },
        version="0.2",
        modules={"wide_nets.py": NETS, "wide_broken.py": "import no_such_requirement"},
    )
    install(site, "other-nets", {"ddpforge.model": {"twice": "b:b"}})
    monkeypatch.syspath_prepend(site)
    with forgetting_modules_below(tmp_path):
        yield site


def call(*arguments: str) -> Result:
    # The same names as in `main`: click caches a command's help option at its first call.
    result = CliRunner().invoke(plugins, arguments, help_option_names=["-h", "--help"])
    if isinstance(result.exception, PluginError | UsageError):
        raise result.exception
    return result


def printed(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    return result.stdout


# -------------------------------------------------------------------------------------------------------- list
def test_list_shows_kind_name_distribution_and_target_and_imports_nothing(site: Path) -> None:
    lines = printed("list").splitlines()

    assert lines[0].split() == ["name", "kind", "from", "target", "description"]
    assert ["widenet", "model", "wide-nets", "0.2", "wide_nets:WideNet"] in [line.split()[:5] for line in lines]
    (ema,) = (line for line in lines if line.startswith("ema "))
    assert "ddpforge.builtin.callbacks.ema:EMA" in ema
    assert "average" in ema.partition(":EMA")[2]  # of the docstring
    assert "wide_nets" not in sys.modules
    starts = {line.index(f" {line.split()[1]} ") for line in lines}
    assert len(starts) == 1  # aligned


def test_list_shows_one_kind(site: Path) -> None:
    lines = printed("list", "callback").splitlines()

    assert {line.split()[1] for line in lines[1:]} == {"callback"}
    assert call("list", "callbakc").exit_code == 2


def test_list_marks_names_that_two_distributions_provide(site: Path) -> None:
    clashes = [line for line in printed("list", "model").splitlines() if "clash" in line]

    assert [line.split("clash: ")[1] for line in clashes] == [
        'use = "other-nets:twice"',
        'use = "wide-nets:twice"',
    ]


def test_list_prints_json(site: Path) -> None:
    listed = json.loads(printed("list", "model", "--json"))

    assert listed["schema_version"] == 1
    mine = {
        (row["name"], row["distribution"]): row for row in listed["components"] if row["distribution"].endswith("-nets")
    }
    assert mine["widenet", "wide-nets"] == {
        "kind": "model",
        "name": "widenet",
        "distribution": "wide-nets",
        "version": "0.2",
        "target": "wide_nets:WideNet",
        "clash": False,
    }
    assert [row["clash"] for (name, _), row in mine.items() if name == "twice"] == [True, True]


def test_list_imports_nothing_heavy() -> None:
    code = (
        "import sys; from ddpforge.cli.plugins import plugins; plugins(['list'], standalone_mode=False);"
        "print({'torch', 'pydantic', 'rich'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"


# -------------------------------------------------------------------------------------------------------- show
def test_show_documents_a_component_and_its_options(site: Path) -> None:
    assert printed("show", "widenet") == (
        "model widenet  (wide-nets 0.2, wide_nets:WideNet)\n"
        "\n"
        "A net that is wide.\n"
        "\n"
        "option   type            default     limits  description\n"
        "classes  integer         required    >= 2    Number of classes.\n"
        "scale    [float, float]  [0.5, 1.5]          [low, high]\n"
        "\n"
        "[model]\n"
        'use = "widenet"\n'
        "classes = 2\n"
    )


def test_show_prints_json(site: Path) -> None:
    shown = json.loads(printed("show", "widenet", "--json"))

    assert shown["entry"]["target"] == "wide_nets:WideNet"
    assert shown["documentation"] == "A net that is wide."
    assert shown["takes_more"] is False
    assert shown["options"][0] == {
        "name": "classes",
        "type": "integer",
        "default": None,
        "description": "Number of classes.",
        "limits": ">= 2",
        "example": "2",
    }
    assert tomllib.loads(shown["example"]) == {"model": {"use": "widenet", "classes": 2}}


@pytest.mark.parametrize(
    ("arguments", "example"),
    [
        (["wide-top"], {"task": {"metrics": [{"use": "wide-top", "k": 1}]}}),
        (["wide-plain"], {"task": {"metrics": ["wide-plain"]}}),
        (["watch"], {"callbacks": {"watch": {"k": 1}}}),
        (["notebook"], {"track": {"notebook": {}}}),
        (["widenet-data"], {"data": {"train": {"use": "widenet-data"}}}),
        (["wide-nets:watch"], {"callbacks": {"watch": {"use": "wide-nets:watch", "k": 1}}}),
        (["torch.optim:Adam", "--kind", "optimizer"], {"optimizer": {"use": "torch.optim:Adam"}}),
    ],
)
def test_the_example_is_a_part_of_a_recipe(site: Path, arguments: list[str], example: dict[str, Any]) -> None:
    assert tomllib.loads(json.loads(printed("show", *arguments, "--json"))["example"]) == example


def test_show_reports_a_component_that_accepts_any_option(site: Path) -> None:
    assert "Other options are passed to the component unchecked.\n" in printed("show", "open", "--kind", "model")


def test_show_accepts_unregistered_code_and_local_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def net(width: int = 3): 'Mine.'\n")
    monkeypatch.chdir(tmp_path)

    with forgetting_modules_below(tmp_path):
        shown = printed("show", "./mine.py:net", "--kind", "model")

    assert shown.startswith("model ./mine.py:net\n\nMine.\n")
    assert 'use = "./mine.py:net"' in shown


def test_show_of_an_unknown_name_suggests_a_similar_one(site: Path) -> None:
    for arguments in (["widnet"], ["widnet", "--kind", "model"]):
        with pytest.raises(UsageError) as caught:
            call("show", *arguments)
        assert "named `widnet`" in caught.value.message
        assert "did you mean `widenet`?" in caught.value.hints
        assert caught.value.exit_code == 2


def test_show_of_a_distribution_names_its_components(site: Path) -> None:
    with pytest.raises(UsageError, match="there is no component named `other-nets`") as caught:
        call("show", "other-nets")
    assert caught.value.hints[0] == "`other-nets` is a distribution with `twice`"


def test_show_needs_the_kind_if_the_name_is_ambiguous(site: Path) -> None:
    with pytest.raises(UsageError) as caught:
        call("show", "open")
    assert caught.value.hints == (
        "ddpforge plugins show open --kind data",
        "ddpforge plugins show open --kind model",
    )

    with pytest.raises(UsageError, match=r"the kind of `torch\.optim:SGD` is unknown") as caught:
        call("show", "torch.optim:SGD")
    assert "optimizer" in caught.value.hints[0]


def test_show_of_broken_and_ambiguous_components_is_an_error(site: Path) -> None:
    with pytest.raises(BrokenComponent, match="no_such_requirement"):
        call("show", "broken")
    with pytest.raises(AmbiguousComponent):
        call("show", "twice")


def test_tables_on_a_terminal_keep_brackets_and_wrap_the_last_column(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")

    print_table(("option", "type"), [("scale", "[float, float]")])

    out = capsys.readouterr().out
    assert "[float, float]" in out
    print_table(("name", "text"), [("a" * 20, "some words " * 10)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[1:])) <= 80
    assert lines[2].startswith(" " * 22 + "some")


@pytest.mark.parametrize(
    ("kind", "name"),
    [(entry.kind, entry.name) for entry in Registry.installed().entries() if entry.distribution == "ddpforge"],
)
def test_every_builtin_component_documents_itself_and_all_options(kind: str, name: str) -> None:
    shown = json.loads(printed("show", name, "--kind", kind, "--json"))

    assert shown["documentation"]
    assert [option["name"] for option in shown["options"] if not option["description"]] == []
    assert tomllib.loads(shown["example"])
