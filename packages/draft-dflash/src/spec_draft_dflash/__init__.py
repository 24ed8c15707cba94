"""The plugin of the DFlash block draft."""
