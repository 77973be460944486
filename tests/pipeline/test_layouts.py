"""Layouts of a large fleet are parsed once, share equal parts, and stay within their memory bound."""

from __future__ import annotations

import json
import threading

import pytest

from pipeline.model.errors import WireError
from pipeline.transport.wire import LayoutCache


def layout_text(node: str, signal: str = "gpu.power", gpus: int = 8) -> bytes:
    entities = [f"gpu:{node}.{i}" for i in range(gpus)]
    return json.dumps({"site": "s", "node": node, "blocks": [["gpu", entities, [[signal, "f4"]]]]}).encode()


def test_a_text_that_was_parsed_gives_the_same_layout_again():
    layouts = LayoutCache(1 << 20)
    assert layouts.get_layout(layout_text("n1")) is layouts.get_layout(bytes(bytearray(layout_text("n1"))))
    assert layouts.get_layout(layout_text("n1")) is not layouts.get_layout(layout_text("n2"))


def test_equal_nodes_share_shape_and_signals_and_layouts_of_one_node_share_names():
    layouts = LayoutCache(1 << 20)
    one, two, slow = (
        layouts.get_layout(t) for t in (layout_text("n1"), layout_text("n2"), layout_text("n1", "gpu.energy"))
    )
    assert one.shape is two.shape
    assert one.blocks[0].signals is two.blocks[0].signals
    assert all(a is b for a, b in zip(one.blocks[0].entities, slow.blocks[0].entities, strict=True))


def test_the_longest_unused_layouts_are_dropped_when_the_texts_exceed_their_bound():
    size = len(layout_text("n1"))
    layouts = LayoutCache(3 * size)
    first, second, _ = (layouts.get_layout(layout_text(f"n{i}")) for i in range(3))
    assert layouts.get_layout(layout_text("n0")) is first
    layouts.get_layout(layout_text("n3"))
    assert len(layouts) == 3
    assert layouts.get_layout(layout_text("n0")) is first
    assert layouts.get_layout(layout_text("n1")) is not second


def test_a_layout_larger_than_the_bound_is_parsed_and_not_kept():
    layouts = LayoutCache(1000)
    assert layouts.get_layout(layout_text("n1", gpus=100)).node == "n1"
    assert len(layouts) == 0
    layouts.get_layout(layout_text("n1"))
    assert len(layouts) == 1


@pytest.mark.parametrize(
    "blocks",
    [
        [["gpu", ["gpu:a", "gpu:a"], []]],
        [["gpu", ["a"], []]],
        [["gpu", [1], []]],
        [["gpu", [], [["x", "f4"], ["x", "f4"]]]],
        [["gpu", [], [["x", "f2"]]]],
        [["gpu", [], [[1, "f4"]]]],
        [["gpu", [], [[[], "f4"]]]],
        [[1, [], []]],
        [["gpu", [], [["\ud800", "f4"]]]],
        [["gpu", ["gpu:\ud800"], []]],
        [["gpu", 1, []]],
    ],
)
def test_a_bad_layout_is_refused_each_time_and_not_kept(blocks):
    layouts = LayoutCache(1000)
    for _ in range(2):
        with pytest.raises(WireError, match=r"layout|Unicode"):
            layouts.get_layout(json.dumps({"site": "s", "node": "n", "blocks": blocks}).encode())
    assert len(layouts) == 0


def test_several_threads_may_read_layouts_concurrently():
    layouts, found = LayoutCache(5000), []

    def read_layouts():
        found.extend(layouts.get_layout(layout_text(f"n{i % 100}")).node == f"n{i % 100}" for i in range(2000))

    threads = [threading.Thread(target=read_layouts) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8000
    assert all(found)
    assert 0 < len(layouts) <= 5000 // len(layout_text("n1"))
