"""Complete runs: primary configs for `lightning-chimera-train --config-name NAME`."""
