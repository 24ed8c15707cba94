"""Prints docs/combinations.md from the tables of refused settings: ``python docs/generate_combinations.py``."""

from __future__ import annotations

from spec_trainer.plan import combinations

HEAD = """\
# Settings that do not go together

`docs/generate_combinations.py` makes this page from `plan/combinations.py`, whose tables the commands read, too.
`KEY=*` is the key, or an option, with any value of yours. A refused combination ends the command with exit code 2
before anything starts.
"""
TABLES = {
    "Every command that reads a configuration": (
        *combinations.KEYS,
        *combinations.ENGINE,
        *combinations.PARTS,
    ),
    "Each of them but `follow`": combinations.WITHOUT_FOLLOW,
    "`follow`": combinations.FOLLOW,
    "`capture`": combinations.CAPTURE,
    "`evaluate`": combinations.EVALUATE,
    "`export`": combinations.EXPORT,
    "`quickstart`": combinations.QUICKSTART,
}


def main() -> None:
    print(HEAD)
    for title, table in TABLES.items():
        print(f"## {title}\n\n| settings | why they are refused | what to do |\n|---|---|---|")
        for row in table:
            print(f"| {row.settings} | {row.why} | {row.remedy} |".replace("*", r"\*"))
        print()


if __name__ == "__main__":
    main()
