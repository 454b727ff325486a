"""Pytrees of batches: leaves, slices, comparison, fingerprints and moves between devices."""

import subprocess
import sys
from collections import OrderedDict, UserDict
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from ddpforge.data import pytree
from ddpforge.data.pytree import close, digest, leaves, may_hold, merge, take, to_device


class Pair(NamedTuple):
    x: Any
    y: Any


class Unknown:
    """Object whose repr contains its memory address."""


# ---------------------------------------------------------------------------------------------- leaves
def test_leaves_are_the_items_of_dicts_lists_and_tuples_in_order() -> None:
    nest = {"b": [1, (2, "text")], "a": Pair(3, {"c": None}), "empty": []}
    assert list(leaves(nest)) == [1, 2, "text", 3, None]
    assert list(leaves("text")) == ["text"]
    assert list(leaves(OrderedDict(x=(1,)))) == [1]


@pytest.mark.parametrize(
    ("batch", "lengths"),
    [
        (["name", torch.tensor(7.0), {"x": torch.zeros(3, 5)}, np.zeros(4)], {3, 4}),
        (torch.zeros(0, 2), {0}),
        ({"images": [torch.zeros(3, 8, 6)] * 5, "names": ("a", "b")}, {2, 3, 5}),
    ],
)
def test_a_batch_may_hold_as_many_samples_as_the_length_of_any_leaf(batch: Any, lengths: set[int]) -> None:
    assert {samples for samples in range(10) if may_hold(batch, samples)} == lengths


def test_a_batch_without_visible_samples_may_hold_any_number() -> None:
    for batch in ("text", 7, torch.tensor(1.0), (Graphs(torch.ones(5)), torch.ones(2))):
        assert may_hold(batch, 9)


# ---------------------------------------------------------------------------------------------- slices
def test_take_slices_every_tensor_and_lists_of_plain_values() -> None:
    batch = {
        "x": torch.arange(8).view(4, 2),
        "names": ["a", "b", "c", "d"],
        "both": (torch.arange(4), [torch.arange(4) + 10]),
        "pair": Pair(torch.arange(4), ("p", "q", "r", "s")),
    }
    cut = take(batch, 1, 3, 4)
    assert cut["x"].tolist() == [[2, 3], [4, 5]]
    assert cut["names"] == ["b", "c"]
    assert type(cut["both"]) is tuple
    assert type(cut["both"][1]) is list
    assert [x.tolist() for x in leaves(cut["both"])] == [[1, 2], [11, 12]]
    assert (type(cut["pair"]), cut["pair"].x.tolist(), cut["pair"].y) == (Pair, [1, 2], ("q", "r"))


def test_take_keeps_values_without_a_sample_dimension() -> None:
    batch = [torch.arange(4), torch.tensor(5), torch.arange(3), ["a", "b", "c"], "text", 7, None]
    _, *rest = take(batch, 0, 2, 4)
    assert rest[0].item() == 5
    assert rest[1].tolist() == [0, 1, 2]
    assert rest[2:] == [["a", "b", "c"], "text", 7, None]


def test_a_list_of_as_many_tensors_as_samples_is_not_a_list_of_samples() -> None:
    """Slices each of two tensors in a batch of two."""
    cut = take([torch.arange(2), torch.arange(2) + 10], 1, 2, 2)
    assert [x.tolist() for x in cut] == [[1], [11]]
    nested = take([(torch.arange(2),), {"y": torch.arange(2) + 10}], 1, 2, 2)
    assert [x.tolist() for x in leaves(nested)] == [[1], [11]]


def test_a_list_of_as_many_similar_items_as_samples_is_a_list_of_samples() -> None:
    """Covers images of different sizes, with a different number of boxes each."""
    images = [torch.full((3, 4 + number, 5), float(number)) for number in range(4)]
    targets = [{"boxes": torch.zeros(1 + number, 4), "names": ["a"] * (1 + number)} for number in range(4)]
    cut = take((images, targets), 1, 3, 4)
    assert [len(part) for part in cut] == [2, 2]
    assert [image.shape[1] for image in cut[0]] == [5, 6]
    assert [len(target["boxes"]) for target in cut[1]] == [2, 3]
    pairs = [*zip(images, targets, strict=True)]
    assert take(pairs, 1, 3, 4) == pairs[1:3]


def test_a_mapping_keeps_its_class() -> None:
    """Models and tasks may use its attributes."""

    class Attributes(UserDict[str, Tensor]):
        def __getattr__(self, name: str) -> Tensor:
            return self.data[name]

    class Fixed(Attributes):
        def __setitem__(self, key: str, value: Tensor) -> None:
            if key in self.data:
                raise RuntimeError("another batch size")
            super().__setitem__(key, value)

    batch = Attributes(x=torch.arange(4))
    assert take(batch, 1, 3, 4).x.tolist() == [1, 2]
    assert to_device(batch, torch.device("meta")).x.is_meta
    assert batch.x.tolist() == [0, 1, 2, 3]
    assert type(take(OrderedDict(batch), 1, 3, 4)) is OrderedDict
    for other in (Fixed(x=torch.arange(4)), MappingProxyType({"x": torch.arange(4)})):
        assert take(other, 1, 3, 4)["x"].tolist() == [1, 2]


def test_as_many_columns_as_samples_are_not_a_list_of_samples() -> None:
    columns = (torch.zeros(4, 2), torch.zeros(4).long(), torch.zeros(7, 7), torch.zeros(4))
    assert [len(column) for column in take(columns, 1, 3, 4)] == [2, 2, 7, 2]
    images, targets = [torch.zeros(3, 8, 8)] * 2, [{"boxes": torch.zeros(1, 4)}] * 2
    assert [len(part) for part in take((images, targets), 1, 2, 2)] == [1, 1]


# ---------------------------------------------------------------------------------------------- fingerprints
def _different() -> list[Any]:
    image = Image.new("RGB", (2, 1))
    return [
        0,
        1,
        1.0,
        True,
        "1",
        None,
        "",
        [],
        [1, 2],
        [2, 1],
        torch.tensor(1.0),
        torch.tensor(1.0, dtype=torch.float64),
        torch.tensor(1),
        torch.tensor([1.0]),
        torch.tensor([[1.0]]),
        torch.zeros(2, 3),
        torch.zeros(3, 2),
        torch.zeros(6),
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.tensor([0.0, -0.0]),
        np.array(["a", "b"]),
        np.array(["a", "c"]),
        np.zeros(2, dtype=complex),
        np.array([True, False]),
        np.array([3, 4], dtype=np.uint8),
        image,
        Image.new("RGB", (1, 2)),
        Image.new("L", (2, 1)),
        Image.new("RGB", (2, 1), (0, 0, 1)),
        Unknown(),
    ]


def test_different_nests_have_different_fingerprints() -> None:
    assert len({digest(nest) for nest in _different()}) == len(_different())


def test_equal_nests_have_equal_fingerprints() -> None:
    assert [digest(nest) for nest in _different()] == [digest(nest) for nest in _different()]
    wide = torch.arange(6.0).view(2, 3)
    assert digest({"x": wide}) == digest([wide.t().contiguous().t()]) == digest((wide.clone().requires_grad_(),))
    assert digest(wide.numpy()) == digest(wide)
    assert digest(Image.new("L", (3, 2), 7)) == digest(torch.full((2, 3), 7, dtype=torch.uint8))


def test_objects_known_only_by_their_memory_address_differ_by_class() -> None:
    class Other:
        pass

    one, two = Unknown(), Unknown()
    assert digest(one) == digest(two)
    assert digest(one) != digest(Other())


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    """Python's hash of a string differs between processes."""
    nest = "{'x': torch.arange(3), 'name': ('text', 1.5)}"
    script = f"import torch; from ddpforge.data.pytree import digest; print(digest({nest}))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == digest({"x": torch.arange(3), "name": ("text", 1.5)})


# ---------------------------------------------------------------------------------------------- equal up to rounding
@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.00001]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0001]), False),
        (torch.tensor([0.0]), torch.tensor([0.9e-5]), True),
        (torch.tensor([0.0]), torch.tensor([1.1e-5]), False),
        (torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0]), True),
        (torch.tensor([torch.nan]), torch.tensor([1.0]), False),
        (torch.zeros(2), torch.zeros(2, 1), False),
        (torch.zeros(1), torch.zeros(3), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.bfloat16), True),
        (torch.tensor([1.0]), 1.0, False),
        (1.0, 1.000001, True),
        (1.0, 1.001, False),
        (1.0, 1, True),
        (2.0, 1, False),
        (float("nan"), float("nan"), True),
        (1, 1, True),
        (1, 2, False),
        (1, True, False),
        (1.0, "1.0", False),
        ("a", "a", True),
        ("a", "b", False),
        (None, None, True),
    ],
)
def test_close_compares_values_up_to_rounding(one: Any, other: Any, alike: bool) -> None:
    assert close(one, other) is alike


def test_close_has_a_tolerance() -> None:
    assert close(torch.tensor([100.0]), torch.tensor([101.0]), tolerance=0.01)
    assert not close(torch.tensor([100.0]), torch.tensor([103.0]), tolerance=0.01)
    assert close(100.0, 101.0, tolerance=0.01)
    assert not close(100.0, 103.0, tolerance=0.01)


def test_close_distinguishes_integers_too_large_for_single_precision() -> None:
    assert not close(torch.tensor([2**24]), torch.tensor([2**24 + 1]), tolerance=1e-9)


# ---------------------------------------------------------------------------------------------- moves to a device
def test_a_pytree_moves_its_tensors_and_keeps_containers_and_other_values() -> None:
    meta, kept = torch.device("meta"), object()
    moved = to_device({"pair": Pair(torch.ones(1), [torch.ones(2), kept]), "text": "t", "two": (torch.ones(3),)}, meta)
    assert {key: type(value) for key, value in moved.items()} == {"pair": Pair, "text": str, "two": tuple}
    assert [x.device for x in leaves(moved) if isinstance(x, Tensor)] == [meta] * 3
    assert type(moved["pair"].y) is list
    assert moved["pair"].y[1] is kept


class Graphs:
    """Batch of graphs, as in graph libraries."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> "Graphs":
        return Graphs(self.nodes.to(device))


class Eager(Graphs):
    def to(self, device: torch.device, non_blocking: bool = False) -> "Eager":
        return Eager(self.nodes.to(device, non_blocking=non_blocking))


class InPlace(Graphs):
    def to(self, device: torch.device) -> "InPlace":
        self.nodes = self.nodes.to(device)
        return self


class Columns(UserDict[str, Tensor]):
    """Batch as returned by tokenizers of transformers."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Columns":
        self.data = {key: value.to(device, non_blocking=non_blocking) for key, value in self.data.items()}
        return self


class Edge(NamedTuple):
    start: Tensor
    to: Tensor


def test_an_object_is_moved_by_its_own_method() -> None:
    meta = torch.device("meta")
    packed = pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])
    graphs, eager, texts, edge = to_device(
        [Graphs(torch.ones(1)), Eager(torch.ones(1)), packed, Edge(torch.ones(1), torch.ones(1))], meta
    )
    assert (type(graphs), graphs.nodes.device) == (Graphs, meta)
    assert (type(eager), eager.nodes.device) == (Eager, meta)
    # torch requires the sizes on the CPU
    assert (texts.data.device, texts.batch_sizes.device) == (meta, torch.device("cpu"))
    assert (type(edge), edge.start.device, edge.to.device) == (Edge, meta, meta)


def test_an_object_moved_in_place_is_copied_first() -> None:
    """Fetched batches may be used again."""
    kept, columns = InPlace(torch.ones(1)), Columns(x=torch.ones(1))
    moved = to_device((kept, columns), torch.device("meta"))
    assert (moved[0].nodes.is_meta, moved[1]["x"].is_meta, type(moved[1])) == (True, True, Columns)
    assert (kept.nodes.is_meta, columns["x"].is_meta) == (False, False)


def test_an_object_is_one_leaf_that_cannot_be_sliced() -> None:
    packed, graphs = pack_sequence([torch.ones(2, 3), torch.ones(1, 3)]), Graphs(torch.ones(5))
    assert list(leaves([packed, graphs])) == [packed, graphs]
    for batch in ((packed, torch.zeros(2)), {"graphs": [graphs], "y": torch.zeros(2)}):
        with pytest.raises(ValueError, match=r"a (PackedSequence|Graphs) cannot be cut into samples"):
            take(batch, 0, 1, 2)


def test_objects_with_different_contents_have_different_fingerprints() -> None:
    ones, twos = torch.ones(2, 3), torch.full((2, 3), 2.0)
    batches = [[Graphs(ones), pack_sequence([ones])], [Graphs(twos), pack_sequence([ones])]]
    batches += [[Graphs(ones), pack_sequence([twos])], [Eager(ones), pack_sequence([ones])]]
    assert len({digest(batch) for batch in batches}) == len(batches)
    assert digest(Graphs(ones)) == digest(Graphs(ones.clone()))


def test_objects_are_moved_asynchronously_if_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Tensor, "to", lambda self, *_, **options: asked.append(options) or self)
    to_device((Graphs(torch.ones(1)), Eager(torch.ones(1))), torch.device("cpu"))
    assert asked == [{}, {"non_blocking": True}]


def test_copies_of_large_batches_use_a_side_stream_that_computation_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records the order of CUDA calls; CUDA itself is replaced. Large is above 256 KiB."""
    small, large = torch.ones(1 << 16), torch.ones((1 << 16) + 1)
    said: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            said.append(f"onto {self.name}")

        def __exit__(self, *error: Any) -> None:
            said.append(f"off {self.name}")

        def wait_stream(self, other: Any) -> None:
            said.append(f"{self.name} waits for {other.name}")

    monkeypatch.setattr(pytree, "_stream_for_copies", lambda device: Stream("aside"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("here"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(Tensor, "to", lambda self, *_, **__: said.append("copy") or self)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: said.append(f"kept for {stream.name}"))
    to_device({"x": large, "text": "t"}, torch.device("cuda"))
    assert said == ["onto aside", "copy", "off aside", "here waits for aside", "kept for here"]

    said.clear()
    to_device({"x": small, "text": "t"}, torch.device("cuda"))
    assert said == ["copy"]

    said.clear()  # the tensors of an object are unknown: they are copied on the stream that reads them
    to_device(Graphs(large), torch.device("cuda"))
    assert said == ["copy"]

    said.clear()
    to_device((large, Graphs(large)), torch.device("cuda"))
    aside = ["onto aside", "copy", "onto here", "copy", "off here", "off aside"]
    assert said == [*aside, "here waits for aside", "kept for here"]

    said.clear()
    to_device(Columns(x=large), torch.device("cuda"))
    assert said == ["onto aside", "copy", "off aside", "here waits for aside", "kept for here"]


def test_a_copy_to_the_device_is_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Tensor, "to", lambda self, *args, **options: asked.append((args, options)) or self)
    device = torch.device("cpu")
    to_device([torch.ones(1)], device)
    assert asked == [((device,), {"non_blocking": True})]


def test_batches_of_one_structure_are_merged_in_any_order() -> None:
    def batch(*numbers: int) -> Any:
        x = torch.tensor(numbers)
        return {"x": [x, x.float() / 2], "names": [str(number) for number in numbers]}

    merged = merge([batch(0, 3, 4), batch(1), batch(5, 2)], [[0, 3, 4], [1], [5, 2]])
    assert merged["x"][0].tolist() == [0, 1, 2, 3, 4, 5]
    assert merged["x"][1].tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    assert merged["names"] == list("012345")
    assert merge([(batch(1)["x"][0],), (batch(0)["x"][0],)], [[1], [0]])[0].tolist() == [0, 1]
