"""The plugin of the DFlash2 block draft."""
