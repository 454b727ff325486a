"""Fixtures for all tests."""

import gc
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from ddpforge.fast_import import gc_paused

with gc_paused():
    import torch
    from support.hosts import Hosts, needs_root, new_hosts
    from support.launched import Ranks, Zygote
    from support.slurm import PROGRAMS, Slurm, new_slurm

    from ddpforge.launchers.scheduling import policy_restored
    from ddpforge.ranks import process_exit

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PLUGINS = ",".join(path.name for path in (Path(__file__).parents[1] / "plugins").glob("*"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keeps the garbage collector from repeated scans of modules and tests, here and in every forked rank.

    It then runs seldom: it would scan trees of code, and graphs of models, a hundred times while they grow.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs, except for `pytest -m gpu`: several ranks cannot share a GPU."""
    if "gpu" not in config.option.markexpr or "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session", autouse=True)
def _in_an_empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Changes to an empty folder: a clone may have `runs/`, which a command would resume."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("here"))
    yield
    os.chdir(before)


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Isolates a test from installed plugins and from earlier runs in this process."""
    monkeypatch.setenv("DDPFORGE_DISABLE_PLUGINS", PLUGINS)
    monkeypatch.setattr(
        process_exit, "_threads", False
    )  # with threads of an earlier run, a later command would end the process at once
    logger = logging.getLogger("ddpforge")  # a run configures it
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    with policy_restored():
        yield
    for handler in set(logger.handlers) - set(handlers):
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """Yields an installed Chromium; skips tests without one."""
    from playwright.sync_api import sync_playwright

    if not (chromium := shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("needs Chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def deepspeed() -> None:
    """Imports DeepSpeed once, in the process that forks ranks; skips tests if it is not installed."""
    from accelerate.utils import patch_environment

    with patch_environment(DS_ACCELERATOR="cpu"):
        pytest.importorskip("deepspeed.runtime.zero.muon.muon_optimizer")
        import_module("ddpforge.strategies.deepspeed.replica")


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Yields the process that forks ranks; see `launched.py`."""
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def ddpforge(zygote: Zygote, tmp_path: Path) -> Callable[..., Ranks]:
    """Returns `ddpforge("run", "x.toml", nproc=2)` for the test's folder; it fails unless all ranks end with 0.

    Only ranks of a run that may fail (`fails`) have watchdogs.
    """

    def run(*arguments: str, nproc: int = 1, fails: bool = False, env: dict[str, str] | None = None) -> Ranks:
        ranks = zygote.run(arguments, nproc=nproc, cwd=tmp_path, env=env, watched=fails)
        return ranks if fails else ranks.check()

    return run


settings.register_profile("ddpforge", deadline=None)  # no test has a time limit
settings.load_profile("ddpforge")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Limits torch to one thread: threads do not speed up small tensors, and disturb each other on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _forks_can_compute_gradients() -> None:
    """Runs a backward pass while there is no device: autograd then starts a thread per device, after which forks fail.

    Later tests imitate devices.
    """
    torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


@pytest.fixture(autouse=True, scope="session")
def _signals_arrive() -> None:
    """Restores signal handlers: the parent process may have ignored signals (nohup, a shell's background)."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests with hosts for `make test-all`: forks of a process with threads of many libraries may hang."""
    for item in items:
        if "hosts" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.full)


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Yields two hosts, "a" and "b"; see `hosts.py`."""
    needs_root()
    with new_hosts("ab", tmp_path_factory.mktemp("hosts")) as hosts:
        yield hosts


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Yields a Slurm of two nodes with two cores each; see `slurm.py`."""
    needs_root(*PROGRAMS)
    with new_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm
