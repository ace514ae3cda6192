"""Puts the packaged config groups and recipes on Hydra's search path.

Hydra imports every plugin at start-up, in every Hydra app of the environment, so neither this module nor the paths it
gives may make it import torch or our own package.
"""

from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class LightningChimeraSearchPathPlugin(SearchPathPlugin):
    """Appends the packaged configs last, so that a user's own files always win."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Adds `conf` and `recipes`.

        Args:
            search_path: Hydra's search path, changed in place.
        """
        # To look into pkg://lightning_chimera.conf Hydra would import our package, and with it Lightning and torch:
        # seconds in apps that have nothing to do with us. Finding a top-level package does not import it.
        spec = find_spec("lightning_chimera")
        for location in (spec.submodule_search_locations or []) if spec else []:
            package = Path(location)
            # In an editable install both folders still lie beside the package, at the root of the repository.
            root = package if (package / "conf").is_dir() else package.parent
            for name in ("conf", "recipes"):
                search_path.append("lightning-chimera", f"file://{root / name}")
