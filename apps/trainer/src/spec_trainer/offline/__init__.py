"""``spec-trainer capture`` writes a folder of features, and ``data.features=FOLDER`` trains from it.

Modules in reading order: ``index`` (list of a folder's contents), ``shard`` (one file of features), ``folder`` (the
folder of a capture), ``store`` (opens a folder for a run and checks it), ``stream`` (the micro-batches of a rank),
``verify`` (checks all checksums).
"""
