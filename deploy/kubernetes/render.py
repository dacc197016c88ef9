"""Write the plain manifests from the chart, so that both say the same: make manifests.

Helm's own engine renders them, from the package helm-python-sdk; `helm template` gives the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

import helm_python
import yaml

HERE = Path(__file__).parent
CHART = HERE / "chart"

MANIFESTS = {
    "cpu.yaml": CHART / "values.yaml",
    "cpu-autoscaled.yaml": CHART / "values-autoscaled.yaml",
    "gpu.yaml": CHART / "values-gpu.yaml",
}
"""Manifest -> values that differ from the chart's defaults."""


def render(values: Path) -> str:
    """All resources of the chart as one file.

    Args:
        values: file with values that differ from the chart's defaults.

    Raises:
        helm_python.HelmError: the values are refused, or a template cannot be rendered.
    """
    with helm_python.Chart.load(CHART) as chart:
        given = yaml.safe_load(values.read_text())
        chart.validate_schema(given)
        rendered = chart.render(given, name="seqserve", namespace="default")
    header = f"# Made from the chart with {values.name}: change that, then `make manifests`.\n"
    resources = (rendered[template] for template in sorted(rendered))
    return header + "".join(f"---\n{r.strip()}\n" for r in resources if "kind:" in r)


def main(out: Path) -> None:
    """Write all manifests.

    Args:
        out: the directory for them.
    """
    for name, values in MANIFESTS.items():
        (out / name).write_text(render(values))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "manifests")
