"""Puts the packaged config groups and recipes on Hydra's search path.

Hydra imports every plugin at start-up, in every Hydra app of the environment, so nothing here may import torch or
our own package.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class LightningChimeraSearchPathPlugin(SearchPathPlugin):
    """Appends the packaged configs last, so that a user's own files always win."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Adds `conf` and `recipes`.

        Args:
            search_path: Hydra's search path, changed in place.
        """
        for package in ("conf", "recipes"):
            search_path.append("lightning-chimera", f"pkg://lightning_chimera.{package}")
