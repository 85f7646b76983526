"""Every configuration in the repository loads."""

from pathlib import Path

import pytest

from gyre.config.load import load_settings
from gyre.schedule.placement import describe_placement

FOLDER = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_configuration_loads_and_can_be_placed(path: Path) -> None:
    settings = load_settings(path)
    assert f"= {settings.num_ranks} ranks" in describe_placement(settings)


def test_quickstart_has_three_cells() -> None:
    settings = load_settings(FOLDER / "quickstart.toml")
    assert settings.placement.num_cells == 3 and settings.num_ranks == 3
    assert settings.model.path == FOLDER / "quickstart" / "policy"
