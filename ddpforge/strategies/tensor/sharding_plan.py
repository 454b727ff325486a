"""Reads a model's plan for tensor parallelism, and reports its errors before the model is cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, NoReturn

from torch import nn

from ddpforge.errors import StrategyError, UsageError
from ddpforge.recipe.renamed import renamed_plan_word
from ddpforge.strategies.tensor.split_spec import SplitSpec

__all__ = ["LAYERS", "ShardingPlan", "Style", "check_words", "resolve"]

LAYERS = (
    "colwise",
    "rowwise",
    "embedding_rowwise",
    "colwise_gather_output",
    "replicated_with_grad_allreduce",
    "replicated",
)
_SEQUENCE = ("scatter", "sequence_parallel", "gather")
_ALIASES = {"packed_colwise": "colwise:2", "colwise_rep": "colwise_gather_output"}  # in plans of transformers


class Style(NamedTuple):
    """Way in which ranks share a module; a weight that concatenates `parts` weights is cut within each part."""

    word: str
    parts: int = 1


@dataclass(frozen=True)
class ShardingPlan:
    """Styles of a model's modules, and cuts of its parameters for the first rank, by fully qualified name."""

    styles: Mapping[str, Style] = field(default_factory=dict)
    cuts: Mapping[str, SplitSpec] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)  # further names of tied parameters

    def owned(self, word: str) -> list[str]:
        """Returns the names of the modules with the style `word`."""
        return [name for name, style in self.styles.items() if style.word == word]


def resolve(
    model: nn.Module,
    given: Mapping[str, str] | None,
    blocks: Sequence[nn.Module],
    *,
    ranks: int,
    sequence: bool,
    split_logits: bool,
) -> ShardingPlan:
    """Returns the plan for `ranks` ranks that share the layers of `model`: the recipe's plan `given`, or the model's.

    A module gets the first style in the plan with a pattern that matches its name.

    Raises:
        UsageError: There is no plan, a size is not divisible, or the recipe's plan has an error: it names a missing
            module, or forgets a linear layer in one of the `blocks`.
        StrategyError: The model's own plan has such an error.
    """
    try:
        return _resolved(model, given, blocks, ranks=ranks, sequence=sequence, split_logits=split_logits)
    except StrategyError as error:
        if given:
            raise UsageError(error.message, hints=error.hints) from error
        raise


def check_words(plan: Mapping[str, str]) -> None:
    """Raises UsageError for an unknown style in the recipe's plan."""
    try:
        for glob, text in plan.items():
            _style(glob, text, "strategy.plan")
    except StrategyError as error:
        raise UsageError(error.message, hints=error.hints) from error


def _resolved(
    model: nn.Module,
    given: Mapping[str, str] | None,
    blocks: Sequence[nn.Module],
    *,
    ranks: int,
    sequence: bool,
    split_logits: bool,
) -> ShardingPlan:
    kind = type(model).__name__
    own = getattr(model, "tensor_plan", None) or getattr(model, "_tp_plan", None) or {}  # the latter of transformers
    where, plan = ("strategy.plan", given) if given else (f"{kind}.tensor_plan", own)
    if not plan:
        raise UsageError(
            f"strategy.tensor = {ranks} needs a plan for cutting layers, but {kind} has none",
            hints=[
                'give the class `tensor_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}`',
                "or write [strategy.plan] in the recipe, or set strategy.tensor = 1",
            ],
        )
    styles = _matched(model, plan, where)
    for name, style in styles.items():
        _check_kind(name, model.get_submodule(name), style)
    _reject_forgotten(model, blocks, styles, where)
    _check_sequence(styles, where, sequence=sequence, split_logits=split_logits)
    _check_tied(model, styles, where)
    return _cut(model, styles, ranks)


# ---------------------------------------------------------------------------------------------- words and names
def _matched(model: nn.Module, plan: Mapping[str, str], where: str) -> dict[str, Style]:
    """Returns the styles of all modules that the plan names."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    found: dict[str, Style] = {}
    for glob, text in plan.items():
        style = _style(glob, text, where)
        matches = [name for name in names if fnmatchcase(name, glob)]
        if not matches:
            near = get_close_matches(glob, names, 1)
            raise StrategyError(
                f"{where} names `{glob}`, but no module of the model has this name",
                hints=[f"did you mean `{near[0]}`?"] if near else ["write full names, e.g. blocks.*.attention.qkv"],
            )
        for name in matches:
            found.setdefault(name, style)
    return found


def _style(glob: str, text: object, where: str) -> Style:
    word, _, parts = _ALIASES.get(str(text), str(text)).partition(":")
    if word not in LAYERS + _SEQUENCE or (parts and (word != "colwise" or not parts.isdecimal() or not int(parts))):
        raise StrategyError(
            f'{where}: `{glob}` has the style "{text}", which tensor parallelism does not have',
            hints=[
                *renamed_plan_word(str(text)),
                f"styles: {', '.join(LAYERS)}; colwise:3 for three weights in one; along the sequence "
                f"{', '.join(_SEQUENCE)}",
                f"supported styles of transformers: {', '.join(_ALIASES)}",
            ],
        )
    return Style(word, int(parts or 1))


# ---------------------------------------------------------------------------------------------- checks
def _check_kind(name: str, module: nn.Module, style: Style) -> None:
    """Raises StrategyError if the module cannot be cut in this style."""
    own = {key for key, _ in module.named_parameters()}
    linear = isinstance(module, nn.Linear) and own <= {"weight", "bias"}
    right = {
        "colwise": linear,
        "rowwise": linear and (type(module).forward is nn.Linear.forward),
        "embedding_rowwise": isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and module.max_norm is None
        and not module.scale_grad_by_freq,
        "colwise_gather_output": linear or not own,
    }.get(style.word, True)
    if not right:
        needs = {
            "colwise": "a torch.nn.Linear",
            "rowwise": "a torch.nn.Linear with torch's own forward",
            "embedding_rowwise": "a torch.nn.Embedding with torch's own forward, without max_norm and"
            " scale_grad_by_freq",
            "colwise_gather_output": "a torch.nn.Linear, or a module without parameters that receives"
            " weights in forward",
        }[style.word]
        raise StrategyError(
            f'`{name}` ({type(module).__name__}) cannot be cut as "{style.word}", which needs {needs}',
            hints=[f'name another module, or set "{name}" = "replicated" in [strategy.plan]'],
        )


def _reject_forgotten(model: nn.Module, blocks: Sequence[nn.Module], styles: Mapping[str, Style], where: str) -> None:
    """Raises StrategyError for a linear layer in a block that has no style."""
    inside = {id(module) for block in blocks for module in block.modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and id(module) in inside and styles.get(name, Style("")).word not in LAYERS:
            raise StrategyError(
                f"{where} has no style for `{name}` ({type(module).__name__}): every rank would hold and compute all "
                "of it",
                hints=['give it "colwise" or "rowwise"', 'or "replicated" if that is intended'],
            )


def _check_sequence(styles: Mapping[str, Style], where: str, *, sequence: bool, split_logits: bool) -> None:
    """Raises UsageError if an option needs a style that the plan lacks or repeats."""
    words = [style.word for style in styles.values()]
    if sequence and words.count("scatter") != 1:
        raise UsageError(
            'strategy.sequence_parallel = true needs one module with the style "scatter", at which the sequence is '
            f"split, but {where} has {words.count('scatter')}",
            hints=[
                'give the first block "scatter", norms "sequence_parallel", and the last "gather" if no '
                '"colwise_gather_output" follow'
            ],
        )
    if split_logits and words.count("colwise_gather_output") != 1:
        raise UsageError(
            f'strategy.loss_parallel = true needs one layer with the style "colwise_gather_output", but {where} has '
            f"{words.count('colwise_gather_output')}",
            hints=["remove strategy.loss_parallel"],
        )


def _check_tied(model: nn.Module, styles: Mapping[str, Style], where: str) -> None:
    """Raises StrategyError for an output layer without weights unless exactly one embedding is cut."""
    cut = [name for name, style in styles.items() if style.word == "embedding_rowwise"]
    for name, style in styles.items():
        bare = next(model.get_submodule(name).parameters(), None) is None
        if style.word == "colwise_gather_output" and bare and len(cut) != 1:
            raise StrategyError(
                f'{where} has "colwise_gather_output" for `{name}`, which has no weights, and "embedding_rowwise" for '
                f"{len(cut)} embeddings",
                hints=['give "embedding_rowwise" only to the embedding that provides the weights of that layer'],
            )


# ---------------------------------------------------------------------------------------------- the cuts
def _cut(model: nn.Module, styles: Mapping[str, Style], ranks: int) -> ShardingPlan:
    """Returns the plan with the cut of each parameter.

    Raises UsageError if a size is not divisible, and StrategyError if the names of one parameter have different cuts.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    aliases = {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first[id(parameter)] != name
    }
    cuts: dict[str, SplitSpec | None] = {}
    for owner, key, parameter in _parameters(model):
        style = styles.get(owner, Style(""))
        name = f"{owner}.{key}" if owner else key
        cut = _cut_of(model, name, parameter, style, ranks)
        known = cuts.setdefault(first[id(parameter)], cut)
        if known != cut:
            raise StrategyError(
                f"`{first[id(parameter)]}` and `{name}` are one parameter, but the plan cuts it in two ways",
                hints=[
                    'give an embedding "embedding_rowwise" and the output layer that is tied to it '
                    '"colwise_gather_output", or neither'
                ],
            )
    return ShardingPlan(styles, {name: cut for name, cut in cuts.items() if cut}, aliases)


def _parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    for owner, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(recurse=False):
            yield owner, key, parameter


def _cut_of(model: nn.Module, name: str, parameter: nn.Parameter, style: Style, ranks: int) -> SplitSpec | None:
    shape = tuple(parameter.shape)
    if style.word in ("embedding_rowwise", "colwise_gather_output"):
        return SplitSpec(shape, 0, 0, ranks)  # the last rank may have fewer
    if style.word not in ("colwise", "rowwise") or (style.word == "rowwise" and len(shape) == 1):
        return None
    dim = 0 if style.word == "colwise" else 1
    unit = _head(model, name)
    if shape[dim] % (style.parts * ranks):
        in_parts = f" in {style.parts} parts" if style.parts > 1 else ""
        _reject_share(name, f"{shape[dim]} {'columns' if dim else 'rows'}{in_parts}", ranks)
    if unit and shape[dim] // style.parts % (unit * ranks):
        heads = shape[dim] // style.parts // unit
        _reject_share(name, f"{heads} head{'s' * (heads > 1)} of {unit}", ranks)
    return SplitSpec(shape, dim, 0, ranks, style.parts)


def _reject_share(name: str, what: str, ranks: int) -> NoReturn:
    raise UsageError(
        f"strategy.tensor = {ranks} does not divide `{name}`: it has {what}",
        hints=["use a strategy.tensor that divides this number, or change the size in [model]"],
    )


def _head(model: nn.Module, name: str) -> int | None:
    """Returns the width of heads, which must not be cut: the `head_dim` of the module around the layer, or None."""
    around = name.rpartition(".")[0].rpartition(".")[0]
    width: Any = getattr(model.get_submodule(around), "head_dim", None)
    return width if isinstance(width, int) else None
