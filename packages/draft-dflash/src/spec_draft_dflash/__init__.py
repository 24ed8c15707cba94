"""DFlash block draft: packaged as metadata until its issue lands."""
