"""``spec-trainer capture``: store the features of every sample in a folder."""
