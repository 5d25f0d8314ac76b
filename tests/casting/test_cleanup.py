"""Needless casts are removed, and only these."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, Node

from bitwright.casting._cleanup import cleanup_casts
from bitwright.casting._retype import Retyper, insert_cast_after

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
ATEN = torch.ops.aten


class Chain:
    """A graph made of one placeholder, casts and consumers."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.graph, self.inserted = Graph(), set()
        self.source = self.graph.placeholder("source")
        self.source.meta["val"] = torch.empty(2, dtype=dtype)
        self.ends: list[Node] = []

    def cast(self, node: Node, dtype: torch.dtype, original: bool = False, **kwargs: object) -> Node:
        cast = self.graph.call_function(ATEN._to_copy.default, (node,), {"dtype": dtype, **kwargs})
        cast.meta["val"] = torch.empty(2, dtype=dtype)
        if not original:
            self.inserted.add(cast)
        return cast

    def use(self, node: Node) -> Node:
        user = self.graph.call_function(ATEN.neg.default, (node,))
        user.meta["val"] = node.meta["val"]
        self.ends.append(user)
        return user

    def clean(self) -> list[Node]:
        self.graph.output(tuple(self.ends))
        cleanup_casts(self.graph, self.inserted)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return [node for node in self.graph.nodes if node.target == ATEN._to_copy.default]


@pytest.mark.parametrize(
    ("start", "casts", "left"),
    [
        (F32, [(F16, False), (F32, False)], []),
        (F32, [(F16, False), (BF16, False)], [BF16]),
        (F32, [(F16, False), (BF16, False), (F32, False)], []),
        (F32, [(F32, False)], []),
        (F16, [(F32, True), (F16, False)], []),
        (F32, [(F16, True), (F32, False)], [F16, F32]),
        (F32, [(F16, True), (F16, False)], [F16]),
        (F32, [(torch.int32, False), (F32, False)], [torch.int32, F32]),
        (torch.int64, [(torch.int16, False), (torch.int64, False)], []),
        (torch.uint8, [(torch.int8, False), (torch.uint8, False)], [torch.int8, torch.uint8]),
        (F32, [(torch.complex64, False), (F32, False)], [torch.complex64, F32]),
    ],
)
def test_chains(start: torch.dtype, casts: list[tuple[torch.dtype, bool]], left: list[torch.dtype]) -> None:
    """(dtype, whether the author wrote it): what an author narrows stays narrowed."""
    chain = Chain(start)
    node = chain.source
    for dtype, original in casts:
        node = chain.cast(node, dtype, original)
    chain.use(node)
    assert [cast.kwargs["dtype"] for cast in chain.clean()] == left


@pytest.mark.parametrize("kwargs", [{"copy": True}, {"memory_format": torch.channels_last}, {"non_blocking": True}])
def test_casts_that_do_more_stay(kwargs: dict[str, object]) -> None:
    chain = Chain(F16)
    chain.use(chain.cast(chain.cast(chain.source, F32, original=True, **kwargs), F16))
    assert len(chain.clean()) == 2


def test_branches_are_bypassed_one_by_one() -> None:
    """A narrowing cast survives for the consumer that reads it, and for no other."""
    chain = Chain(F32)
    narrow = chain.cast(chain.source, F16)
    back = chain.use(chain.cast(narrow, F32))
    reads = chain.use(narrow)
    assert chain.clean() == [narrow]
    assert back.args[0] is chain.source
    assert reads.args[0] is narrow


def test_equal_casts_are_merged_but_not_the_authors_narrowing_ones() -> None:
    for original, count in ((False, 1), (True, 2)):
        chain = Chain(F32)
        for _ in range(2):
            chain.use(chain.cast(chain.source, F16, original))
        assert len(chain.clean()) == count


def test_casts_are_made_once_in_front_of_the_first_reader() -> None:
    graph = Graph()
    source = graph.placeholder("a")
    source.meta["val"] = torch.empty(2)
    readers = [graph.call_function(ATEN.neg.default, (source,)) for _ in range(2)]
    graph.output(tuple(readers))
    inserted: set[Node] = set()
    retyper = Retyper(graph, inserted)
    cast = retyper.value(source, F16, readers[0])
    assert retyper.value(source, F16, readers[1]) is cast
    assert retyper.value(source, F32, readers[1]) is source
    assert list(graph.nodes)[:4] == [source, cast, *readers]
    assert inserted == {cast}


def test_cast_after_a_node_is_read_by_all_its_users() -> None:
    graph = Graph()
    source = graph.placeholder("a")
    source.meta["val"] = torch.empty(2)
    users = [graph.call_function(ATEN.neg.default, (source,)) for _ in range(2)]
    graph.output(tuple(users))
    cast = insert_cast_after(graph, source, F16)
    assert all(user.args[0] is cast for user in users)
    assert insert_cast_after(graph, graph.placeholder("unused"), F16) is None
