"""Offline features: ``spec-trainer capture`` writes a folder, ``data.features=FOLDER`` trains from it.

Reads top-down: ``index`` (what a folder holds), ``shard`` (one file of it), ``folder`` (which files are there),
``store`` (a folder as a run sees it, with every check before a start), ``stream`` (the micro-batches of a rank),
``verify`` (all checksums at once).
"""
