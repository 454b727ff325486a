"""Registry of components: the index, the four ways to name a component, errors of broken components, building."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from support.fake_distributions import forgetting_modules_below, install
from torch import nn

from ddpforge.components.errors import (
    AmbiguousComponent,
    BrokenComponent,
    BuildFailed,
    RefusedOptions,
    UnknownComponent,
)
from ddpforge.components.installed import Entry
from ddpforge.components.kinds import KINDS
from ddpforge.components.local_code import installed_path
from ddpforge.components.registry import Registry
from ddpforge.errors import ExitCode, PluginError
from ddpforge.recipe.report import render
from ddpforge.recipe.schema import Component

WIDE = {"ddpforge.model": {"widenet": "wide_nets:WideNet"}}
WIDE_SOURCE = """
    class WideNet:
        def __init__(self, *, width: int = 8) -> None:
            self.width = width
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields an empty folder of installed distributions, first on the path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    with forgetting_modules_below(tmp_path):
        yield folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yields a recipe's folder."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    path = [*sys.path]
    with forgetting_modules_below(tmp_path):
        yield folder
    sys.path[:] = path


def write(file: Path, source: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dedent(source))
    return file


def broken(kind: str, use: str, base: Path = Path()) -> BrokenComponent:
    with pytest.raises(BrokenComponent) as caught:
        Registry.installed().load(kind, use, base)
    return caught.value


# -------------------------------------------------------------------------------------------------- the index
def test_index_lists_names_and_imports_nothing(site: Path) -> None:
    install(site, "wide-nets", WIDE, version="0.2", modules={"wide_nets.py": WIDE_SOURCE})

    registry = Registry.installed()

    expected = Entry("model", "widenet", distribution="wide-nets", version="0.2", target="wide_nets:WideNet")
    assert expected in registry.entries()
    assert expected in registry.entries("model")
    assert expected not in registry.entries("data")
    assert "widenet" in registry.names("model")
    assert "wide_nets" not in sys.modules


def test_entries_and_names_are_sorted() -> None:
    registry = Registry(Entry(kind, name, "d", "1", "m:a") for kind in ("task", "data") for name in "ba")

    assert [(entry.kind, entry.name) for entry in registry.entries()] == [
        ("data", "a"),
        ("data", "b"),
        ("task", "a"),
        ("task", "b"),
    ]
    assert registry.names("data") == ["a", "b"]


def test_ddpforges_own_components_are_in_the_index() -> None:
    registry = Registry.installed()

    assert {"single", "ddp"} <= set(registry.names("strategy"))
    assert all(registry.names(kind) for kind in KINDS)


def test_other_distributions_are_ignored_and_not_imported(site: Path) -> None:
    for number in range(125):
        install(site, f"other-{number}", {"console_scripts": {f"tool{number}": "other:main"}})
    install(site, "wide-nets", WIDE)
    before = set(sys.modules)

    registry = Registry.installed()

    assert [entry.distribution for entry in registry.entries("model") if entry.name == "widenet"] == ["wide-nets"]
    assert not any(entry.distribution.startswith("other-") for entry in registry.entries())
    assert set(sys.modules) == before


def test_listing_needs_neither_torch_nor_pydantic() -> None:
    code = """
        import sys
        from ddpforge.components.registry import Registry
        assert Registry.installed().entries()
        print({"torch", "pydantic"} & set(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_entry_point_groups_of_other_programs_and_unknown_kinds_are_ignored(site: Path) -> None:
    install(
        site, "strange", {"ddpforge.modle": {"a": "m:a"}, "ddpforge": {"b": "m:b"}, "x.ddpforge.model": {"c": "m:c"}}
    )

    assert not [entry for entry in Registry.installed().entries() if entry.distribution == "strange"]


def test_first_installation_of_a_distribution_on_the_path_is_used(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "Wide_Nets", {"ddpforge.model": {"old": "m:Old", "both": "m:Old"}}, version="1")
    first = tmp_path / "first"
    install(first, "wide.nets", {"ddpforge.model": {"both": "m:New"}}, version="2")
    monkeypatch.syspath_prepend(first)

    entries = [entry for entry in Registry.installed().entries("model") if entry.target.startswith("m:")]

    assert entries == [Entry("model", "both", "wide.nets", "2", "m:New")]


def test_first_installation_without_components_hides_a_later_one_with_components(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "wide-nets", WIDE, version="1")
    first = tmp_path / "first"
    install(first, "wide-nets", {}, version="2")
    monkeypatch.syspath_prepend(first)

    assert "widenet" not in Registry.installed().names("model")


def test_the_remains_of_an_uninstalled_distribution_are_ignored(site: Path) -> None:
    install(site, "wide-nets", WIDE)
    (site / "wide_nets-1.0.dist-info" / "METADATA").unlink()

    assert "widenet" not in Registry.installed().names("model")


def test_distributions_can_be_disabled_by_name(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "wide-nets", WIDE)
    install(site, "deep-nets", {"ddpforge.model": {"deepnet": "deep:Net"}})
    install(site, "kept", {"ddpforge.model": {"kept": "kept:Net"}})

    monkeypatch.setenv("DDPFORGE_DISABLE_PLUGINS", "Wide.Nets, deep_nets")

    names = Registry.installed().names("model")
    assert "kept" in names
    assert not {"widenet", "deepnet"} & set(names)


# ------------------------------------------------------------------------------------------------ naming one
def test_error_for_an_unknown_name_suggests_the_nearest(site: Path) -> None:
    install(site, "wide-nets", WIDE)

    with pytest.raises(UnknownComponent) as caught:
        Registry.installed().load("model", "widnet")

    error = caught.value
    assert (error.kind, error.use) == ("model", "widnet")
    assert "widenet" in error.known
    assert error.message == "there is no model named `widnet`"
    assert error.hints[0] == "did you mean `widenet`?"
    assert error.exit_code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize("use", ["naive_split", "data_parallel"])
def test_error_for_a_strategy_of_a_missing_package_names_the_package(use: str) -> None:
    with pytest.raises(UnknownComponent) as caught:
        Registry.installed().load("strategy", use)
    assert caught.value.hints[0] == "install ddpforge-teaching, which has naive_split and data_parallel"


@pytest.mark.parametrize("use", ["", "cosine", "no-such-distribution:mlp", ":mlp", "9:x"])
def test_names_that_match_no_component_are_unknown(use: str) -> None:
    with pytest.raises(UnknownComponent):
        Registry.installed().load("model", use)


def test_two_providers_of_a_name_raise_an_error_only_when_it_is_loaded(site: Path) -> None:
    install(site, "a-nets", {"ddpforge.model": {"net": "a_nets:Net"}}, modules={"a_nets.py": "class Net: ..."})
    install(site, "b-nets", {"ddpforge.model": {"net": "b_nets:Net"}}, modules={"b_nets.py": "class Net: ..."})
    registry = Registry.installed()

    assert registry.names("model").count("net") == 1
    with pytest.raises(AmbiguousComponent) as caught:
        registry.load("model", "net")

    error = caught.value
    assert [entry.distribution for entry in error.providers] == ["a-nets", "b-nets"]
    assert error.message == "model `net` is provided by a-nets 1.0 and by b-nets 1.0"
    assert [hint.partition(": ")[2] for hint in error.hints] == ['use = "a-nets:net"', 'use = "b-nets:net"']
    assert registry.load("model", "b-nets:net").__module__ == "b_nets"
    assert registry.load("model", "A_Nets:net").__module__ == "a_nets"


def test_distribution_name_takes_precedence_over_module_name(site: Path) -> None:
    source = "def net(): return 'by module'\ndef other(): return 'by name'"
    install(site, "nets", {"ddpforge.model": {"net": "nets:other"}}, modules={"nets.py": source})
    registry = Registry.installed()

    assert registry.load("model", "nets:net")() == "by name"
    assert registry.load("task", "nets:net")() == "by module"


def test_unregistered_code_is_named_by_module_and_attribute() -> None:
    registry = Registry()

    assert registry.load("optimizer", "torch.optim:RMSprop") is torch.optim.RMSprop
    assert registry.load("model", "torch:nn.Linear") is nn.Linear


# ----------------------------------------------------------------------------------------- broken components
def test_error_names_a_missing_requirement_and_the_line_that_imports_it(site: Path) -> None:
    install(
        site,
        "extra",
        {"ddpforge.model": {"broken": "extra.broken:Net", "sound": "extra.sound:Net"}},
        version="0.2",
        modules={
            "extra/__init__.py": "",
            "extra/broken.py": "import math\nimport no_such_requirement\n",
            "extra/sound.py": "class Net: ...",
        },
    )

    error = broken("model", "broken")

    file = site / "extra" / "broken.py"
    assert error.where == f"{file}:2"
    assert error.missing == "no_such_requirement"
    assert error.entry is not None
    assert error.entry.source == "extra 0.2"
    assert isinstance(error.cause, ModuleNotFoundError)
    assert error.message == (
        "model `broken` of extra 0.2 cannot be imported: "
        f"ModuleNotFoundError: No module named 'no_such_requirement' ({file}:2)"
    )
    assert error.hints == ("install the package that provides the module `no_such_requirement`",)
    assert Registry.installed().load("model", "sound").__name__ == "Net"


def test_warnings_of_a_plugins_import_are_not_shown_but_those_of_local_code_are(
    site: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "import logging\nlogging.getLogger('a_library').warning('deprecated')\nclass Net: ..."
    install(site, "loud", {"ddpforge.model": {"loud": "loud_plugin:Net"}}, modules={"loud_plugin.py": text})
    Registry.installed().load("model", "loud")
    assert caplog.messages == []
    Registry.installed().load("model", f"./{write(folder / 'loud_here.py', text).name}:Net", folder)
    assert caplog.messages == ["deprecated"]


def test_error_shows_how_to_name_a_file_next_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    write(tmp_path / "mine" / "net.py", "class Net: ...")
    with pytest.raises(BrokenComponent, match="No module named 'mine'") as caught:
        Registry.installed().load("model", "mine.net:Net", tmp_path)
    assert caught.value.hints == ('name a file next to the recipe by its path: use = "./mine/net.py:…"',)
    # The same after local code has put its folder on the path: a copy of the file must go into the run's folder.
    write(tmp_path / "parts.py", "import mine.net\nclass Net: ...")
    with forgetting_modules_below(tmp_path):
        Registry().load("model", "./parts.py:Net", tmp_path)
        with pytest.raises(BrokenComponent, match=r"No module named 'mine\.net'") as caught:
            Registry.installed().load("model", "mine.net:Net", tmp_path)
    assert caught.value.hints == ('name a file next to the recipe by its path: use = "./mine/net.py:…"',)


def test_import_error_in_a_library_names_the_line_of_the_plugin(site: Path) -> None:
    install(
        site,
        "extra",
        {"ddpforge.model": {"net": "extra:Net"}},
        modules={"extra.py": "x = 1\n\nimport library\n", "library.py": "raise RuntimeError('no driver')\n"},
    )

    error = broken("model", "net")

    assert error.where == f"{site / 'extra.py'}:3"
    assert error.missing is None
    assert "RuntimeError: no driver" in error.message


def test_missing_submodule_of_an_installed_module_is_not_a_missing_requirement(site: Path) -> None:
    install(site, "extra", {"ddpforge.model": {"net": "extra:Net"}}, modules={"extra.py": "import json.newer\n"})

    error = broken("model", "net")

    assert error.missing is None
    assert "No module named 'json.newer'" in error.message


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def Net(:\n", "SyntaxError"),
        ("raise SystemExit('usage: …')\n", "SystemExit: usage: …"),
        ("def __getattr__(name): raise ImportError('lazily')\n", "ImportError: lazily"),
    ],
)
def test_any_error_at_import_is_reported_with_its_line(site: Path, source: str, said: str) -> None:
    install(site, "extra", {"ddpforge.model": {"net": "extra:Net"}}, modules={"extra.py": source})

    error = broken("model", "net")

    assert said in error.message
    assert error.where == f"{site / 'extra.py'}:1"


@pytest.mark.parametrize(
    ("target", "said", "hint"),
    [
        ("extra:Nett", "extra has no `Nett`", "did you mean `Net`?"),
        ("extra:Net.build.x", "extra has no `Net.build.x`", None),
        ("extra:SIZE", "is a value of type `int`, which cannot be called", None),
        ("extra", "names a module without a class or function", "write `extra:Name`"),
        (
            "no_such_module:Net",
            "No module named 'no_such_module'",
            "install the package that provides the module `no_such_module`",
        ),
    ],
)
def test_entry_point_without_a_usable_target_is_reported(site: Path, target: str, said: str, hint: str | None) -> None:
    install(site, "extra", {"ddpforge.model": {"net": target}}, modules={"extra.py": "SIZE = 3\nclass Net: ..."})

    error = broken("model", "net")

    assert error.message.startswith("model `net` of extra 1.0 ")
    assert said in error.message
    assert error.hints == ((hint,) if hint else ())


@pytest.mark.parametrize("api", ["4", "'1'", "None"])
def test_a_plugin_for_a_newer_api_is_rejected(site: Path, api: str) -> None:
    source = f"ddpforge_plugin_api = {api}\nclass Net: ..."
    install(site, "extra", {"ddpforge.model": {"net": "extra:Net"}}, modules={"extra.py": source})

    error = broken("model", "net")

    assert f"is written for plugin API {api.strip(chr(39))}; this ddpforge supports version 3" in error.message
    assert error.hints == ("update ddpforge, or install an older version of the plugin",)


def test_a_strategy_for_the_first_api_is_rejected(site: Path) -> None:
    source = "ddpforge_plugin_api = 1\nclass Net: ..."
    install(site, "extra", {"ddpforge.strategy": {"net": "extra:Net"}}, modules={"extra.py": source})

    error = broken("strategy", "net")

    assert "is written for plugin API 1; version 3 changed the contract of this kind" in error.message
    assert "docs/extend/upgrade.md" in error.hints[0]


@pytest.mark.parametrize("api", [1, 2])
def test_a_sampler_for_an_older_api_is_rejected(site: Path, api: int) -> None:
    source = f"ddpforge_plugin_api = {api}\nclass Pairs: ..."
    install(site, "extra", {"ddpforge.sampler": {"pairs": "extra:Pairs"}}, modules={"extra.py": source})

    error = broken("sampler", "pairs")

    assert f"is written for plugin API {api}; version 3 changed the contract of this kind" in error.message


def test_component_in_the_old_sampler_group_is_listed_and_rejected_before_import(site: Path) -> None:
    source = "raise ImportError('cannot import name Order')"
    install(site, "extra", {"ddpforge.order": {"pairs": "extra:Pairs"}}, modules={"extra.py": source})

    assert "pairs" in Registry.installed().names("sampler")
    error = broken("sampler", "pairs")

    assert "entry-point group `ddpforge.order`, which is now `ddpforge.sampler`" in error.message
    assert "docs/extend/upgrade.md" in error.hints[0]


@pytest.mark.parametrize("api", [1, 2])
def test_plugin_for_an_older_api_loads_if_its_contract_is_unchanged(site: Path, api: int) -> None:
    source = f"ddpforge_plugin_api = {api}\nclass Net: ..."
    install(site, "extra", {"ddpforge.model": {"net": "extra:Net"}}, modules={"extra.py": source})

    assert Registry.installed().load("model", "net").__name__ == "Net"


OLD_TASK = """from ddpforge.interfaces import Task
class Mine(Task):
    {name} = ("a", "b")
    def loss(self, model, batch): ...
"""


def test_a_class_with_a_name_of_an_older_api_is_refused_with_the_new_name(folder: Path) -> None:
    write(folder / "old.py", OLD_TASK.format(name="turns"))
    write(folder / "new.py", OLD_TASK.format(name="updates"))
    # A module that states its version may have an attribute `turns` of its own.
    write(folder / "states.py", OLD_TASK.format(name="turns") + "\nddpforge_plugin_api = 3\n")

    with pytest.raises(BrokenComponent) as refused:
        Registry().load("task", "./old.py:Mine", base=folder)

    assert "has `turns`, which is `updates` since plugin API 3" in refused.value.message
    for file in ("new", "states"):
        assert Registry().load("task", f"./{file}.py:Mine", base=folder).__name__ == "Mine"


# ----------------------------------------------------------------------------------------------- local files
def test_a_local_file_is_imported_once_and_its_classes_pickle(folder: Path) -> None:
    write(folder / "code" / "my.nets.py", "class Net:\n    size = 3\n")
    registry = Registry()

    net = registry.load("model", "./code/my.nets.py:Net", base=folder)

    assert registry.load("model", "./my.nets.py:Net", base=folder / "code") is net
    assert pickle.loads(pickle.dumps(net())).size == 3


def test_files_with_the_same_name_in_two_folders_are_two_modules(folder: Path) -> None:
    write(folder / "a" / "net.py", "def net(): return 'a'")
    write(folder / "b" / "net.py", "def net(): return 'b'")

    loaded = [Registry().load("model", "./net.py:net", base=folder / name) for name in "ab"]

    assert [net() for net in loaded] == ["a", "b"]


def test_local_file_outside_the_recipes_folder_is_rejected(folder: Path) -> None:
    outside = write(folder.parent / "outside.py", "def net(): ...")
    write(folder.parent / "recipes-too" / "net.py", "def net(): ...")
    (folder / "link.py").symlink_to(outside)
    (folder / "linked").symlink_to(folder.parent)

    for use in (
        "./../outside.py:net",
        "../outside.py:net",
        f"{outside}:net",
        "./link.py:net",
        "./linked/outside.py:net",
        "../recipes-too/net.py:net",
    ):
        error = broken("model", use, folder)
        assert error.message == f"model `{use}` is not in the recipe's folder {folder}"
        assert not [name for name in sys.modules if name.startswith("ddpforge_local_outside")]


def test_links_within_the_recipes_folder_are_accepted(folder: Path) -> None:
    write(folder / "code" / "net.py", "def net(): ...")
    (folder / "link.py").symlink_to(folder / "code" / "net.py")
    registry = Registry()

    assert registry.load("model", "./link.py:net", folder) is registry.load("model", "./code/net.py:net", folder)


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("./absent.py:Net", "absent.py is not there"),
        ("./code:Net", "code is not a Python file"),
        ("./net.txt:Net", "net.txt is not a Python file"),
        ("./net.py", "names a module without a class or function"),
        ("./net.py:Nett", "./net.py has no `Nett`"),
        ("./net.py:built", "is an object of the class Linear, not a class"),
        ("./net.py:SIZE", "is a value of type `int`, which cannot be called"),
        ("./n\0.py:Net", "null"),
        (f"./{'n' * 300}.py:Net", "cannot be loaded"),
    ],
)
def test_local_file_without_a_usable_component_is_reported(folder: Path, use: str, said: str) -> None:
    write(folder / "net.py", "SIZE = 3\nclass Net: ...\nimport torch\nbuilt = torch.nn.Linear(1, 1)")
    write(folder / "net.txt", "class Net: ...")
    (folder / "code").mkdir()

    assert said in broken("model", use, folder).message


@pytest.mark.parametrize(
    ("kind", "use", "hint"),
    [
        (
            "model",
            "./net.py:built",
            'write a function that returns it, def build(): return built, and use = "./net.py:build"',
        ),
        ("model", "./net.py:own", 'write use = "./net.py:Net", if its constructor needs only options'),
        ("data", "./net.py:loader", "name its dataset: write def dataset(): return loader.dataset"),
        ("data", "./net.py:samples", "write a function that returns it, def build(): return samples"),
        ("optimizer", "./net.py:sgd", "name a function of the parameters, e.g. `torch.optim:SGD`"),
        ("task", "./net.py:loss", 'use = "torch.nn.functional:cross_entropy"'),
        ("model", "./nett.py:Net", "did you mean `./net.py`?"),
        ("model", "./net:Net", "did you mean `./net.py:Name`?"),
    ],
)
def test_an_object_of_a_script_has_a_hint_with_what_to_write(folder: Path, kind: str, use: str, hint: str) -> None:
    write(
        folder / "net.py",
        "import torch\nfrom torch import nn\nclass Net(nn.Module): ...\nbuilt, own = nn.Linear(1, 1), Net()\n"
        "sgd, loss = torch.optim.SGD(built.parameters(), lr=0.1), nn.CrossEntropyLoss()\nsamples = [(0, 1)]\n"
        "loader = torch.utils.data.DataLoader(samples)\n",
    )
    assert hint in "; ".join(broken(kind, use, folder).hints)


def test_local_file_loads_after_its_error_is_fixed(folder: Path) -> None:
    file = write(folder / "net.py", "\n\nimport no_such_requirement\n")
    error = broken("model", "./net.py:Net", folder)
    assert error.where == f"{file}:3"
    assert error.missing == "no_such_requirement"

    write(file, "class Net: ...  # fixed, and of another length")

    assert Registry().load("model", "./net.py:Net", folder).__name__ == "Net"


def test_changed_local_file_and_its_importers_are_imported_again(folder: Path) -> None:
    """Without this, a later run in the same process would train other code than the copy in its folder."""
    write(folder / "net.py", "from .size import SIZE\nclass Net:\n    size = SIZE")
    found = []
    for size in (1, 22, 333):
        write(folder / "size.py", f"SIZE = {size}")
        net = Registry().load("model", "./net.py:Net", folder)
        assert Registry().load("model", "./net.py:Net", folder) is net
        found.append(net.size)  # type: ignore[attr-defined]
    assert found == [1, 22, 333]


def test_a_local_file_imports_its_neighbours_by_plain_names_as_a_script_does(folder: Path) -> None:
    """From its own folder and from the recipe's; each file is one module under all its names."""
    write(folder / "shared_of_recipe.py", "class Base:\n    of = 'recipe'")
    write(folder / "nets/blocks_of_net.py", "from shared_of_recipe import Base\nclass Block(Base): ...")
    write(
        folder / "nets/plain.py",
        "import blocks_of_net\nfrom nets.deep_of_net import DEEP\nclass Net(blocks_of_net.Block):\n"
        "    def later(self):\n        from late_of_net import LATE\n        return LATE",
    )
    write(folder / "nets/deep_of_net.py", "from blocks_of_net import Block\nDEEP = Block")
    write(folder / "nets/late_of_net.py", "LATE = 3")
    registry = Registry()
    net = registry.load("model", "./nets/plain.py:Net", folder)

    assert net().of == "recipe"
    assert net().later() == 3
    assert registry.load("model", "./nets/blocks_of_net.py:Block", folder) is net.__mro__[1]  # type: ignore[attr-defined]
    assert registry.load("model", "./shared_of_recipe.py:Base", folder) is net.__mro__[2]  # type: ignore[attr-defined]


def test_a_neighbour_that_the_recipe_names_first_is_the_same_module_for_its_importers(folder: Path) -> None:
    write(folder / "base_first.py", "from user_second import NAME\nclass Base: ...")
    write(folder / "user_second.py", "NAME = 'x'\ndef task():\n    from base_first import Base\n    return Base")
    registry = Registry()
    base = registry.load("model", "./base_first.py:Base", folder)
    assert registry.load("task", "./user_second.py:task", folder)() is base


def test_installed_modules_come_before_files_next_to_the_recipe(folder: Path) -> None:
    for name in ("json", "pydantic"):
        write(folder / f"{name}.py", "raise RuntimeError('not this one')")
    write(folder / "net.py", "import json, pydantic\nfrom collections import abc\nclass Net: ...")
    assert Registry().load("model", "./net.py:Net", folder).__name__ == "Net"


def test_neighbours_of_two_recipes_with_one_plain_name_are_two_modules(folder: Path) -> None:
    found = []
    for name in ("one", "two"):
        write(folder / name / "net.py", "from layers_next import OF\nclass Net:\n    of = OF")
        write(folder / name / "layers_next.py", f"OF = {name!r}")
        found.append(Registry().load("model", "./net.py:Net", folder / name))
    assert [one.of for one in found] == ["one", "two"]  # type: ignore[attr-defined]


def test_a_changed_neighbour_with_a_plain_name_is_imported_again(folder: Path) -> None:
    write(folder / "net.py", "from size_next import SIZE\nclass Net:\n    size = SIZE")
    found = []
    for size in (1, 22):
        write(folder / "size_next.py", f"SIZE = {size}")
        found.append(Registry().load("model", "./net.py:Net", folder).size)  # type: ignore[attr-defined]
    assert found == [1, 22]


def test_an_error_in_a_neighbour_names_its_line(folder: Path) -> None:
    write(folder / "net.py", "import broken_next")
    file = write(folder / "broken_next.py", "\nraise RuntimeError('no')")
    assert broken("model", "./net.py:Net", folder).where == f"{file}:2"


def test_folders_of_local_code_are_last_on_the_path_and_are_not_searched_for_plugins(folder: Path) -> None:
    before = installed_path()
    write(folder / "net.py", "import last_next\nclass Net: ...")
    write(folder / "last_next.py", "")
    Registry().load("model", "./net.py:Net", folder)
    assert sys.path[len(before)] == str(folder)
    assert installed_path() == before


def test_local_files_import_each_other_separately_for_each_recipe(folder: Path) -> None:
    found = []
    for name in ("one", "two"):
        write(
            folder / name / "net.py", "from .layers import Block\nfrom .deep.blocks import DEEP\nclass Net(Block): ..."
        )
        write(folder / name / "layers.py", f"class Block:\n    of = {name!r}")
        write(folder / name / "deep/blocks.py", "from ..layers import Block\nDEEP = Block.of")
        found.append(Registry().load("model", "./net.py:Net", folder / name))
        assert Registry().load("model", "./layers.py:Block", folder / name) is found[-1].__mro__[1]  # type: ignore[attr-defined]
    assert [one.of for one in found] == ["one", "two"]  # type: ignore[attr-defined]
    assert not {"layers", "deep", "net"} & sys.modules.keys()


def test_file_whose_name_is_not_an_identifier_can_be_loaded(folder: Path) -> None:
    for name in ("my-net.py", "my_net.py"):
        write(folder / name, f"class Net:\n    file = {name!r}")
        assert Registry().load("model", f"./{name}:Net", folder).file == name  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------- building
def test_component_receives_its_options_and_the_arguments_in_its_signature(folder: Path) -> None:
    write(
        folder / "parts.py",
        """
        def cosine(horizon, warmup=0): return horizon, warmup
        def constant(): return "constant"
        """,
    )

    def build(name: str, **options: Any) -> Any:
        component = Component(use=f"./parts.py:{name}", options=options, base=folder)
        return Registry().build("schedule", component, horizon=7)

    assert build("cosine", warmup=2) == (7, 2)
    assert build("constant") == "constant"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].given])
def test_argument_passed_by_ddpforge_is_rejected_as_an_option(folder: Path, kind: str) -> None:
    name = next(iter(KINDS[kind].given))
    write(folder / "parts.py", "def part(**anything): ...")
    component = Component(use="./parts.py:part", options={name: 1}, base=folder)

    with pytest.raises(PluginError, match=f"`{name}` is not an option of {kind} `./parts.py:part`"):
        Registry().build(kind, component, **{name: 2})


@pytest.mark.parametrize("kind", ["data", "sampler"])
def test_ddpforge_passes_no_argument_for_a_parameter_with_a_default(folder: Path, kind: str) -> None:
    """Regression: a dataset with `seed: int = 42` received train.seed, for training and for evaluation."""
    write(
        folder / "parts.py",
        """
        class Own:
            epoch_order = None
            def __init__(self, *, seed: int = 42): self.seed = seed
            def __len__(self): return 1
            def __getitem__(self, i): return self.seed
        class Asks(Own):
            def __init__(self, *, seed: int): self.seed = seed
        """,
    )

    def built(name: str, **options: Any) -> Any:
        table = Registry().options_model(kind, f"./parts.py:{name}", folder).model_validate_json(json.dumps(options))
        return Registry().build(kind, Component(use=f"./parts.py:{name}", options=dict(table), base=folder), seed=7)

    assert [built("Own").seed, built("Own", seed=3).seed, built("Asks").seed] == [42, 3, 7]
    with pytest.raises(ValidationError, match="Extra inputs"):
        built("Asks", seed=3)


def test_error_of_a_component_that_rejects_its_options_is_reported() -> None:
    component = Component(use="torch.optim:RMSprop", options={"lr": -1.0})

    with pytest.raises(PluginError) as caught:
        Registry().build("optimizer", component, params=nn.Linear(2, 2).parameters())

    assert caught.value.message == ("optimizer `torch.optim:RMSprop` cannot be built: Invalid learning rate: -1.0")
    assert caught.value.hints == ()  # the component's own message is enough


def test_value_error_raised_by_a_component_is_reported_with_its_line_without_traceback(folder: Path) -> None:
    write(folder / "parts.py", "def check():\n    raise ValueError('too wide')\ndef part(): check()")
    with pytest.raises(RefusedOptions, match=r"model `\./parts\.py:part` cannot be built: too wide") as caught:
        Registry().build("model", Component(use="./parts.py:part", base=folder))
    assert caught.value.hints[0].endswith("parts.py:2, in check")
    assert caught.value.trace == ""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("float('wide')", "raised ValueError while it was built: could not convert string to float"),
        ("None + 1", "raised TypeError while it was built: unsupported operand"),
        ("import json; json.loads('{')", "raised JSONDecodeError while it was built"),
    ],
)
def test_programming_error_in_a_constructor_keeps_its_traceback(folder: Path, code: str, said: str) -> None:
    write(
        folder / "parts.py", f"class Part:\n    def __init__(self):\n        self.build()\n    def build(self): {code}"
    )
    with pytest.raises(BuildFailed) as caught:
        Registry().build("model", Component(use="./parts.py:Part", base=folder))
    assert said in caught.value.message
    assert caught.value.hints[0].endswith("parts.py:4, in Part.build")
    assert caught.value.trace.count("parts.py") == 2
    assert "registry.py" not in caught.value.trace
    assert caught.value.trace.rstrip() in render(caught.value)


def test_a_built_in_component_inside_one_of_a_plugin_refuses_options_without_traceback(folder: Path) -> None:
    code = """
        from ddpforge.builtin.models.lora import Adapters
        from torch import nn
        def part(): return Adapters(targets=["query"]).put_into(nn.Sequential(nn.Linear(2, 2)))
    """
    write(folder / "parts.py", code)
    with pytest.raises(RefusedOptions, match=r"cannot be built: peft cannot adapt query: ") as caught:
        Registry().build("model", Component(use="./parts.py:part", base=folder))
    assert caught.value.trace == ""


def test_options_that_do_not_match_the_signature_are_reported_without_traceback(folder: Path) -> None:
    write(folder / "parts.py", "def part(width: int): ...")
    with pytest.raises(RefusedOptions, match=r"cannot be built: part\(\) missing 1 required") as caught:
        Registry().build("model", Component(use="./parts.py:part", base=folder))
    assert caught.value.trace == ""


@pytest.mark.parametrize("error", ["RuntimeError", "KeyError", "FileNotFoundError"])
def test_other_errors_of_a_component_are_reported_with_their_traceback(folder: Path, error: str) -> None:
    write(folder / "parts.py", f"def part(): raise {error}('mine')")

    with pytest.raises(BuildFailed, match=f"raised {error} while it was built: .*mine") as caught:
        Registry().build("model", Component(use="./parts.py:part", base=folder))
    assert caught.value.hints[0].endswith("parts.py:1, in part")
    assert caught.value.trace.count("parts.py") == 1


def test_full_memory_in_a_constructor_is_not_an_error_of_the_component(folder: Path) -> None:
    write(folder / "parts.py", "def part(): raise MemoryError('full')")

    with pytest.raises(MemoryError, match="full"):
        Registry().build("model", Component(use="./parts.py:part", base=folder))


def test_every_optimizer_of_torch_can_be_named_and_built() -> None:
    names = [
        name
        for name, found in vars(torch.optim).items()
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and name != "Optimizer"
    ]
    assert len(names) >= 14
    registry = Registry()

    for name in names:
        use = f"torch.optim:{name}"
        options = registry.options_model("optimizer", use).model_validate_json('{"lr": 0.25}')
        optimizer = registry.build(
            "optimizer",
            Component(use=use, options=dict(options)),
            params=[nn.Parameter(torch.ones(2, 2))],
        )
        assert type(optimizer).__name__ == name
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert set(dict(options)) >= {"lr"}
        assert "params" not in dict(options)


def test_disabled_plugins_are_read_again_for_each_registry(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "wide-nets", WIDE)
    assert "widenet" in Registry.installed().names("model")
    assert Registry.installed() is Registry.installed()

    monkeypatch.setitem(os.environ, "DDPFORGE_DISABLE_PLUGINS", "wide-nets")

    assert "widenet" not in Registry.installed().names("model")
