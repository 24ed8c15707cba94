"""Distributions that Python finds as if they were installed."""

from pathlib import Path


def write_distribution(site: Path, name: str, entry_points: str = "", version: str = "1.0") -> Path:
    """Write the metadata of a distribution into ``site``, which is made and returned; it belongs on ``sys.path``."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    return site
