"""What one process makes of a recipe."""

import sys
from pathlib import Path

from lightning_chimera import train


def run_recipe(arguments: list[str]) -> None:
    """As `lightning-chimera-train` does with these arguments."""
    sys.argv = [str(Path(train.__file__)), *arguments]
    train.main()
