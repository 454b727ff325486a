"""Packing: joins short samples to blocks without padding, in which no sample sees another one."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from ddpforge.builtin.datasets.files import keep
from ddpforge.interfaces import Data
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from ddpforge_transformers.data import IGNORED, Batch, Length, Tokenized, padding_of, positions_of
from ddpforge_transformers.probe import packing_fault

__all__ = ["PackedData", "check_document_mask", "pack"]

ddpforge_plugin_api = 3

# Implementations of attention whose mask transformers builds from position_ids. For flash attention it finds the
# documents only in batches of one block; with more it would let them see each other, without an error.
_ATTENTION = ("eager", "sdpa", "flex_attention")
_OTHER_ROPE = ("dynamic", "longrope")  # their frequencies depend on the longest document of a batch
_FORMAT = 1  # of the cache; raise it if the plan of the same lengths changes


class PackedData(Tokenized):
    """Dataset that joins the samples of another one to blocks of `block_size` tokens, each with several whole samples.

    `of` is a dataset for language models, with samples or batches {input_ids, labels}, such as `chat` or
    `tokenized_jsonl`. Its samples are divided over blocks once, for all epochs, by best-fit decreasing: the longest
    sample first, each into the fullest block that has room. The blocks are the same for any ranks and in every run.

    A batch is {input_ids, labels, position_ids}, int64 [B, block_size]. Positions start at 0 in each sample;
    models of transformers then mask attention to other samples. The first token of a sample is never a target. The rest
    of a block is padding, without targets.

    Raises ValueError for a dataset of other samples, or that draws random numbers, and for samples longer than a block
    unless these are cut.
    """

    random = False
    document_mask = True

    def __init__(
        self,
        *,
        of: Annotated[Data, Field(description="Dataset of tokenized samples, e.g. `chat`.")],
        block_size: Annotated[Length, Field(description="Tokens of a block.")] = 2048,
        long_samples: Annotated[
            Literal["error", "cut"],
            Field(description='Samples longer than a block: "error" refuses them, "cut" cuts their end.'),
        ] = "error",
        index: Annotated[
            str | None, Field(description="Folder that caches the plan of blocks; absent: computes it at every start.")
        ] = None,
    ) -> None:
        self._of: Any = of
        self.block_size = block_size
        self.tokenizer = getattr(of, "tokenizer", None)
        if self.tokenizer is None or getattr(of, "random", True):
            raise ValueError(
                f"of: {type(of).__name__} cannot be packed: expected a dataset with a `tokenizer`, and random = False"
            )
        if getattr(of, "has_images", False):
            raise ValueError(
                f"of: the samples of {type(of).__name__} have images, which cannot be packed: a block would need the"
                " images of all its samples; use the dataset without packing, and train.max_tokens for batches of equal"
                " length"
            )
        if getattr(of, "document_mask", False):
            raise ValueError(f"of: the samples of {type(of).__name__} are blocks of documents already")
        self._pad, self.vocab_size = padding_of(self.tokenizer), len(self.tokenizer)
        self.forkable = getattr(of, "forkable", False)
        self._document(0)
        lengths = self._lengths()
        self._refuse_long(lengths, long_samples)
        lengths = np.minimum(lengths, block_size)
        facts = [_FORMAT, block_size, lengths.tolist()] if index else []
        stored = keep(index, "packed", facts, lambda: _stored(pack(lengths, block_size)))
        blocks = int(stored[0])
        self._ends, self._samples = stored[1 : blocks + 1], stored[blocks + 1 :]

    @property
    def _chat_renderer(self) -> Any:
        return self._of._chat_renderer if isinstance(self._of, Tokenized) else super()._chat_renderer

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Batch:
        """Returns a block, int64 [block_size] each."""
        index = range(len(self))[index]
        first = int(self._ends[index - 1]) if index else 0
        documents = [self._document(int(one)) for one in self._samples[first : self._ends[index]]]
        block = {
            "input_ids": torch.full((self.block_size,), self._pad),
            "labels": torch.full((self.block_size,), IGNORED),
        }
        starts, place = torch.zeros(self.block_size, dtype=torch.bool), 0
        for document in documents:
            size = len(document["input_ids"])
            starts[place] = True
            for name, values in document.items():
                block[name][place : place + size] = values
            place += size
        starts[place : place + 1] = True  # of the padding
        block["labels"][starts] = IGNORED  # the token before belongs to another sample
        return block | {"position_ids": positions_of(starts)}

    def collate(self, samples: Sequence[Batch]) -> Batch:
        """Returns the blocks as one batch."""
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def lengths(self) -> NDArray[np.int64]:
        """Returns the number of tokens of each block, which is `block_size`."""
        return np.full(len(self), self.block_size)

    def _document(self, index: int) -> Batch:
        """Returns the tokens and labels of a sample, without padding, and cut to a block."""
        sample = self._of[index]
        if not (isinstance(sample, dict) and {"input_ids", "labels"} <= sample.keys()):
            sample = self._alone(sample)
        return {name: torch.as_tensor(sample[name])[: self.block_size] for name in ("input_ids", "labels")}

    def _alone(self, sample: Any) -> Batch:
        """Returns tokens and labels of a sample of a dataset that tokenizes in `collate`."""
        made = self._of.collate([sample]) if hasattr(self._of, "collate") else None
        batch: dict[str, Any] = made if isinstance(made, dict) else {}
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or labels.ndim != 2 or "input_ids" not in batch:
            raise ValueError(f"of: {type(self._of).__name__} has no samples {{input_ids, labels}} for language models")
        return {"input_ids": batch["input_ids"][0], "labels": labels[0]}

    def _lengths(self) -> NDArray[np.int64]:
        if hasattr(self._of, "lengths"):
            return np.asarray(self._of.lengths() if callable(self._of.lengths) else self._of.lengths, dtype=np.int64)
        return np.array([len(self._of[number]["input_ids"]) for number in range(len(self._of))], dtype=np.int64)

    def _refuse_long(self, lengths: NDArray[np.int64], long_samples: str) -> None:
        longer = np.flatnonzero(lengths > self.block_size)
        if longer.size and long_samples == "error":
            raise ValueError(
                f"sample {longer[0]} has {lengths[longer[0]]} tokens, more than block_size = {self.block_size}; samples"
                f' that are too long: {longer.size} of {len(lengths)}; raise block_size, set long_samples = "cut", or'
                " limit the length in the dataset `of`"
            )


def pack(lengths: NDArray[np.int64], block_size: int) -> list[list[int]]:
    """Returns the samples of each block by best-fit decreasing; equal samples in their order, blocks by their first.

    Every length is at most `block_size`. Needs time in proportion to the number of samples times its logarithm.
    """
    blocks: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # blocks by their free tokens; the first that was opened is taken last
    rooms: list[int] = []  # the keys of `by_room` in rising order
    for sample in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[sample])
        at = bisect_left(rooms, size)
        if at == len(rooms):
            block, room = len(blocks), block_size
            blocks.append([])
        else:
            room = rooms[at]
            block = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        blocks[block].append(sample)
        if left := room - size:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(block)
    return sorted(sorted(block) for block in blocks)


def _stored(blocks: list[list[int]]) -> NDArray[np.int64]:
    """Returns the plan as one array: the number of blocks, the end of each, and the samples of all."""
    ends = np.cumsum([len(block) for block in blocks])
    return np.concatenate([[len(blocks)], ends, *blocks]).astype(np.int64)


def check_document_mask(model: nn.Module, data: Any) -> None:
    """Raises ValueError if `data` has several documents in a sample, and the model lets them see each other.

    The model computes two rows of documents, and each document alone; a list of model types would age.
    """
    if not getattr(data, "document_mask", False):
        return
    config: Any = model.config
    packed = isinstance(data, PackedData)
    other = "use the samples without packing" if packed else "set document_mask = false, so that they see each other"
    attention = getattr(config, "_attn_implementation", None)  # transformers has no public name for it
    if attention not in _ATTENTION:
        raise ValueError(
            f"with attention = {attention!r} the documents in a block would see each other; set model.attention to one"
            f" of {', '.join(_ATTENTION)}, or {other}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(one for one in rope.values() if isinstance(one, dict))]  # of all layers, or by kind of layer
    if kinds := [one["rope_type"] for one in ropes if one.get("rope_type") in _OTHER_ROPE]:
        raise ValueError(
            f"the rotary embeddings of the model (rope_type {kinds[0]!r}) depend on the longest document of a batch, so"
            f" that documents in one batch change each other; {other}"
        )
    if "chunked_attention" in (getattr(config.get_text_config(), "layer_types", None) or ()):
        raise ValueError(
            "the model attends in chunks of a block, whose borders do not follow the documents in it (layer_types has"
            f" chunked_attention); {other}"
        )
    if fault := packing_fault(model):
        raise ValueError(
            f"documents in a block must not see each other, but in this model ({config.model_type}) they do: {fault};"
            f" {other}"
        )
