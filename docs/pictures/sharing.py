"""Draws sharing.svg: the prefill and decode jobs of three models on one device, as `muxserve simulate` runs them.

python docs/pictures/sharing.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
FLEET = HERE / "sharing.yaml"
WORKLOAD = "poisson:rate=8,duration=10,prompt=100..900,output=10..80,seed=4"
FROM, SECONDS = 2.0, 3.0
COLOURS = ("#3b6fb6", "#d1762c", "#3f9363")
LEFT, TOP, WIDTH, ROW, GAP, BAR = 190, 58, 700, 21, 12, 15


def muxserve(*arguments: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "muxserve.cli.app", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL
    )


def jobs(directory: Path) -> tuple[dict[str, dict[str, float]], list[dict[str, float | str]]]:
    """The models of the plan with their shares of the SMs, and every job: model, phase, begin and end in seconds."""
    plan, timeline = directory / "plan.yaml", directory / "jobs.json"
    muxserve("plan", FLEET, "--simulate", "0", "-o", plan)
    muxserve("simulate", FLEET, "--plan", plan, "--workload", WORKLOAD, "--timeline", timeline)
    (unit,) = yaml.safe_load(plan.read_text())["units"]
    events = json.loads(timeline.read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    found = []
    for event in events:
        if event["ph"] == "X":
            phase, model = event["name"].split(" ", 1)
            began = event["ts"] / 1e6
            found.append({"model": model, "phase": phase, "began": began, "ended": began + event["dur"] / 1e6})
    return {each["model"]: each for each in unit["models"]}, found


def picture(models: dict[str, dict[str, float]], found: list[dict[str, float | str]]) -> str:
    height = TOP + len(models) * (2 * ROW + GAP) + 46
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 30} {height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        "<title>Prefill and decode jobs of three models on one A100, simulated</title>",
        '<rect width="100%" height="100%" rx="8" fill="#fff"/>',
        '<text x="16" y="26" font-size="15" font-weight="600">Three models on one A100-80GB</text>',
        f'<text x="16" y="44" fill="#666">{SECONDS:.0f} seconds of `muxserve simulate`; dark: prefill, light: decode; '
        "in brackets each engine&#8217;s share of the SMs</text>",
    ]
    for index, ((name, shares), colour) in enumerate(zip(models.items(), COLOURS, strict=True)):
        for lane, phase in enumerate(("prefill", "decode")):
            y = TOP + index * (2 * ROW + GAP) + lane * ROW + 8
            opacity = 1.0 if phase == "prefill" else 0.5
            label = f"{name} {phase} ({shares[f'{phase}_share']:.0%})"
            lines.append(f'<text x="{LEFT - 10}" y="{y + 12}" text-anchor="end">{escape(label)}</text>')
            lines.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{BAR}" fill="#f2f2f2"/>')
            for job in found:
                began, ended = float(job["began"]) - FROM, float(job["ended"]) - FROM
                if job["model"] != name or job["phase"] != phase or ended <= 0 or began >= SECONDS:
                    continue
                x, end = (LEFT + WIDTH * min(max(at / SECONDS, 0), 1) for at in (began, ended))
                lines.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{max(end - x - 0.3, 0.7):.1f}" height="{BAR}" '
                    f'fill="{colour}" fill-opacity="{opacity}"/>'
                )
    bottom = height - 32
    for tick in range(int(SECONDS * 2) + 1):
        x = LEFT + WIDTH * tick / (SECONDS * 2)
        lines.append(f'<line x1="{x}" x2="{x}" y1="{bottom - 8}" y2="{bottom - 3}" stroke="#888"/>')
        lines.append(f'<text x="{x}" y="{bottom + 12}" text-anchor="middle" fill="#666">{tick / 2:g} s</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        (HERE / "sharing.svg").write_text(picture(*jobs(Path(directory))))


if __name__ == "__main__":
    main()
