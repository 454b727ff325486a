"""Division of replicated tensors: exactly one rank writes each element, and all ranks write about the same amount."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ddpforge.checkpoint.write_balance import Extent, deal
from ddpforge.interfaces.regions import FlatRange, find_gap

extents = st.dictionaries(
    st.text("abc", max_size=3), st.builds(Extent, st.integers(0, 400), st.sampled_from([1, 2, 4, 8])), max_size=9
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(extents, st.integers(1, 7), st.integers(0, 300))
def test_each_element_is_assigned_to_one_rank_and_shares_are_about_equal(
    tensors: dict[str, Extent], ranks: int, smallest: int
) -> None:
    dealt = [deal(tensors, rank=rank, ranks=ranks, smallest=smallest) for rank in range(ranks)]

    for name, extent in tensors.items():
        pieces = [mine[name] for mine in dealt if mine[name].numel]
        assert find_gap((extent.numel,), pieces) is None
        if len(pieces) > 1:
            assert min(pieces[0].numel, pieces[-1].numel) * extent.itemsize + 8 > smallest
    divided = [name for name in tensors if sum(mine[name].numel > 0 for mine in dealt) > 1]
    assert len(divided) < ranks

    total = sum(extent.nbytes for extent in tensors.values())
    most = max(sum(mine[name].numel * extent.itemsize for name, extent in tensors.items()) for mine in dealt)
    assert most <= total / ranks + 2 * smallest + 8


def test_the_order_of_the_tensors_does_not_matter() -> None:
    tensors = {"b": Extent(10, 4), "a": Extent(7, 8), "c": Extent(100, 2)}

    for rank in range(3):
        assert deal(tensors, rank=rank, ranks=3) == deal(dict(reversed(tensors.items())), rank=rank, ranks=3)


def test_small_tensors_are_not_divided_and_a_large_one_is() -> None:
    tensors = {f"small {i}": Extent(1000, 4) for i in range(9)} | {"large": Extent(10 << 20, 4)}

    first, second = (deal(tensors, rank=rank, ranks=2) for rank in range(2))

    assert {name for name in tensors if first[name].numel and second[name].numel} == {"large"}
    assert abs(first["large"].numel - second["large"].numel) < 1e5


def test_no_or_empty_tensors_give_empty_shares() -> None:
    assert deal({}, rank=1, ranks=2) == {}
    assert deal({"empty": Extent(0, 4)}, rank=1, ranks=2) == {"empty": FlatRange(0, 0)}


def test_a_cut_moves_to_the_nearer_end_of_a_tensor_if_a_piece_would_be_small() -> None:
    """200 bytes among two ranks; a piece must have at least 30 bytes."""
    for sizes, mine in (
        ((80, 120), (80, 0)),  # 20 bytes into the second tensor: rank 1 gets all of it
        ((71, 129), (71, 0)),
        ((70, 130), (70, 30)),
        ((130, 70), (100, 0)),
        ((129, 71), (129, 0)),  # 29 bytes before the end of the first
        ((90, 20, 90), (90, 0, 0)),  # in the middle: before it
    ):
        tensors = {f"{number}": Extent(size, 1) for number, size in enumerate(sizes)}
        first, second = (deal(tensors, rank=rank, ranks=2, smallest=30) for rank in range(2))

        assert tuple(found.numel for found in first.values()) == mine, sizes
        for name, extent in tensors.items():
            assert first[name].numel + second[name].numel == extent.numel, sizes
