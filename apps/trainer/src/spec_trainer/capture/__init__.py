"""``spec-trainer capture``: features of every sample into a folder."""
