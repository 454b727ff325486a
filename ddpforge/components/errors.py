"""Errors of components: unknown names, code that cannot be imported or built, and refused options."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from ddpforge.components.installed import Entry
from ddpforge.components.kinds import KINDS, spec_of
from ddpforge.components.local_code import is_installed, is_local
from ddpforge.errors import ExitCode, PluginError
from ddpforge.secret_redaction import redact

__all__ = [
    "AmbiguousComponent",
    "BrokenComponent",
    "BuildFailed",
    "ComponentFailed",
    "MissingObject",
    "NotImported",
    "RefusedOptions",
    "UnknownComponent",
    "innermost",
    "is_raised_outside",
    "located",
    "nearest",
    "on_purpose",
    "outside",
    "where_raised",
]

_REGISTRY = "ddpforge.components.registry"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the name in `known` that is most similar to `name`; None if none is similar.

    Case does not count. The beginning of one known name is similar, too: `acc` is `accuracy`.
    """
    by_folded = {one.casefold(): one for one in known}
    text = name[:100].casefold()
    begun = [one for one in by_folded if one.startswith(text)] if len(text) > 2 else []
    matches = begun if len(begun) == 1 else get_close_matches(text, by_folded, n=1)
    return by_folded[matches[0]] if matches else None


class UnknownComponent(PluginError):
    """Error for a name that no installed distribution registers; `known` are the names of this kind."""

    def __init__(self, kind: str, use: str, known: Sequence[str]) -> None:
        near = _meant(kind, use.rpartition(":")[2], known)
        super().__init__(
            f"there is no {spec_of(kind).noun or kind} named `{use}`",
            hints=[
                *_elsewhere(kind, use),
                *([f"did you mean `{near}`?"] if near else []),
                f"known names: {', '.join(known) or 'none'}",
                "to use unregistered code, write `package.module:Name` or `./file.py:Name`",
            ],
        )
        self.kind = kind
        self.use = use
        self.known = tuple(known)


_CALLED = {  # names of ddpforge's components in other libraries, by kind; without "_" and "-"
    "model": {"transformer": "gpt", "feedforward": "mlp", "linear": "mlp", "convnet": "cnn"},
    "data": {"mnist": "torchvision", "cifar10": "torchvision", "imagefolder": "torchvision", "webdataset": "tar"}
    | dict.fromkeys(("cifar10", "cifar100", "imagenet", "fashionmnist", "stl10", "svhn", "emnist"), "torchvision")
    | dict.fromkeys(("json", "jsonl", "pandas", "arrow", "dataset", "loaddataset"), "hugging_face")
    | dict.fromkeys(("excel", "xlsx", "tsv", "table", "tabular", "dataframe"), "csv")
    | dict.fromkeys(("images", "folder", "imagedir", "image"), "image_folder")
    | dict.fromkeys(("txt", "textfile", "corpus"), "text"),
    "sampler": {"random": "shuffled", "shuffle": "shuffled", "distributed": "shuffled", "inorder": "sequential"},
    "task": {
        **dict.fromkeys(("ce", "crossentropy", "crossentropyloss"), "classification"),
        **dict.fromkeys(("mse", "mseloss", "l1", "l1loss", "huber"), "regression"),
        **dict.fromkeys(("bce", "bcewithlogits", "bcewithlogitsloss"), "multilabel"),
        **dict.fromkeys(("clm", "lm", "causallm", "nexttoken"), "language_modeling"),
        **dict.fromkeys(("mlm", "fillmask"), "masked_lm"),
    },
    "metric": {"meaniou": "iou", "jaccard": "iou", "ece": "calibration_error", "l1": "mae"},
    "schedule": {"multistep": "step", "steplr": "step", "multisteplr": "step", "trapezoidal": "wsd"},
    "strategy": {
        "dp": "ddp",
        "distributeddataparallel": "ddp",
        "zero": "deepspeed",
        "pp": "pipeline",
        "none": "single",
    },
    "tracker": {"tb": "tensorboard", "wb": "wandb", "weightsandbiases": "wandb", "stdout": "console", "json": "jsonl"},
    "callback": {"plateau": "reduce_on_plateau", "averaging": "ema", "swa": "ema", "patience": "early_stopping"},
}


def _meant(kind: str, name: str, known: Sequence[str]) -> str | None:
    """Returns the known component that another library calls `name`, or that `name` begins with, or the nearest."""
    called = _CALLED.get(kind, {}).get(re.sub("[_-]", "", name.lower()))
    if called in known:
        return called
    begun = [one for one in known if name.lower().startswith((f"{one}_", f"{one}-"))]
    return max(begun, key=len) if begun else nearest(name, known)


class MissingObject(PluginError):
    """Error for a component that was an object of Python when the run began, and is not given now."""

    def __init__(self, kind: str, use: str, given: Sequence[str]) -> None:
        noun = KINDS[kind].noun or kind
        call = "ddpforge.train(recipe, …), load(run, …), evaluate(run, …) and predict(run, …)"
        hints = [f"the {noun} given now is `{name}`" for name in given]
        super().__init__(
            f"the run was made with an object of Python as its {noun}, `{use}`, which is not given",
            hints=[*hints, f"give it in Python: {call} take model=, task=, train_data=, eval_data= and others"],
        )


_TORCH_OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop"),
    "SparseAdam",
)


def located(use: str) -> str:
    """Returns `package.module:Name` for `package.module.Name`; returns any other text unchanged."""
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", use) and not use.endswith(".py"):
        capital = re.search(r"\.(?=[A-Z])", use)
        cut = capital.start() if capital else use.rindex(".")
        return f"{use[:cut]}:{use[cut + 1 :]}"
    return use


def _elsewhere(kind: str, use: str) -> Iterator[str]:
    """Yields hints for a name from other libraries: how to write it in a recipe of ddpforge."""
    name = use.lower().replace("-", "").replace("_", "")
    if located(use) != use:
        yield f"did you mean `{located(use)}`?"
    elif kind == "strategy" and (stage := re.fullmatch(r"(?:deepspeed)?(?:zero|stage)+([123])", name)):
        yield f'write use = "deepspeed" and stage = {stage[1]}'
    elif kind == "strategy" and name in ("hsdp", "hybridshard"):
        yield 'write use = "fsdp" and replicas = 2 (the number of groups of ranks)'
    elif kind == "strategy" and name in ("naivesplit", "dataparallel"):
        yield "install ddpforge-teaching, which has naive_split and data_parallel"
    elif kind == "optimizer" and (found := next((one for one in _TORCH_OPTIMIZERS if one.lower() == name), None)):
        yield f"write the class of torch: `torch.optim:{found}`"
    elif kind == "model" and re.fullmatch(r"(resnet|vit|convnext|efficientnet|densenet|vgg|swin|mobilenet)\w*", name):
        yield f'write use = "torchvision" and arch = "{use}", or install ddpforge-timm for timm\'s models'
    elif kind == "model" and re.fullmatch(r"(bert|gpt2|llama|roberta|t5|qwen|mistral|distilbert)\w*", name):
        yield "install ddpforge-transformers for the models of transformers"
    elif kind == "callback" and name in ("modelcheckpoint", "checkpoint", "checkpointing", "savebest"):
        yield 'checkpoints are [checkpoint]: every, and keep = { last = 1, best = 1, monitor = "eval/loss" }'
    elif kind == "callback" and name in ("learningratemonitor", "lrmonitor", "progressbar", "tqdmprogressbar"):
        yield "learning rates and progress are always shown and logged: remove it"
    elif kind == "data" and name in ("json", "jsonl"):
        yield 'write use = "hugging_face", path = "json" and data_files = "FILE"; for chats use = "chat"'
    elif kind == "data" and name in ("numpy", "npy", "npz", "hdf5", "h5", "lmdb", "sqlite", "sql", "zarr", "pickle"):
        yield 'write a class with __len__ and __getitem__ that reads the file: use = "./my_data.py:MyData"'
    elif kind == "data" and name in ("hf", "huggingface", "datasets", "hfdatasets"):
        yield 'for datasets of Hugging Face, write use = "hugging_face" with path, split and columns'
    elif kind == "tracker" and name in ("tensorboard", "mlflow", "comet", "aim", "clearml", "neptune", "csv"):
        yield f"no tracker for {use} is installed; `ddpforge plugins new` creates one; metrics.jsonl is always written"
    elif kind == "optimizer" and name in ("lion", "adam8bit", "adamw8bit", "sophia", "lamb", "adan", "prodigy"):
        yield "name a class of an installed package, e.g. `lion_pytorch:Lion` or `bitsandbytes.optim:AdamW8bit`"


class AmbiguousComponent(PluginError):
    """Error for a name that several installed distributions register; `providers` are their entries."""

    def __init__(self, kind: str, use: str, providers: Sequence[Entry]) -> None:
        super().__init__(
            f"{kind} `{use}` is provided by {' and by '.join(entry.source for entry in providers)}",
            hints=[f'to choose this one: use = "{entry.distribution}:{entry.name}"' for entry in providers],
        )
        self.kind = kind
        self.use = use
        self.providers = tuple(providers)


class BrokenComponent(PluginError):
    """Error for a component that exists, but cannot be used.

    `where` is "file:line" of the plugin's statement that failed, `missing` the name of a module that is not
    installed, and `cause` the original exception. Each may be None.
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
    """Error for a component that this Registry must not import."""

    def __init__(self, kind: str, use: str) -> None:
        super().__init__(f"{kind} `{use}` is not imported")
        self.use = use


class RefusedOptions(PluginError):
    """Error of a recipe: the component refuses its options, although each of them alone is valid."""

    exit_code = ExitCode.USAGE


class BuildFailed(PluginError):
    """Error for component code that failed by mistake while it was built; `trace` is the traceback."""

    def __init__(self, kind: str, use: str, error: BaseException) -> None:
        early = "before Module.__init__() call" in str(error)
        super().__init__(
            f"{kind} `{use}` raised {type(error).__name__} while it was built: {redact(str(error))}",
            hints=[*(["call super().__init__() first in its constructor"] if early else []), *where_raised(error)],
        )
        self.trace = _trace(error)


class ComponentFailed(PluginError):
    """Error for component code that failed by mistake after it was built; `trace` is the traceback of its frames."""

    def __init__(self, key: str, error: Exception) -> None:
        super().__init__(
            f"[{key}] raised {type(error).__name__}: {redact(str(error))}",
            hints=[*getattr(error, "__notes__", ()), *where_raised(error)],
        )
        self.trace = _formatted(error, outside(error))


# ---------------------------------------------------------------------------------------------- of constructors
def on_purpose(error: Exception, component: Callable[..., Any]) -> bool:
    """True if the component refuses its arguments: its own package, or a built-in component, raised with `raise`.

    Also True if the arguments do not fit the signature. An error from other code, or from an operation on values, is
    a mistake in the component.
    """
    import dis

    frames = _frames(error)
    if not frames:
        return True
    frame, _, instruction = frames[-1]
    package = getattr(component, "__module__", "").partition(".")[0]
    module = frame.f_globals.get("__name__", "")
    # Components of plugins build parts of ddpforge with options of the user, e.g. the adapters of `lora`.
    if module.partition(".")[0] != package and not module.startswith("ddpforge.builtin."):
        return False
    return dis.opname[frame.f_code.co_code[instruction]] == "RAISE_VARARGS"


def _frames(error: BaseException) -> list[tuple[FrameType, int, int]]:
    """Returns the frames of a traceback below the registry, each with its line and instruction."""
    found, trace = [], error.__traceback__
    while trace:
        found.append((trace.tb_frame, trace.tb_lineno, trace.tb_lasti))
        trace = trace.tb_next
    begins = max(
        (n for n, (frame, *_) in enumerate(found, 1) if frame.f_globals.get("__name__") == _REGISTRY), default=0
    )
    return found[begins:]


def where_raised(error: BaseException) -> list[str]:
    """Returns a hint with the innermost line of the user's code in the traceback; empty if there is none."""
    lines = [
        f"raised at {os.path.relpath(frame.f_code.co_filename)}:{line}, in {frame.f_code.co_qualname}"
        for frame, line, _ in _frames(error)
        if _is_the_users(frame)
    ]
    return lines[-1:]


def _is_the_users(frame: FrameType) -> bool:
    """True for a local file of a recipe, and for a script or a module below its folder or the current one."""
    if is_local(frame.f_globals.get("__name__", "")):
        return True
    file, script = frame.f_code.co_filename, getattr(sys.modules.get("__main__"), "__file__", None)
    homes = {os.getcwd(), os.path.dirname(os.path.abspath(script)) if script else os.getcwd()}
    below = os.path.isfile(file) and any(Path(file).absolute().is_relative_to(home) for home in homes)
    return below and not _is_ours(frame) and not is_installed(file)


def is_raised_outside(error: BaseException) -> bool:
    """True if code outside ddpforge is in the traceback: a component failed, not only ddpforge."""
    return outside(error) is not None


def outside(error: BaseException) -> TracebackType | None:
    """Returns the traceback from its first frame outside ddpforge; None if there is none."""
    trace = error.__traceback__
    while trace and _is_ours(trace.tb_frame):
        trace = trace.tb_next
    return trace


def _is_ours(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in ("ddpforge", "contextlib") and not is_local(module)


def _trace(error: BaseException) -> str:
    import traceback

    skipped = len(list(traceback.walk_tb(error.__traceback__))) - len(_frames(error))
    trace = error.__traceback__
    for _ in range(skipped):
        trace = trace.tb_next if trace else None
    return _formatted(error, trace)


def _formatted(error: BaseException, trace: TracebackType | None) -> str:
    import traceback

    return redact("".join(traceback.format_exception(type(error), error, trace)))


def innermost(cause: BaseException, package: str) -> str | None:
    """Returns "file:line" of the plugin's innermost line in the traceback; None if there is none."""
    import traceback  # imported here to keep lists of plugins fast

    if isinstance(cause, SyntaxError) and cause.filename:
        return f"{cause.filename}:{cause.lineno}"
    lines = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(cause.__traceback__)
        if (name := frame.f_globals.get("__name__", "")).partition(".")[0] == package or is_local(name)
    ]
    return lines[-1] if lines else None
