"""Ask whether locked packages have known vulnerabilities: make audit.

pip-audit asks PyPI for advisories. A package that it gets no answer about counts as not audited,
never as sound.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LOCKS = ("ray.txt", "cuda.txt", "build.txt")
"""All that an image may hold: server.txt is part of ray.txt, cpu.txt another build of torch."""


def audit() -> list[dict[str, Any]]:
    """What pip-audit says of each package: `name`, `version`, and `vulns` or `skip_reason`.

    Raises:
        SystemExit: it cannot reach anybody to ask.
    """
    files = [argument for lock in LOCKS for argument in ("--requirement", str(HERE / lock))]
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--disable-pip", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout.strip():
        raise SystemExit(f"audit: {done.stderr.strip()[-500:]}")
    packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    return packages


def main() -> int:
    """Status 1 if a package is unsound; where there are no advisories to be had, only words."""
    packages = audit()
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    unsound = [package for package in packages if package.get("vulns")]
    for package in unsound:
        for vulnerability in package["vulns"]:
            fixed = ", ".join(vulnerability["fix_versions"]) or "nothing yet"
            print(
                f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in {fixed}"
            )
    audited = len(packages) - len(skipped)
    print(f"{audited} of {len(packages)} packages audited, {len(unsound)} of them unsound")
    if skipped:
        print(f"No advisories can be had here about {', '.join(skipped)}")
    return 1 if unsound else 0


if __name__ == "__main__":
    sys.exit(main())
