"""The DFlash block draft."""
