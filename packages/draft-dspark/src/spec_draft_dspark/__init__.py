"""The plugin of the DSpark block draft."""
