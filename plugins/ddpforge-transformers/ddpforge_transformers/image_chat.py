"""Dataset of chats with images, for models of images and text."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from ddpforge.errors import UsageError
from PIL import Image, ImageOps
from pydantic import Field
from torch import Tensor
from transformers import AutoProcessor, ProcessorMixin

from ddpforge_transformers.chat import ChatData, Encoded
from ddpforge_transformers.chat_forms import IMAGE, Chat, Form, Plain, read_chats
from ddpforge_transformers.chat_images import ImageFile, taken_out
from ddpforge_transformers.chat_rendering import Rendered, Span
from ddpforge_transformers.data import IGNORED, Batch, Length, NewTokens, check_vocabulary, padded, saved_folder
from ddpforge_transformers.rows import OnInvalid, Row, Split, read_rows

__all__ = ["ImageChatData"]

ddpforge_plugin_api = 3

_COLOUR = (200, 90, 30)  # of blank images; some models leave out images whose values are all 0
_BLANK = (32, 32)  # width and height of the image of a batch without images
_SHOWN, _NAME = 128, 20  # width and height in pixels of an image that `ddpforge data show` draws, and letters below it


@dataclass(frozen=True)
class _RenderedImages(Rendered):
    """Text of a chat whose images have all their tokens; `given` has one token each, as the template prints it."""

    given: str = ""
    images: Sequence[ImageFile] = ()
    places: Sequence[Span] = ()  # of the images in the text


class ImageChatData(ChatData):
    """Dataset of chats with images: one chat per line, in the files and forms of `chat`, with images in its messages.

    An image is a part of a message's content, {type = "image", image = FILE}, or `path` or `url` in place of `image`.
    Or a line has `images`, a list of files, for parts {type = "image"} without a file; for each `<image>` in texts; or,
    without any of these, before the text of the user's first message. Files are relative to the file with the line.
    They are decoded when a sample is read. A chat may have no image, one, or several.

    `processor` turns text and images into the inputs of the model: tokens, `pixel_values`, and what else it returns. A
    sample has them for one chat, and `labels`, int64 [T]: -100 for tokens that are not learnt, and for all tokens of
    images. A batch is padded to its longest sample on the right, with the images of all samples in their order.

    A batch without images gets one: after the end of its shortest sample, so that no token that is learnt sees it. So
    the parts of the model for images are used in every micro-batch on every rank, as sharding and DDP need, and their
    gradient is 0. The sample is longer by the tokens of this image.

    Raises ValueError for invalid lines and images, with file and line, as `chat` does; for a template that does not
    print an image; and for a chat longer than `max_length`, unless these are left out: a cut would remove tokens of
    images.
    """

    has_images = True

    def __init__(
        self,
        *,
        path: Annotated[
            Path,
            Field(description="A file (.jsonl, .json, .parquet), a folder of them, or a dataset of Hugging Face."),
        ],
        processor: Annotated[
            str, Field(description="Folder in which transformers saved a processor, or a name on the hub.")
        ],
        processor_options: Annotated[
            Mapping[str, Any],
            Field(description="Values of the image processor or the processor, e.g. { do_image_splitting = false }."),
        ] = {},
        images: Annotated[
            Path | None, Field(description="Folder of the images; absent: that of the file with the line.")
        ] = None,
        template: Annotated[
            Path | None, Field(description="File with a chat template (Jinja); absent: that of the processor.")
        ] = None,
        template_options: Annotated[
            Mapping[str, Any], Field(description="Variables for the template, e.g. { enable_thinking = false }.")
        ] = {},
        form: Annotated[Form | None, Field(description="Form of all lines; absent: that of the first line.")] = None,
        train_on: Annotated[
            Sequence[Literal["system", "developer", "user", "assistant", "tool"]],
            Field(min_length=1, description="Roles of the learnt messages."),
        ] = ("assistant",),
        last_turn_only: Annotated[bool, Field(description="Only the last message of these roles is learnt.")] = False,
        max_length: Annotated[
            Length, Field(description="Maximum number of tokens of a sample, with those of images.")
        ] = 2048,
        truncation: Annotated[
            Literal["error", "drop"], Field(description='Longer chats: "error" refuses them, "drop" leaves them out.')
        ] = "error",
        on_invalid: OnInvalid = "error",
        new_tokens: NewTokens = (),
        split: Split = None,
    ) -> None:
        self._options, self._folder = processor_options, images
        self._samples: list[tuple[str, Sequence[ImageFile]]] = []  # text as the template prints it, and images
        self._expansions: dict[tuple[tuple[int, int], ...], list[str]] = {}
        self._found: dict[bytes, int] | None = None
        if images is not None and not images.is_dir():
            raise UsageError(f"images: there is no folder {images}", key="images")
        super().__init__(
            path=path,
            tokenizer=processor,
            template=template,
            template_options=template_options,
            form=form,
            train_on=train_on,
            last_turn_only=last_turn_only,
            max_length=max_length,
            truncation=truncation,
            on_invalid=on_invalid,
            new_tokens=new_tokens,
            split=split,
        )
        if template is not None:
            self.processor.chat_template = self.tokenizer.chat_template
        self._text_keys = {"input_ids", "labels", *self._processed("x", ())}
        self._blank: Batch | None = None
        if shortest := [len(one) for one, (_, files) in zip(self._rows(), self._samples, strict=True) if not files]:
            self._blank = self._blank_image()
            self.max_length = max(max_length, max(shortest) + len(self._blank["input_ids"]))

    # ------------------------------------------------------------------------------------------ samples
    def __getitem__(self, index: int) -> Batch:
        """Returns the tensors of one chat: of its tokens [T], and of its images as the processor returns them.

        Raises ValueError for an image that cannot be decoded, or was changed since the run started.
        """
        sample = super().__getitem__(index)
        text, files = self._samples[index]
        found = self._processed(text, [file.read() for file in files])
        if not torch.equal(found["input_ids"], sample["input_ids"]):
            raise ValueError(
                f"the processor {self._name} gives other tokens for sample {index} than for blank images of the same"
                " size; the images change the text, which is not supported"
            )
        return {**found, "labels": sample["labels"]}

    def collate(self, samples: Sequence[Batch]) -> Batch:
        """Returns the tensors of all samples: those of tokens [B, T], padded on the right, and those of images.

        Images are joined along their first dimension, and padded with 0 along others, as processors do.
        """
        if self._blank is not None and not any(self._has_image(one) for one in samples):
            samples = self._with_blank(samples, self._blank)
        tokens = [sample["input_ids"].tolist() for sample in samples]
        batch = {"input_ids": padded(tokens, self._pad), "attention_mask": padded([[1] * len(x) for x in tokens], 0)}
        for key in dict.fromkeys(key for sample in samples for key in sample):
            mine = [sample[key] for sample in samples if key in sample]
            if key == "labels":
                batch[key] = padded([one.tolist() for one in mine], IGNORED)
            elif key in self._text_keys:
                batch.setdefault(key, padded([one.tolist() for one in mine], 0))
            else:
                batch[key] = _joined(mine)
        return batch

    def _has_image(self, sample: Batch) -> bool:
        return not self._text_keys.issuperset(sample)

    def _with_blank(self, samples: Sequence[Batch], blank: Batch) -> list[Batch]:
        """Returns the samples with an image after the shortest, whose tokens are not learnt."""
        lengths = [len(sample["input_ids"]) for sample in samples]
        place = lengths.index(min(lengths))
        one = {key: torch.cat([values, blank[key]]) for key, values in samples[place].items()}
        more = {key: values for key, values in blank.items() if key not in one}
        return [*samples[:place], one | more, *samples[place + 1 :]]

    def _blank_image(self) -> Batch:
        """Returns the tensors of a message with a blank image, for batches without images."""
        text = self._render.prompt([{"role": "user", "content": f"{IMAGE}x"}])
        found = self._processed(text, [Image.new("RGB", _BLANK, _COLOUR)])
        return {**found, "labels": torch.full_like(found["input_ids"], IGNORED)}

    def _processed(self, text: str, images: Sequence[Image.Image]) -> Batch:
        """Returns the processor's tensors of one text, those of tokens without the dimension of the batch."""
        given = {"images": list(images)} if images else {}
        found = self.processor(text=[text], **given, add_special_tokens=False, return_tensors="pt")
        if wrong := [key for key, values in found.items() if not isinstance(values, Tensor)]:
            raise ValueError(
                f"the processor {self._name} returns {wrong[0]}, which is not a tensor and is not supported"
            )
        shape = found["input_ids"].shape
        known = getattr(self, "_text_keys", None)
        return {
            key: values[0] if (values.shape == shape if known is None else key in known) else values
            for key, values in found.items()
        }

    def encode_image_chat(self, messages: Sequence[dict[str, Any]], images: Sequence[str]) -> Batch:
        """Returns the inputs of the model for messages with images before the text of the user's first message.

        The template adds its prompt for an answer. Raises ValueError for images that cannot be read, and if the
        template refuses the messages.
        """
        files = [ImageFile.at(Path(name)) for name in images]
        first = next(number for number, one in enumerate(messages) if one["role"] == "user")
        given = [dict(one) for one in messages]
        given[first]["content"] = IMAGE * len(files) + given[first]["content"]
        text = self._render.prompt(given)
        found = self._processed(text, [file.read() for file in files])
        return {key: one[None] if key in self._text_keys else one for key, one in found.items()}

    def text_parts(self, batch: Batch) -> list[list[tuple[str, str]]]:
        """Returns the text of each sample in parts, with the number of each image's tokens, its file and its size."""
        rows = zip(*(batch[key].tolist() for key in ("input_ids", "labels", "attention_mask")), strict=True)
        return [
            list(self._collapsed(self._parts(ids, labels), self._files_of(ids, mask))) for ids, labels, mask in rows
        ]

    def batch_images(self, batch: Batch) -> tuple[Tensor, list[str]]:
        """Returns the images of a batch as uint8 [N, 3, 128, 128], with margins, and their names."""
        rows = zip(batch["input_ids"].tolist(), batch["attention_mask"].tolist(), strict=True)
        files = [file for ids, mask in rows for file in self._files_of(ids, mask)]
        squares = [ImageOps.pad(file.read(), (_SHOWN, _SHOWN), color="white") for file in files]
        images = [torch.from_numpy(np.array(one)).permute(2, 0, 1) for one in squares]
        return torch.stack(images) if images else torch.empty(0), [file.path.name[-_NAME:] for file in files]

    def _files_of(self, ids: list[int], mask: list[int]) -> list[ImageFile]:
        if self._found is None:
            self._found = {row.tobytes(): number for number, row in enumerate(self._rows())}
        number = self._found.get(np.array(ids[: sum(mask)], dtype=np.int64).tobytes())
        return [] if number is None else list(self._samples[number][1])

    def _collapsed(self, parts: list[tuple[str, str]], files: list[ImageFile]) -> Iterator[tuple[str, str]]:
        token = self.tokenizer.decode([self._image_id])
        ahead = iter(files)
        for kind, text in parts:
            if kind == "learnt" or token not in text:
                yield kind, text
                continue
            for piece, number in _runs(text, token):
                if piece:
                    yield kind, piece
                if number:
                    yield "special", f"{token} x {number}"
        if listed := ", ".join(f"{file.path.name} {file.size[0]}x{file.size[1]}" for file in ahead):
            yield "special", f"images: {listed}"

    # ------------------------------------------------------------------------------------------ while it is built
    def _loaded(self, name: str) -> Any:
        self._name = name
        self.processor = _load_processor(name, self._options)
        self._token = str(self.processor.image_token)
        tokenizer = self.processor.tokenizer
        if self.processor.chat_template:
            tokenizer.chat_template = self.processor.chat_template
        self._media = {  # tokens that would count as media
            token
            for owner in (self.processor, tokenizer)
            for kind in ("image", "video", "audio", "boi", "eoi")
            if isinstance(token := getattr(owner, f"{kind}_token", None), str)
        }
        return tokenizer

    def _chats(
        self, path: Path, files: list[Path], split: str | None
    ) -> Iterator[tuple[str, Chat | Plain | ValueError]]:
        images: deque[Sequence[ImageFile]] = deque()

        def rows() -> Iterator[tuple[str, Row | ValueError]]:
            for file in files or [path]:
                folder = self._folder or (file.parent if files else path)
                for where, row in read_rows(file, [file] if files else [], split):
                    mine: Sequence[ImageFile] = ()
                    if not isinstance(row, ValueError):
                        try:
                            row, mine = taken_out(row, folder)
                        except ValueError as error:
                            row = ValueError(f"{where}: {error}")
                    images.append(mine)
                    yield where, row

        for where, one in read_chats(rows(), self._form):
            mine = images.popleft()
            yield where, replace(one, images=mine) if isinstance(one, Chat) else one

    def _rendered(self, one: Chat | Plain) -> Rendered | ValueError:
        if isinstance(one, Plain):
            return ValueError('"prompt" and "completion" are texts, which have no place for images: write "messages"')
        for number, message in enumerate(one.messages):
            if found := next((token for token in self._media if token in message["content"]), None):
                return ValueError(
                    f"message {number} has the text {found}, with which the processor marks media; write an image as a"
                    ' part {"type": "image"}'
                )
        rendered = super()._rendered(one)
        if isinstance(rendered, ValueError):
            return rendered
        count = rendered.text.count(self._token)
        if count != len(one.images):
            return ValueError(
                f"the chat template of {self._name} prints {count} image tokens ({self._token}) for {len(one.images)}"
                " images; use a `template` that prints one for each part of the type image"
            )
        try:
            return self._expanded(rendered, one.images)
        except ValueError as error:
            return error

    def _expanded(self, rendered: Rendered, images: Sequence[ImageFile]) -> _RenderedImages:
        """Returns the text with all tokens of the images, and its spans moved; no token of an image is learnt."""
        pieces = rendered.text.split(self._token)
        text, places, moves = pieces[0], [], []  # moves: end of an image in the given text, and characters gained
        end = len(pieces[0])
        for piece, whole in zip(pieces[1:], self._expansion(images), strict=True):
            places.append((len(text), len(text) + len(whole)))
            text, end = text + whole, end + len(self._token)
            moves.append((end, len(text) - end))
            text, end = text + piece, end + len(piece)

        def moved(place: int) -> int:
            return place + next((gained for end, gained in reversed(moves) if end <= place), 0)

        spans = [(moved(start), moved(end)) for start, end in rendered.learnt]
        spans = [part for span in spans for part in _without(span, places)]
        return _RenderedImages(
            text, spans, (), rendered.lost, rendered.control, given=rendered.text, images=images, places=places
        )

    def _expansion(self, images: Sequence[ImageFile]) -> list[str]:
        """Returns the texts that stand for the images of a chat; they depend on the sizes of the images."""
        sizes = tuple(image.size for image in images)
        if sizes not in self._expansions:
            blank = [Image.new("RGB", size, _COLOUR) for size in sizes]
            found = []
            if blank:
                try:
                    made = self.processor(
                        text=[self._token * len(sizes)], images=blank, return_text_replacement_offsets=True
                    )
                except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
                    shown = ", ".join(f"{width} x {height}" for width, height in sizes)
                    raise ValueError(f"the processor {self._name} refuses images of {shown} pixels: {error}") from error
                found = [one["replacement"] for one in made["text_replacement_offsets"][0]]
            self._expansions[sizes] = found
        return self._expansions[sizes]

    def _cut(self, where: str, encoded: Encoded, rendered: Rendered) -> Iterator[Encoded | str]:
        """Yields the sample, or what became of it, and keeps its text and its images."""
        assert isinstance(rendered, _RenderedImages)
        if len(encoded[0]) > self.max_length and self._truncation == "error":
            ids = np.array(encoded[0])
            raise ValueError(
                f"{where} has {len(ids)} tokens, {int((ids == self._image_id).sum())} of them for"
                f" {len(rendered.images)} images, more than max_length = {self.max_length}; a cut would remove tokens"
                ' of images, so raise it, make images smaller, or set truncation to "drop"'
            )
        for one in super()._cut(where, encoded, rendered):
            if not isinstance(one, str):
                self._samples.append((rendered.given, rendered.images))
            yield one

    @property
    def _image_id(self) -> int:
        return int(self.processor.image_token_ids[0])

    def _rows(self) -> Iterator[np.ndarray[Any, Any]]:
        """Yields the tokens of each sample, int64 [T]."""
        for coded in np.split(self._coded, self._ends[:-1]):
            yield coded.astype(np.int64) >> 1


def _load_processor(name: str, options: Mapping[str, Any]) -> Any:
    """Returns a processor for images and text; raises UsageError or ValueError if there is none, or for options."""
    place = saved_folder(name, "processor")
    try:
        # Never runs code of the processor's folder. Without the keyword transformers would prompt on the terminal.
        found = AutoProcessor.from_pretrained(place, trust_remote_code=False, **options)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise ValueError(f"no processor could be loaded from `{name}`: {str(error).splitlines()[0]}") from error
    images = getattr(found, "image_processor", None)
    if not isinstance(found, ProcessorMixin) or images is None or getattr(found, "tokenizer", None) is None:
        raise ValueError(
            f"`{name}` has a {type(found).__name__}, not a processor for images and text; for chats without images set"
            ' use = "chat"'
        )
    check_vocabulary(found.tokenizer, name)
    if getattr(found, "image_token", None) is None:
        raise ValueError(f"the processor {type(found).__name__} of `{name}` has no image_token; it is not supported")
    known = {*images.to_dict(), *vars(images), *vars(found)} - {"image_processor_type", "processor_class", "tokenizer"}
    for key in options:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"processor_options: {type(images).__name__} has no value `{key}`{hint}")
    return found


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Returns tensors joined along the first dimension, and padded with 0 along others."""
    shape = [max(sizes) for sizes in zip(*(one.shape[1:] for one in tensors), strict=True)]
    whole = tensors[0].new_zeros((sum(len(one) for one in tensors), *shape))
    place = 0
    for one in tensors:
        whole[(slice(place, place + len(one)), *(slice(size) for size in one.shape[1:]))] = one
        place += len(one)
    return whole


def _without(span: Span, places: Sequence[Span]) -> Iterator[Span]:
    """Yields the parts of a span outside of `places`, which are in order."""
    start, end = span
    for first, last in places:
        if last <= start or first >= end:
            continue
        if first > start:
            yield start, first
        start = last
    if start < end:
        yield start, end


def _runs(text: str, token: str) -> list[tuple[str, int]]:
    """Returns the pieces of a text, and how often `token` follows each of them."""
    found: list[tuple[str, int]] = []
    for number, piece in enumerate(text.split(token)):
        if number:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        if piece or not number:
            found.append((piece, 0))
    return found
