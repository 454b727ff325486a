"""Writes a certificate as JSON, and as one HTML page with a picture that fetches nothing."""

from __future__ import annotations

import json
import math
from html import escape
from importlib.resources import files
from pathlib import Path

from ddpforge.tools.certify.certificate import LayoutCertificate, Row

__all__ = ["picture", "write_page"]

_WIDTH, _LEFT, _LANE = 900, 130, 34  # pixels
_DECADES = (-6, 2)  # of the share of the tolerance that the picture shows
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Certificate of {{ subject.recipe }}</title><style>
{{ style }} svg { max-width: 100%; height: auto; }</style></head><body>
<h1>Certificate of {{ subject.recipe }}</h1>
<p class="note">{{ trained|length }} layouts trained {{ subject.steps }} steps: {{ same }} like one process.
ddpforge {{ subject.ddpforge }}, torch {{ subject.torch }}, Python {{ subject.python }}.</p>
<pre>{{ command }}</pre>
{{ picture }}
<p class="note">Each dot is a layout: the largest relative difference from one process, as a share of what rounding
explains. Losses and gradient norms are compared at every step, weights after the last.</p>
<h2>Layouts</h2><div class="wide"><table><thead><tr><th>layout<th>result<th>loss<th>gradient norm<th>weights<th>share
<th>largest in</tr></thead><tbody>
{% for row in trained %}<tr><th>{{ row.layout }}
<td class="{{ row.verdict }}">{{ row.verdict }}
{% for name in columns %}<td>{{ number(row, name) }}{% endfor %}
<td>{{ "%.1e"|format(row.share) }}<td>{{ row.worst }}</tr>
{% endfor %}</tbody></table></div>
{% if refused %}<h2>Refused before the first step</h2><div class="wide">
<table><thead><tr><th>layout<th>reason</tr></thead>
<tbody>{% for row in refused %}<tr><th>{{ row.layout }}<td>{{ row.reason }}</tr>
{% endfor %}</tbody></table></div>{% endif %}
</body></html>
"""


def write_page(certificate: LayoutCertificate, folder: Path) -> Path:
    """Writes `certificate.json` and `certificate.html` into the folder; returns the path of the page."""
    from jinja2 import Environment
    from markupsafe import Markup

    subject = certificate.subject
    trained = sorted(
        certificate.of("same", "differs", "failed"),
        key=lambda row: (row.verdict == "same", -row.share),
    )
    page = (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            subject=subject,
            trained=trained,
            refused=certificate.of("refused"),
            same=len(certificate.of("same")),
            columns=["train/loss", "train/grad_norm", "weights"],
            number=_number,
            picture=Markup(picture(certificate)),
            style=Markup((files("ddpforge.tools.reports") / "assets" / "report.css").read_text(encoding="utf-8")),
            command=" ".join(["ddpforge certify", subject["recipe"], *subject["sets"], f"--steps {subject['steps']}"]),
        )
    )
    (folder / "certificate.json").write_text(json.dumps(certificate.as_dict()), encoding="utf-8")
    (path := folder / "certificate.html").write_text(page, encoding="utf-8")
    return path


def _number(row: Row, quantity: str) -> str:
    return f"{row.largest(quantity):.1e}" if quantity in row.differences else ""


def picture(certificate: LayoutCertificate) -> str:
    """Returns an SVG: a lane for each strategy, a dot for each layout at its share of what rounding explains."""
    rows = certificate.of("same", "differs", "failed")
    uses = sorted({row.use for row in rows})
    height, low, high = 70 + _LANE * len(uses), *_DECADES

    def across(share: float) -> float:
        place = min(max(math.log10(share) if share > 0 else low, low), high) if math.isfinite(share) else high
        return _LEFT + (place - low) / (high - low) * (_WIDTH - _LEFT - 30)

    parts = [f'<text class="soft" x="{_LEFT}" y="18">largest difference as a share of what rounding explains</text>']
    for decade in range(low, high + 1):
        style = "limit" if decade == 0 else ""
        x, label = across(10.0**decade), "≤ 1e-6" if decade == low else f"{10.0**decade:g}"
        parts.append(f'<line class="{style}" x1="{x:.1f}" x2="{x:.1f}" y1="28" y2="{height - 30}"/>')
        parts.append(f'<text class="soft middle" x="{x:.1f}" y="{height - 12}">{label}</text>')
    for lane, use in enumerate(uses):
        y = 46 + lane * _LANE
        of_use = [row for row in rows if row.use == use]
        parts.append(f'<text x="12" y="{y + 4}">{escape(use)} ({len(of_use)})</text>')
        for number, row in enumerate(of_use):
            share = math.inf if row.state == "failed" else row.share
            middle = y + (number % 5 - 2) * 4  # so that equal shares do not hide one another
            dot = f'<circle class="{row.verdict}" cx="{across(share):.1f}" cy="{middle}" r="4">'
            parts.append(f"{dot}<title>{escape(row.layout)}</title></circle>")
    style = (files("ddpforge.tools.certify") / "picture.css").read_text(encoding="utf-8").strip()
    label = f"{len(certificate.of('same'))} of {len(rows)} layouts differ from one process by no more than rounding."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-labelledby="title desc"><title id="title">Layouts compared with one process</title>\n'
        f'<desc id="desc">{label}</desc>\n<style>{style}</style>\n' + "\n".join(parts) + "\n</svg>"
    )
