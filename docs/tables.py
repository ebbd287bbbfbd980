"""Write the tables of docs/operations.md that come from the code: `python docs/tables.py`. A test compares them."""

from pathlib import Path

from babelbus import config
from babelbus.metrics import Metrics

PAGE = Path(__file__).with_name("operations.md")


def settings_table() -> str:
    """Give a row for each setting."""
    lines = ["| key | value | default | what it is for |", "| --- | --- | --- | --- |"]
    lines += [f"| `{one.key}` | {one.type} | `{one.default}` | {one.doc} |" for one in config.describe()]
    return "\n".join(lines)


def metrics_table() -> str:
    """Give a row for each metric."""
    lines = ["| metric | type | labels | what it tells |", "| --- | --- | --- | --- |"]
    lines += [f"| `{one.name}` | {one.type} | {', '.join(one.labels)} | {one.doc} |" for one in Metrics().describe()]
    return "\n".join(lines)


def filled(page: str) -> str:
    """Give `page` with both tables as they are now, each between its two marks."""
    for name, table in (("settings", settings_table()), ("metrics", metrics_table())):
        begin, end = f"<!-- {name}: made by docs/tables.py -->\n", f"\n<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"{PAGE.name} has no marks for {name}"
        page = before + begin + table + end + after
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{PAGE.name}: {len(config.describe())} settings, {len(Metrics().describe())} metrics")
