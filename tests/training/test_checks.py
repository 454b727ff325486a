"""Checks of a run's stages come by entry points: ddpforge's own, and those of plugins, which errors name."""

from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path

import pytest
from support.fake_distributions import forgetting_modules_below, install
from support.forked import refused
from support.small_recipe import CODE, RECIPE
from support.stages import ALONE, dealt, staged

from ddpforge.components.hooks import hooks
from ddpforge.errors import ExitCode, PluginError, RecipeError, SetupError
from ddpforge.training.checks import STAGES, check_first_step, checks_of

PAGE = Path(__file__).parents[2] / "docs/extend/check.md"
HOUSE_RULES = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
Installer = Callable[..., None]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installer]:
    """Yields a function that installs a plugin with checks: `plugin("code", built="CHECKS")`."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RECIPE)
    Path("mine.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path / "site")

    def installed(code: str, **stages: str) -> None:
        points = {stage: f"house_rules:{name}" for stage, name in stages.items()}
        install(tmp_path / "site", "house-rules", {"ddpforge.check": points}, modules={"house_rules.py": code})

    with forgetting_modules_below(tmp_path):
        yield installed


def problem(*sets: str) -> tuple[str, str, str]:
    """Returns key, message and hints of the only problem of the recipe."""
    with pytest.raises(RecipeError) as found:
        staged("run.toml", *sets).problems.raise_if_any()
    (one,) = found.value.problems
    return one.key, one.message, " | ".join(one.hints)


def test_the_checks_of_a_plugin_are_errors_of_the_recipe_with_the_name_of_the_plugin(plugin: Installer) -> None:
    plugin(HOUSE_RULES, chosen="CHOSEN")
    assert not len(staged("run.toml").problems)
    assert not len(staged("run.toml", "train.precision=bf16", "train.clip_norm=1.0").problems)
    key, message, hints = problem("train.precision=bf16")
    assert (key, message) == ("train", "bf16 needs clipping here")
    assert hints == "set train.clip_norm = 1.0 | this is a check of the plugin house-rules"


@pytest.mark.parametrize("stage", ["model", "fit", "built"])
def test_each_stage_runs_the_checks_of_plugins(plugin: Installer, stage: str) -> None:
    code = """
    from torch import nn
    from ddpforge.errors import UsageError

    def check(stage):
        model = stage if isinstance(stage, nn.Module) else stage.model
        raise UsageError(f"not the model {type(model).__name__}")

    CHECKS = [("model", check)]
    """
    plugin(code, **{stage: "CHECKS"})
    assert problem()[:2] == ("model", "not the model Net")


def test_a_check_of_the_first_step_receives_the_first_micro_batch(plugin: Installer) -> None:
    code = """
    def prepare(dealt, world):
        def check(replica, task, module, first):
            raise ValueError(f"{first.samples} samples on {world.global_ranks.size} rank")
        return check

    CHECKS = [("", prepare), ("", lambda dealt, world: None)]
    """
    plugin(code, first_step="CHECKS")
    parts = dealt("run.toml")
    *_, last = check_first_step(parts, ALONE)
    message = refused(PluginError, lambda: last(None, parts.task, parts.model, parts.training.first()))
    assert (
        "`first_step` of house-rules (ddpforge.check) has a check that fails: ValueError: 8 samples on 1 rank"
        in message
    )


def test_a_check_that_uses_a_component_that_could_not_be_built_is_skipped(plugin: Installer) -> None:
    plugin("CHECKS = [('task', lambda chosen: [chosen.task.reports['x']])]", chosen="CHECKS")
    assert problem("task.use=./mine.py:Absent")[0] == "task.use"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", "`built` of house-rules (ddpforge.check) cannot be loaded: ZeroDivisionError: division by zero"),
        ("CHECKS = 3", "is not a list of pairs: a key of the recipe, and a function"),
        ("CHECKS = [len]", "is not a list of pairs: a key of the recipe, and a function"),
        ("CHECKS = [('', lambda built: 1 / 0)]", "has a check that fails: ZeroDivisionError: division by zero"),
        ("CHECKS = [('', lambda built: 3)]", "has a check that fails: TypeError: 'int' object is not iterable"),
        ("CHECKS = [('', lambda built: ['no error'])]", "has a check that fails: "),
    ],
    ids=["import", "no list", "no pairs", "mistake", "no iterable", "no errors"],
)
def test_a_broken_check_is_an_error_of_the_environment_that_names_its_plugin(
    plugin: Installer, code: str, said: str
) -> None:
    plugin(code, built="CHECKS")
    with pytest.raises((PluginError, RecipeError)) as found:
        staged("run.toml").problems.raise_if_any()
    assert said in str(found.value)
    assert "house-rules" in str(found.value)
    assert found.value.exit_code == ExitCode.ENVIRONMENT


def test_a_stage_that_does_not_exist_is_refused_with_all_stages(plugin: Installer) -> None:
    plugin("CHECKS = []", chosed="CHECKS")
    message = refused(PluginError, lambda: staged("run.toml"))
    assert f"`chosed` of house-rules (ddpforge.check) is named after no stage of a run: {', '.join(STAGES)}" in message
    assert "DDPFORGE_DISABLE_PLUGINS=house-rules" in message


def test_an_installation_without_checks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPFORGE_DISABLE_PLUGINS", "ddpforge")
    said = refused(SetupError, lambda: list(checks_of("chosen")))
    assert "has no entry points in the group ddpforge.check | install ddpforge again" in said
    assert "ddpforge.environment" in refused(SetupError, lambda: hooks("environment"))  # without it, no watchdog


def test_each_check_is_registered_once_and_has_one_parameter() -> None:
    rows = [function for stage in ("chosen", "model", "fit", "built") for _, _, function in checks_of(stage)]
    assert len({*rows}) == len(rows) == 37
    assert {len(signature(one).parameters) for one in rows} == {1}
