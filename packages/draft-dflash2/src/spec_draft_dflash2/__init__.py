"""The DFlash2 block draft."""
