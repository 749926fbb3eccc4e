"""Writes demo.txt and dev.txt (for the Makefile), uv.txt (which installs them) and image.txt (of
the Dockerfile): each package that is installed, with hashes of its files.

    pip install uv && python requirements/lock.py    after pyproject.toml or constraints.txt changed

pyproject.toml (which packages), constraints.txt (which versions) -> uv -> versions and sha256 for
Python 3.11 to 3.13 and every machine that has files. torch stays outside: its builds for CPU, CUDA
and ROCm share a version and not their files; what it needs itself is in.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FILES = {
    "demo": ["train", "fast", "report"],
    "dev": [],
    "image": ["train", "fast", "s3", "gcs", "azure", "chat", "hf", "report", "track", "wandb"],
}
"""The extras of each file; none means all."""
OF_TORCH = ["filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions"]
OPTIONS = ["--universal", "--python-version=3.11", "--generate-hashes", "--quiet"]
OPTIONS += ["--no-annotate", "--no-header", "--no-emit-package=torch"]
BUILD = ["setuptools>=77", "wheel"]
INSTALLER = ["uv==0.13.9"]


def wanted(extras: list[str]) -> list[str]:
    """Return the requirements of the project with these extras, torch left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    found = [one for name in extras or optional for one in optional[name]]
    return [
        one
        for one in [*project["dependencies"], *found, *OF_TORCH, *BUILD]
        if not re.match(r"torch\b", one)
    ]


def main() -> None:
    """Write the files."""
    constraints, without = HERE / "constraints.tmp", HERE / "without.tmp"
    pinned = ["-c", str(constraints), "--overrides", str(without)]
    without.write_text("torch; sys_platform == 'none'\n")  # torchdata would bring it in
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(pin for pin in pins if not pin.startswith("torch==")))
    try:
        lists = {name: wanted(extras) for name, extras in FILES.items()}
        for name, requirements in {**lists, "uv": INSTALLER}.items():
            output = HERE / f"{name}.txt"
            compiled = subprocess.run(
                ["uv", "pip", "compile", "-", *pinned, *OPTIONS],
                input="\n".join(requirements),
                capture_output=True,
                text=True,
                check=True,
            )
            output.write_text(f"# made by {HERE.name}/lock.py; do not edit\n{compiled.stdout}")
    finally:
        constraints.unlink()
        without.unlink()


if __name__ == "__main__":
    main()
