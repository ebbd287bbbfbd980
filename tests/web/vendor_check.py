"""Fetch the packages that the console keeps copies of, and compare: `make vendor-check`."""

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path(__file__).parents[2] / "src" / "babelbus" / "web" / "console" / "vendor"


def content_of(package: str, source: str, folder: Path) -> bytes:
    """Return a file of a package of the registry, such as `htm@3.1.1`."""
    archive = folder / f"{package.replace('@', '-')}.tgz"
    if not archive.exists():
        command = ["npm", "pack", "--silent", package]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with tarfile.open(archive) as files:
        file = files.extractfile(f"package/{source}")
        assert file is not None
        return file.read()


def main() -> None:
    if shutil.which("npm") is None:
        sys.exit("npm is not installed: the packages cannot be fetched (Debian: apt-get install npm)")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for entry in json.loads((VENDOR / "VENDOR.json").read_text(encoding="utf-8"))["files"]:
            package = f"{entry['package']}@{entry['version']}"
            released = hashlib.sha256(content_of(package, entry["source"], Path(folder))).hexdigest()
            kept = hashlib.sha256((VENDOR / entry["file"]).read_bytes()).hexdigest()
            is_same = released == kept == entry["sha256"]
            wrong += not is_same
            print(f"{'same     ' if is_same else 'DIFFERENT'} {entry['file']:<16} {package} {entry['source']}")
    sys.exit(f"{wrong} files differ from the released files" if wrong else 0)


if __name__ == "__main__":
    main()
