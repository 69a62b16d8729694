"""The planted faults of tools/mutate.py still fit the code."""

from __future__ import annotations

import pytest

from tools.mutate import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_one_place(fault: Fault) -> None:
    assert (ROOT / "megatron_rl" / fault.file).read_text().count(fault.old) == 1
