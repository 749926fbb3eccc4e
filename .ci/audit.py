"""Asks for known vulnerabilities of the pinned packages, and says in one line what came of it.

    requirements/dev.txt -> pip-audit -> advisory service (OSV) -> none | some: exit 1 | not asked

Never: fails because the service, or the network, is not there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "requirements/dev.txt"
PLACE = ROOT / ".venv/audit"
SECONDS = 120
OPTIONS = [
    *("--requirement", str(PINS), "--require-hashes", "--disable-pip"),
    *("--vulnerability-service", "osv", "--format", "json", "--progress-spinner", "off"),
]


def answer() -> list[dict[str, Any]]:
    """Return what the service says of each package.

    Raises:
        OSError, ValueError, subprocess.SubprocessError: it could not be asked.
    """
    python = PLACE / "bin/python"
    if not python.exists():
        venv.create(PLACE, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "pip-audit"]
    subprocess.run(pip, check=True, capture_output=True, timeout=SECONDS)
    asked = subprocess.run(
        [str(python), "-m", "pip_audit", *OPTIONS],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,  # it exits with 1 for a vulnerability and for a service that is not there
    )
    if not asked.stdout.strip():
        raise ConnectionError(asked.stderr.strip().rpartition("\n")[2][:120])
    found: list[dict[str, Any]] = json.loads(asked.stdout)["dependencies"]
    return found


def main() -> int:
    """Say the result; return the exit code."""
    try:
        packages = answer()
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        print(f"vulnerabilities: not looked up, no advisory service answers ({error})")
        return 0
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    known = [package for package in packages if package.get("vulns")]
    for package in known:
        ids = ", ".join(str(one["id"]) for one in package["vulns"])
        print(f"vulnerability: {package['name']} {package['version']}: {ids}", file=sys.stderr)
    looked_up = len(packages) - len(unknown)
    print(f"vulnerabilities: {len(known)} of {looked_up} packages; {len(unknown)} not looked up")
    return 1 if known else 0


if __name__ == "__main__":
    sys.exit(main())
