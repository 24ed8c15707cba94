"""The plugin of the P-EAGLE draft."""
