"""The P-EAGLE draft."""
