"""`ddpforge export`, also `ddpforge ckpt export`: writes a run's model for other programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ddpforge.cli.options import SizeParam, checkpoint_options, json_option
from ddpforge.cli.tables import counted
from ddpforge.components.hooks import found
from ddpforge.errors import ForgeError, SetupError, UsageError, library

if TYPE_CHECKING:
    from torch import Tensor

    from ddpforge.interop.export import Exported, Precision


_FORMS = ("safetensors", "transformers", "peft", "pt2", "onnx")


@click.command()
@click.argument("run", metavar="RUN_OR_CHECKPOINT", type=click.Path())
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=str),
    help="The file, or a folder (an existing one, or a path that ends in /); default: a file named after the run.",
)
@checkpoint_options
@click.option(
    "--weights", default="model", metavar="NAME", show_default=True, help='"model", or a callback such as ema.'
)
@click.option(
    "--include",
    "only",
    multiple=True,
    metavar="GLOB",
    help='Only tensors with matching names, e.g. "*lora_*"; repeatable.',
)
@click.option("--merge", is_flag=True, help="Merge the adapters of the model `lora` into the weights that they adapt.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Convert the weights; default: as they are.")
@click.option(
    "--max-shard-size",
    type=SizeParam(),
    metavar="SIZE",
    help="Write several files of at most this size, e.g. 5GB, and an index, into a folder.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice([*_FORMS, *(hook.name for hook in found("format") if not hook.is_own)]),
    help="Format to write; default: that of the file's suffix; in a folder, that of the model; else safetensors.",
)
@click.option("--push-to-hub", "repository", metavar="USER/NAME", help="Also upload the files to the Hugging Face hub.")
@click.option("--private", is_flag=True, help="Make the repository on the hub private if it is new.")
@click.option("--force", is_flag=True, help="Replace the file, or the weights in the folder, if there are any.")
@json_option
def export(
    run: str,
    out: str | None,
    step: int | None,
    best: bool,
    weights: str,
    only: tuple[str, ...],
    merge: bool,
    dtype: Precision | None,
    max_shard_size: int | None,
    form: str | None,
    repository: str | None,
    private: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write the model of RUN_OR_CHECKPOINT (a run's folder, its name in runs/, or a checkpoint's folder).

    The default is plain safetensors: parameters and buffers have their names in the bare model, and tied parameters are
    written once. In a folder the files have the names that transformers uses: model.safetensors, or
    model-00001-of-00002.safetensors and so on with model.safetensors.index.json. For a model of transformers, they
    include config, generation config, and the tokenizer of the data with its chat template, so that from_pretrained
    loads the folder; `--format safetensors` writes only the weights, `--format peft` only the adapters of `lora`, as
    peft does. A .pt2 (torch.export) or .onnx file is a program for batches of any size.
    """
    from ddpforge.api import is_checkpoint
    from ddpforge.runs.checkpoints import find

    into_folder = max_shard_size is not None or (out is not None and (out.endswith("/") or Path(out).is_dir()))
    of_model = form is None and into_folder and not only and not weights.startswith("task.")  # of another model
    form = _form(form, out)
    if form in ("pt2", "onnx"):
        _reject(form, {"--include": only, "--merge": merge, "--dtype": dtype, "--max-shard-size": max_shard_size})
    if form == "transformers":
        _reject(form, {"--include": only})
    if form == "peft":
        _reject(form, {"--include": only, "--merge": merge, "--max-shard-size": max_shard_size})
    if form not in _FORMS:
        _reject(form, {"--max-shard-size": max_shard_size})
    checkpoint = find(run, step=step, best=best, intact=True)
    if of_model and form == "safetensors":
        form = _form_of_model(checkpoint)
    name = (checkpoint if is_checkpoint(Path(run)) else Path(run)).resolve().name
    default = f"{name}{'' if weights == 'model' else f'-{weights}'}"
    hub = _hub(repository, private)
    if form in ("pt2", "onnx"):
        done = _program(checkpoint, Path(out or f"{default}.{form}"), form, weights, force)
    elif form == "peft":
        done = _adapters(checkpoint, Path(out or default), weights, dtype, force)
    else:
        base = _left_out(checkpoint) if merge else None
        chosen = _Weights(weights, only, merge, dtype, force, base)
        done = _weights(checkpoint, out, default, chosen, max_shard_size, folder=into_folder, form=form)
    url = hub.push(done.paths, f"Step {done.step} of {name}") if hub else None

    if as_json:
        click.echo(json.dumps(asdict(done) | ({"url": url} if url else {}), default=str))
    else:
        several = f" in {len(done.files)} files" if len(done.files) > 1 else ""
        tensors = counted(done.tensors, "tensor")
        uploaded = f"; {url}" if url else ""
        click.echo(f"{done.file}: {tensors}{several}, {done.bytes:,} bytes, from step {done.step}{uploaded}")


class _Weights(NamedTuple):
    """Options for the tensors to write."""

    weights: str
    only: Sequence[str]
    merge: bool
    dtype: Precision | None
    force: bool
    base: Mapping[str, Tensor] | None = None


def _left_out(checkpoint: Path) -> Mapping[str, Tensor] | None:
    """Returns the model's state dict, built from the recipe, if the checkpoint omits frozen weights; else None."""
    from ddpforge.api import load, read_manifest
    from ddpforge.checkpoint.schema import omits_weights

    return load(checkpoint).model().state_dict() if omits_weights(read_manifest(checkpoint).loop) else None


def _form(form: str | None, out: str | None) -> str:
    """Returns the format to write. Raises UsageError if the file's suffix is of another format."""
    suffix = Path(out).suffix if out and not out.endswith("/") else ""
    if out and suffix in (".pt", ".pth", ".bin", ".ckpt") and form in (None, *_FORMS):
        raise UsageError(
            f"{out}: the file would be safetensors, which torch.load cannot read",
            hints=[f"use -o {Path(out).with_suffix('.safetensors')}; read it with safetensors.torch.load_file"],
        )
    said = suffix.removeprefix(".") if suffix in (".safetensors", ".pt2", ".onnx") else None
    if out and suffix and not (form or said or Path(out).is_dir() or suffix == ".st" or suffix[1:].isdecimal()):
        raise UsageError(
            f"{out}: ddpforge does not write {suffix} files",
            hints=[
                f"use -o {Path(out).with_suffix('.safetensors')}, .pt2 or .onnx, or a folder: -o {out}/",
                "to write safetensors into a file of this name, add --format safetensors",
            ],
        )
    if form and said and form != said:
        raise UsageError(f"--format {form} does not match the file name {out}", hints=["omit one of them"])
    return form or said or "safetensors"


def _reject(form: str, given: Mapping[str, object]) -> None:
    for option, value in given.items():
        if value:
            raise UsageError(
                f"{option} cannot be combined with --format {form}",
                hints=[f"omit {option}"],
            )


def _hub(repository: str | None, private: bool) -> Hub | None:
    """Returns the repository for the upload, None without --push-to-hub. Creates it before any file is written."""
    if repository is None:
        return None
    return Hub(repository, private=private)


def _form_of_model(checkpoint: Path) -> str:
    """Returns the format in which a model is exported to a folder: "transformers" if its component declares it.

    The model is not built. Without its recipe, or without the code of the model, only the weights can be written.
    """
    from ddpforge.api import load

    try:
        return load(checkpoint).export_format
    except ForgeError as error:
        click.echo(f"only the weights are written, because the recipe is not readable: {error.message}", err=True)
        return "safetensors"


def _weights(
    checkpoint: Path, out: str | None, default: str, chosen: _Weights, most: int | None, *, folder: bool, form: str
) -> Exported:
    """Writes weights into a file or a folder; for "transformers" also configurations and tokenizer."""
    from ddpforge.interop.export import export as write
    from ddpforge.interop.export import export_folder

    if form not in _FORMS:  # of a plugin
        from ddpforge.api import named_format
        from ddpforge.interop.export import export_as

        return export_as(checkpoint, Path(out or f"{default}.{form}"), named_format(form), **chosen._asdict())
    if form == "transformers":
        from ddpforge.api import load
        from ddpforge.interop.export import FolderParts

        trained = load(checkpoint)
        needed = FolderParts.of(trained.bare(), trained.data_with("tokenizer"), merged=chosen.merge)
        return needed.save(export_folder(checkpoint, Path(out or default), **chosen._asdict(), most=most))
    if folder:
        return export_folder(checkpoint, Path(out or default), **chosen._asdict(), most=most)
    return write(checkpoint, Path(out or f"{default}.safetensors"), **chosen._asdict())


def _adapters(checkpoint: Path, out: Path, weights: str, dtype: Precision | None, force: bool) -> Exported:
    """Writes the adapters into a folder for peft."""
    from ddpforge.api import load
    from ddpforge.interop.export import export_adapters

    trained = load(checkpoint)
    frozen = _left_out(checkpoint)
    return export_adapters(checkpoint, out, trained.bare(), weights=weights, dtype=dtype, force=force, base=frozen)


def _program(checkpoint: Path, out: Path, form: str, weights: str, force: bool) -> Exported:
    """Writes a torch.export or ONNX program."""
    from ddpforge.api import load
    from ddpforge.disk import reject_existing
    from ddpforge.interop import torch_export
    from ddpforge.interop.export import exported_file

    reject_existing(out, force=force)
    if form == "onnx":
        torch_export.require_onnx()
    trained = load(checkpoint, weights=weights)
    model = trained.model()
    inputs = torch_export.inputs_of(model, trained.task(), trained.batch(torch_export.SAMPLES), torch_export.SAMPLES)
    (torch_export.write_onnx if form == "onnx" else torch_export.write_pt2)(model, inputs, out)
    return exported_file(out, trained.step, len(model.state_dict()))


# ---------------------------------------------------------------------------------------------- the hub
class Hub:
    """Repository of a model on the Hugging Face hub, or on the server in HF_ENDPOINT. It is created if it is missing.

    The token is that of `hf auth login`, or HF_TOKEN. Raises UsageError for an invalid name, and SetupError if
    the hub rejects a request or cannot be reached.
    """

    def __init__(self, name: str, *, private: bool = False) -> None:

        self.name = name
        self._hub: Any = library("huggingface_hub", "hub")
        if name.count("/") != 1:
            raise UsageError(f"--push-to-hub {name}: expected USER/NAME")
        with self._explaining_errors():
            self._api = self._hub.HfApi()
            self._api.create_repo(name, exist_ok=True, private=private)

    def push(self, files: Mapping[str, Path], message: str) -> str:
        """Uploads `files`, by their names in the repository, in one commit. Returns the URL of the commit."""
        adds = [
            self._hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)) for name, path in files.items()
        ]
        with self._explaining_errors():
            commit: Any = self._api.create_commit(self.name, adds, commit_message=message)
        return str(commit.commit_url)

    @contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        try:
            yield
        except self._hub.errors.HFValidationError as error:
            raise UsageError(f"--push-to-hub {self.name}: {error}") from error
        except (OSError, self._hub.errors.HTTPError) as error:
            said = next(iter(str(error).splitlines()), type(error).__name__)
            raise SetupError(
                f"the request to the hub for {self.name} failed: {said}",
                hints=["use a token with write access: `hf auth login`, or HF_TOKEN", "check the network connection"],
            ) from error
