"""Tasks of random maps: which maps a seed draws never changes: recorded runs name them."""

from __future__ import annotations

import pytest

from megatron_rl.environments.base import EpisodeSpec
from megatron_rl.environments.frozen_lake import FrozenLakeTask
from megatron_rl.environments.sokoban import SokobanTask

GROUPED = {"seed": 3, "maps_per_prompt": 2, "evaluation_maps": 4}
SPECS = {
    (FrozenLakeTask, ()): """
        train-000000-00000 593b6d60811b HFFH/HFHF/FFSF/FGHF
        train-000000-00001 35245c7feb11 GFFF/FSHH/FHFF/HFFF
        train-000007-00000 9af73482473a FFFF/FFSF/FFHF/FGFH
        train-000007-00001 3790604b7696 FFFF/FFSH/FFFG/HFFF
        eval-00000 4f55c7dff62d FFFF/HFSH/FGHH/HFFH
        eval-00001 7f775851eb11 HFFF/GHSF/FFFF/FFFF""",
    (FrozenLakeTask, tuple(GROUPED.items())): """
        train-000000-00000 d8b39f46c85b FHFS/FGFF/FFFF/FFFF
        train-000000-00001 d8b39f46c85b FHFS/FGFF/FFFF/FFFF
        train-000007-00000 7d858f051e5f FFFF/FFHS/FFHF/HFHG
        train-000007-00001 7d858f051e5f FFFF/FFHS/FFHF/HFHG
        eval-00000 cd0047781f96 FFFF/FFFF/SFFF/GFHF
        eval-00001 57d1feb2ca7d FFFF/FFSF/GFHF/FFFF""",
    (SokobanTask, (("evaluation_maps", 8),)): """
        train-000000-00000 ee9812d6eae0 -#---/----#/----@/-----/#.$--
        train-000000-00001 fb4c0d5e25a1 -----/--$.@/##--#/-----/--#--
        train-000007-00000 ed3aca48bb34 --$-./@----/---#-/#----/-#-##
        train-000007-00001 3aa59d68c18f -.$--/-##--/---@-/-----/-----
        eval-00000 6735926cb61c ----#/--#--/#----/.$-#-/-@---
        eval-00001 e134f2256973 -----/.$-#-/-#--#/-----/---@-""",
    (SokobanTask, (*GROUPED.items(), ("size", 4))): """
        train-000000-00000 27cd80545084 #---/##--/#-#@/-.$-
        train-000000-00001 27cd80545084 #---/##--/#-#@/-.$-
        train-000007-00000 2c79068a7f14 ----/----/.@$-/#-##
        train-000007-00001 2c79068a7f14 ----/----/.@$-/#-##
        eval-00000 adabdcc6effe ----/--$-/-.-@/--#-
        eval-00001 24a6684262a2 ---@/-$--/-.#-/----""",
}


@pytest.mark.parametrize(("kind", "options"), SPECS)
def test_a_seed_draws_the_maps_it_always_drew(kind: type, options: tuple[tuple[str, int], ...]) -> None:
    task = kind(**dict(options))
    specs = [*task.training_specs(0, 2), *task.training_specs(7, 2), *task.evaluation_specs(2)]
    lines = [line.split() for line in SPECS[kind, options].strip().splitlines()]
    expected = [EpisodeSpec(name, key, key, 0, {"map": tuple(rows.split("/"))}) for name, key, rows in lines]
    assert specs == expected


@pytest.mark.parametrize("kind", [FrozenLakeTask, SokobanTask])
def test_evaluation_maps_come_round_again(kind: type) -> None:
    specs = kind(**GROUPED).evaluation_specs(6)
    assert [spec.trajectory_id for spec in specs] == [f"eval-{i:05d}" for i in range(6)]
    assert [spec.options["map"] for spec in specs[4:]] == [spec.options["map"] for spec in specs[:2]]
    assert len({spec.prompt_id for spec in specs}) == 4
