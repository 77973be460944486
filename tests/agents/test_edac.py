"""Memory errors from a tree as the kernel's EDAC core writes it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from agents.collector import NoData
from agents.collectors.host.processors import Edac

MISSING = 2**64 - 1


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def controller(name: str, corrected: int, uncorrected: int, modules: Iterable[str]) -> dict[str, str]:
    contents = {
        "ce_count": corrected,
        "ue_count": uncorrected,
        "ce_noinfo_count": 0,
        "mc_name": "Skylake Socket#0 IMC#0",
    }
    for i, module in enumerate(modules):
        contents |= {f"{module}/dimm_ce_count": corrected - i, f"{module}/dimm_ue_count": uncorrected}
        contents |= {
            f"{module}/dimm_label": f"CPU_SrcID#0_MC#0_Chan#{i}_DIMM#0",
            f"{module}/dimm_mem_type": "Registered-DDR5",
        }
        contents |= {f"{module}/size": "65536"}
    return {f"{name}/{file}": f"{text}\n" for file, text in contents.items()}


def test_errors_are_reported_per_module_and_per_node(tmp_path: Path) -> None:
    root = files(tmp_path, controller("mc0", 5, 0, ("dimm0", "dimm3")) | controller("mc1", 7, 2, ("rank1",)))
    edac = Edac(root=root)
    edac.open("n1")
    node, modules = edac.read()
    assert {name: values.tolist() for name, values in node.columns.items()} == {
        "node.memory_corrected": [12],
        "node.memory_uncorrected": [2],
    }
    assert modules.entities == ("dimm:n1.mc0.dimm0", "dimm:n1.mc0.dimm3", "dimm:n1.mc1.rank1")
    assert modules.columns["dimm.corrected"].tolist() == [5, 4, 7]
    assert modules.columns["dimm.uncorrected"].tolist() == [0, 0, 2]


def test_the_label_identifies_the_slot(tmp_path: Path) -> None:
    edac = Edac(root=files(tmp_path, controller("mc0", 0, 0, ("dimm0",))))
    edac.open("n1")
    found = edac.inventory()
    assert found.keys() == {"node:n1", "dimm:n1.mc0.dimm0"}
    assert found["dimm:n1.mc0.dimm0"].parents == ("node:n1",)
    assert found["dimm:n1.mc0.dimm0"].attributes == {
        "label": "CPU_SrcID#0_MC#0_Chan#0_DIMM#0",
        "memory_type": "Registered-DDR5",
        "size_mib": "65536",
    }


def test_a_broken_file_costs_only_its_own_value(tmp_path: Path) -> None:
    root = files(tmp_path, controller("mc0", 5, 1, ("dimm0", "dimm1")))
    (root / "mc0" / "dimm0" / "dimm_ce_count").write_text("what?\n")
    (root / "mc0" / "ue_count").unlink()
    edac = Edac(root=root)
    edac.open("n1")
    node, modules = edac.read()
    assert modules.columns["dimm.corrected"].tolist() == [MISSING, 4]
    assert modules.columns["dimm.uncorrected"].tolist() == [1, 1]
    assert node.columns["node.memory_corrected"].tolist() == [5]
    assert node.columns["node.memory_uncorrected"].tolist() == [MISSING]


def test_a_sum_without_one_controller_is_missing_instead_of_decreasing(tmp_path: Path) -> None:
    root = files(tmp_path, controller("mc0", 5, 0, ()) | controller("mc1", 7, 0, ()))
    edac = Edac(root=root)
    edac.open("n1")
    (root / "mc1" / "ce_count").unlink()
    (node,) = edac.read()
    assert node.columns["node.memory_corrected"].tolist() == [MISSING]


def test_without_controllers_the_message_names_the_drivers(tmp_path: Path) -> None:
    with pytest.raises(NoData, match=r"no memory controller; expected .*amd64_edac"):
        Edac(root=tmp_path).open("n1")


def test_controllers_that_disappear_are_no_data(tmp_path: Path) -> None:
    root = files(tmp_path, controller("mc0", 5, 0, ()))
    edac = Edac(root=root)
    edac.open("n1")
    (root / "mc0" / "ce_count").unlink()
    with pytest.raises(NoData, match="disappeared"):
        edac.read()
