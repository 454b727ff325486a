"""Errors of components: names that nothing has, code that cannot be imported or built, and whose fault that is."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from types import FrameType
from typing import Any

from ddpforge.components.installed import Entry
from ddpforge.components.kinds import KINDS
from ddpforge.components.local_code import PREFIX
from ddpforge.confidential import redact
from ddpforge.errors import ExitCode, PluginError

__all__ = [
    "AmbiguousComponent",
    "BrokenComponent",
    "BuildFailed",
    "NotImported",
    "RefusedOptions",
    "UnknownComponent",
    "located",
    "on_purpose",
    "where_raised",
]

_REGISTRY = "ddpforge.components.registry"


class UnknownComponent(PluginError):
    """No installed distribution registers this name; `known` are the names of this kind."""

    def __init__(self, kind: str, use: str, known: Sequence[str]) -> None:
        near = get_close_matches(use.rpartition(":")[2], known, n=1)
        super().__init__(
            f"there is no {KINDS[kind].noun or kind} named `{use}`",
            hints=[
                *_elsewhere(kind, use),
                *(f"did you mean `{name}`?" for name in near),
                f"known names: {', '.join(known) or 'none'}",
                "unregistered code is named by `package.module:Name` or `./file.py:Name`",
            ],
        )
        self.kind = kind
        self.use = use
        self.known = tuple(known)


_TORCH_OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop"),
    "SparseAdam",
)


def located(use: str) -> str:
    """`package.module.Name` as a recipe locates it, `package.module:Name`; anything else as it is."""
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", use) and not use.endswith(".py"):
        capital = re.search(r"\.(?=[A-Z])", use)
        cut = capital.start() if capital else use.rindex(".")
        return f"{use[:cut]}:{use[cut + 1 :]}"
    return use


def _elsewhere(kind: str, use: str) -> Iterator[str]:
    """Yields hints for a name that people probably know from elsewhere: the name by which the thing is found here."""
    name = use.lower().replace("-", "").replace("_", "")
    if located(use) != use:
        yield f"did you mean `{located(use)}`?"
    elif kind == "strategy" and (stage := re.fullmatch(r"(?:deepspeed)?(?:zero|stage)+([123])", name)):
        yield f'write use = "deepspeed" and stage = {stage[1]}'
    elif kind == "strategy" and name in ("hsdp", "hybridshard"):
        yield 'write use = "fsdp" and replicas = 2, or how many groups of ranks there are'
    elif kind == "strategy" and name in ("naivesplit", "dataparallel"):
        yield "install ddpforge-teaching, which has naive_split and data_parallel"
    elif kind == "optimizer" and (found := next((one for one in _TORCH_OPTIMIZERS if one.lower() == name), None)):
        yield f"torch has it: `torch.optim:{found}`"
    elif kind == "model" and re.fullmatch(r"(resnet|vit|convnext|efficientnet|densenet|vgg|swin|mobilenet)\w*", name):
        yield f'write use = "torchvision" and arch = "{use}", or install ddpforge-timm for timm\'s models'
    elif kind == "model" and re.fullmatch(r"(bert|gpt2|llama|roberta|t5|qwen|mistral|distilbert)\w*", name):
        yield "install ddpforge-transformers for the models of transformers"
    elif kind == "data" and name in ("hf", "huggingface", "datasets", "hfdatasets"):
        yield 'datasets of Hugging Face: use = "hugging_face" with path, split and columns'
    elif kind == "tracker" and name in ("tensorboard", "mlflow", "comet", "aim", "clearml", "neptune", "csv"):
        yield f"no tracker for {use} is installed; `ddpforge plugins new` begins one; metrics.jsonl is always written"
    elif kind == "optimizer" and name in ("lion", "adam8bit", "adamw8bit", "sophia", "lamb", "adan", "prodigy"):
        yield "any class of an installed package will do, e.g. `lion_pytorch:Lion` or `bitsandbytes.optim:AdamW8bit`"


class AmbiguousComponent(PluginError):
    """Several installed distributions register this name; `providers` are their entries."""

    def __init__(self, kind: str, use: str, providers: Sequence[Entry]) -> None:
        super().__init__(
            f"{kind} `{use}` is provided by {' and by '.join(entry.source for entry in providers)}",
            hints=[f'to choose this one: use = "{entry.distribution}:{entry.name}"' for entry in providers],
        )
        self.kind = kind
        self.use = use
        self.providers = tuple(providers)


class BrokenComponent(PluginError):
    """A component that is there and cannot be used.

    `where` is "file:line" of the plugin's own statement that failed, `missing` the module that it did not
    find, `cause` the exception behind it; each is None where there is none.
    """

    def __init__(
        self,
        kind: str,
        use: str,
        problem: str,
        *,
        entry: Entry | None = None,
        cause: BaseException | None = None,
        where: str | None = None,
        missing: str | None = None,
        hints: Sequence[str] = (),
    ) -> None:
        source = f" of {entry.source}" if entry else ""
        super().__init__(f"{kind} `{use}`{source} {problem}", hints=hints)
        self.kind = kind
        self.use = use
        self.entry = entry
        self.cause = cause
        self.where = where
        self.missing = missing


class NotImported(PluginError):
    """Code that the recipe locates, by a file or a module, and that is not to be imported."""

    def __init__(self, kind: str, use: str) -> None:
        super().__init__(f"{kind} `{use}` is not imported")
        self.use = use


class RefusedOptions(PluginError):
    """A component does not take its options, although each of them alone is of the right form: the recipe's fault."""

    exit_code = ExitCode.USAGE


class BuildFailed(PluginError):
    """The code of a component failed while it was built, and did not say so on purpose; `trace` shows where."""

    def __init__(self, kind: str, use: str, error: BaseException) -> None:
        super().__init__(
            f"{kind} `{use}` raised {type(error).__name__} while it was built: {redact(str(error))}",
            hints=where_raised(error),
        )
        self.trace = _trace(error)


# ---------------------------------------------------------------------------------------------- of constructors
def on_purpose(error: Exception, component: Callable[..., Any]) -> bool:
    """True if a component refuses its arguments with this error: its own package raised it, by `raise`.

    An error that a call into other code brings up, or an operation on values, is a mistake that only its traceback
    explains. What does not even fit the signature never came to the component's code.
    """
    import dis

    frames = _frames(error)
    if not frames:
        return True
    frame, _, instruction = frames[-1]
    package = getattr(component, "__module__", "").partition(".")[0]
    if frame.f_globals.get("__name__", "").partition(".")[0] != package:
        return False
    return dis.opname[frame.f_code.co_code[instruction]] == "RAISE_VARARGS"


def _frames(error: BaseException) -> list[tuple[FrameType, int, int]]:
    """The frames below the registry that an error came through, with the line and the instruction in each."""
    found, trace = [], error.__traceback__
    while trace:
        found.append((trace.tb_frame, trace.tb_lineno, trace.tb_lasti))
        trace = trace.tb_next
    begins = max(
        (n for n, (frame, *_) in enumerate(found, 1) if frame.f_globals.get("__name__") == _REGISTRY), default=0
    )
    return found[begins:]


def where_raised(error: BaseException) -> list[str]:
    """A hint with the innermost line of code that neither ddpforge nor an installed library has; or none."""
    lines = [
        f"raised at {os.path.relpath(frame.f_code.co_filename)}:{line}, in {frame.f_code.co_qualname}"
        for frame, line, _ in _frames(error)
        if frame.f_globals.get("__name__", "").startswith(PREFIX)
    ]
    return lines[-1:]


def _trace(error: BaseException) -> str:
    import traceback

    skipped = len(list(traceback.walk_tb(error.__traceback__))) - len(_frames(error))
    trace = error.__traceback__
    for _ in range(skipped):
        trace = trace.tb_next if trace else None
    return redact("".join(traceback.format_exception(type(error), error, trace)))
