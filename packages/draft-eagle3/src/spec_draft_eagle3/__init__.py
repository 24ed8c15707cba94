"""The plugin of the Eagle3 draft."""
