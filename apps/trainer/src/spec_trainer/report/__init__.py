"""Write ``report.html`` of a run: one file without scripts."""
