"""The benchmark as one page that needs nothing besides itself: bars with their spread, waits over time, all figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from fastdata.report import (
    Document,
    collect_notes,
    confidence_text,
    disturbances,
    interval_text,
    number,
    repeated_kinds,
    row_name,
    source_name,
)
from fastdata.report_style import STYLE
from fastdata.wording import counted

Row = dict[str, Any]
_COLORS = 8
_SLOT_OF = {"pil": 0, "torchvision": 1, "webdataset": 2, "dali": 3, "synthetic": 5}
_PLOT_WIDTH, _PLOT_HEIGHT = 400, 76

_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("CPU %", "cpu_percent", 0),
    ("others' CPU %", "other_cpu_percent", 0),
    ("GPU %", "gpu_util_percent", 0),
    ("SM %", "gpu_sm_active_percent", 0),
    ("JPEG %", "jpeg_engine_percent", 0),
    ("GPU W", "gpu_power_w", 0),
    ("GPU MB", "gpu_memory_mb", 0),
    ("first batch s", "first_batch_s", 2),
    ("memory MB", "peak_memory_mb", 0),
    ("disk MB", "disk_read_mb", 0),
    ("wait %", "data_wait_percent", 1),
    ("images", "images", 0),
    ("skipped", "skipped", 0),
)


def render_html(document: Document) -> str:
    """Return the page.

    Args:
        document: A benchmark file's content.
    """
    rows: list[Row] = document["rows"]
    loader = [row for row in rows if row["mode"] == "loader"]
    training = [row for row in rows if row["mode"] != "loader"]
    parts = [_header(document)]
    if loader:
        parts.append(_rate_section("Loading", "Images per second of the loader alone.", loader, rows))
    if training:
        parts.append(_rate_section("Training", _training_text(training), training, rows))
        parts.append(_ceiling_section(training, rows))
    parts += [_wait_section(rows), _table_section(rows), _notes_section(document)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>fastdata benchmark, {escape(document['created'])}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(part for part in parts if part)}</main></body></html>\n"
    )


def _header(document: Document) -> str:
    machine, dataset = document["machine"], document["dataset"]
    cards = ", ".join(str(card["name"]) for card in machine["gpus"] if card["name"]) or "none"
    versions = document["versions"]
    stack = ", ".join(f"{name} {version}" for name, version in versions.items())
    kinds = [source["kind"] for source in dataset["sources"]]
    sources = "; ".join(
        f"{s['kind'] if kinds.count(s['kind']) == 1 else s['data']}: {number(s['bytes'] and s['bytes'] / 1e6)} MB"
        for s in dataset["sources"]
    )
    repeats = sorted({len(row["images_per_s_runs"]) for row in document["rows"]})
    facts = {
        "Processor": f"{machine['cpu']}, {machine['cpu_cores_available']:g} cores available",
        "GPU": cards,
        "Data": f"{counted(dataset['samples'], 'image')}, {counted(dataset['classes'], 'class')}; {sources}",
        "Repeats of a row": "-".join(str(count) for count in sorted({*repeats[:1], *repeats[-1:]})) or "none",
        "Page cache": _caches(document["rows"]),
        "Measured": document["created"],
    }
    items = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    disturbed = "".join(f"<p><b>{escape(line)}</b></p>" for line in disturbances(document["rows"]))
    return (
        "<header><h1>How fast images reach the training loop</h1>"
        f'<p class="soft"><code>{escape(document["command"])}</code></p>{disturbed}</header>'
        f'<section><dl class="facts">{items}</dl>'
        f'<p class="small soft" style="margin:12px 0 0">{escape(stack)}</p></section>'
    )


def _caches(rows: Sequence[Row]) -> str:
    found = sorted({row["cache"] for row in rows if row["mode"] != "synthetic"})
    return " and ".join(found) or "not used"


def _training_text(rows: Sequence[Row]) -> str:
    facts = rows[0]["training"]
    compiled = ", compiled" if facts["compiled"] else ""
    return (
        f"Images per second of a training loop: {facts['model']}{compiled}, {facts['weights']} weights, "
        f"{facts['memory_format']}, {facts['optimizer']}."
    )


def _rate_section(title: str, text: str, rows: Sequence[Row], every: Sequence[Row]) -> str:
    highest = max(max(row["images_per_s_runs"]) for row in rows)
    cores = max(row["cpu_cores_available"] for row in rows) * max(row.get("world_size", 1) for row in rows)
    marks = "images per second"
    if any(len(row["images_per_s_runs"]) > 1 for row in rows):
        line = f"line: {confidence_text(rows)} interval; " if any(row["images_per_s_interval"] for row in rows) else ""
        marks += f", median; {line}dots: repeats"
    cells = [
        f'<div class="head"></div><div class="head">{marks}</div>'
        f'<div class="head">CPU % (of {100 * cores:,.0f})</div><div class="head">GPU % busy</div>'
    ]
    for row in rows:
        color = _color(row, every)
        cells.append(_name(row, every))
        cells.append(_rate_cell(row, highest, color))
        cells.append(_share_cell("CPU", row["cpu_percent"], 100 * cores, color, row))
        cells.append(_share_cell("GPU", row["gpu_util_percent"], 100.0, color, row))
    return (
        f'<section><h2>{title}</h2><p class="soft">{escape(text)}</p><div class="bars">{"".join(cells)}</div></section>'
    )


def _name(row: Row, every: Sequence[Row]) -> str:
    if row["mode"] == "synthetic":
        return '<div class="name">one cached batch<small>the ceiling</small></div>'
    order = f", {row['order']}" if str(row["order"]).startswith("blocks") else ""
    note = f"{source_name(row, repeated_kinds(every))}{order}, {row['cache']}"
    return f'<div class="name">{escape(row["backend"])}<small>{escape(note)}</small></div>'


def _rate_cell(row: Row, highest: float, color: str) -> str:
    scale = 100.0 / (highest * 1.02)
    marks = f'<span class="fill" style="width:{row["images_per_s"] * scale:.2f}%"></span>'
    interval = row["images_per_s_interval"]
    if interval:
        low, high = (value * scale for value in interval)
        marks += f'<span class="range" style="left:{low:.2f}%;width:{high - low:.2f}%"></span>'
    runs = row["images_per_s_runs"]
    if len(runs) > 1:
        marks += "".join(f'<span class="dot" style="left:{value * scale:.2f}%"></span>' for value in runs)
    spread = interval_text(row) if interval else counted(len(runs), "repeat")
    return (
        f'<div class="cell" style="--color:{color}"><span class="label">img/s</span><div class="track">{marks}</div>'
        f'<div class="value"><b>{row["images_per_s"]:,.0f}</b><small>{spread}</small></div></div>'
    )


def _share_cell(label: str, value: float | None, whole: float, color: str, row: Row) -> str:
    fill = "" if value is None else f'<span class="fill" style="width:{min(100.0, 100.0 * value / whole):.2f}%"></span>'
    field = "cpu_percent" if label == "CPU" else "gpu_util_percent"
    reason = escape(row["reasons"].get(field, ""), quote=True)
    text = f'<span class="none" title="{reason}">n/a</span>' if value is None else f"{value:,.0f}"
    return (
        f'<div class="cell tight" style="--color:{color}"><span class="label">{label} %</span>'
        f'<div class="track">{fill}</div><div class="value">{text}</div></div>'
    )


def _ceiling_section(training: Sequence[Row], every: Sequence[Row]) -> str:
    rows = [row for row in training if row["share_of_ceiling_percent"] is not None]
    if not rows:
        return ""
    whole = max(100.0, *(row["share_of_ceiling_percent"] for row in rows)) * 1.02
    cells = []
    for row in rows:
        share = row["share_of_ceiling_percent"]
        cells.append(_name(row, every))
        cells.append(
            f'<div class="cell" style="--color:{_color(row, every)}"><div class="track">'
            f'<span class="fill" style="width:{100 * share / whole:.2f}%"></span>'
            f'<span class="ceiling" style="left:{1e4 / whole:.2f}%"></span></div>'
            f'<div class="value"><b>{share:.1f} %</b></div></div>'
        )
    return (
        "<section><h2>Share of the ceiling</h2>"
        '<p class="soft">The ceiling is the same model on one batch that already lies on the device (the vertical '
        "mark). What lacks to 100 % is what feeding the images costs.</p>"
        f'<div class="bars two">{"".join(cells)}</div></section>'
    )


def _wait_section(rows: Sequence[Row]) -> str:
    fed = [row for row in rows if row["mode"] != "synthetic" and len(row["waits"]) > 1]
    drawn = [row for row in fed if row["data_wait_percent"] is not None]
    if not drawn:
        return ""
    figures = "".join(_wait_figure(row, rows) for row in drawn)
    hidden = (
        " Training rows are not drawn: waits there may hide behind the GPU's work." if len(drawn) < len(fed) else ""
    )
    return (
        "<section><h2>Wait for each batch</h2>"
        '<p class="soft">Milliseconds that the loop waited for each batch of the last repeat, over the seconds of the '
        "window. Regular spikes are ends of epochs, or workers that deliver in turn. Each plot has its own scale."
        f"{hidden}</p>"
        f'<div class="lines">{figures}</div></section>'
    )


def _wait_figure(row: Row, every: Sequence[Row]) -> str:
    waits = row["waits"]
    end_s = waits[-1][0] or 1.0
    highest = max(wait for _, wait in waits) or 1e-6
    points = " ".join(
        f"{'M' if i == 0 else 'L'}{_PLOT_WIDTH * at / end_s:.1f} {2 + (_PLOT_HEIGHT - 4) * (1 - wait / highest):.1f}"
        for i, (at, wait) in enumerate(waits)
    )
    label = f"{row_name(row, repeated_kinds(every))}, {row['mode']}"
    return (
        f'<figure style="--color:{_color(row, every)}"><figcaption><span>{escape(label)}</span>'
        f'<span class="soft">highest {1e3 * highest:,.1f} ms</span></figcaption>'
        f'<svg viewBox="0 0 {_PLOT_WIDTH} {_PLOT_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="Wait for each batch of {escape(label, quote=True)}"><path d="{points}"/></svg>'
        f'<div class="axis"><span>0 s</span><span>{end_s:,.1f} s</span></div></figure>'
    )


def _table_section(rows: Sequence[Row]) -> str:
    intervals = any(row["images_per_s_interval"] for row in rows)
    sure = f" Interval: {confidence_text(rows)}, of the median." if intervals else ""
    texts = ("row", "mode", "cache", "batch", "workers", "output")
    head = "".join(f'<th class="text">{name}</th>' for name in texts)
    head += "<th>img/s</th><th>interval</th>" + "".join(f"<th>{name}</th>" for name, _, _ in _COLUMNS)
    repeated = repeated_kinds(rows)
    body = "".join(f"<tr>{''.join(_table_cells(row, repeated))}</tr>" for row in rows)
    return (
        '<section><h2>All figures</h2><p class="soft">Medians over the repeats. n/a: no figure; the reason '
        f'stands below.{sure}</p><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></section>"
    )


def _table_cells(row: Row, repeated: frozenset[str]) -> Iterable[str]:
    cache = "-" if row["mode"] == "synthetic" else row["cache"]
    yield f"<td>{escape(row_name(row, repeated))}</td>"
    for text in (row["mode"], cache, row["batch_size"], row["workers"], row["output"]):
        yield f'<td class="text">{escape(str(text))}</td>'
    yield f"<td>{number(row['images_per_s'])}</td>"
    yield f"<td{_reason_title(row, 'images_per_s_interval')}>{interval_text(row)}</td>"
    for _, field, digits in _COLUMNS:
        yield f"<td{_reason_title(row, field)}>{number(row[field], digits)}</td>"


def _reason_title(row: Row, field: str) -> str:
    reason = row["reasons"].get(field, "")
    return f' title="{escape(reason, quote=True)}"' if reason else ""


def _notes_section(document: Document) -> str:
    notes = "".join(f"<li>{escape(line)}</li>" for line in collect_notes(document))
    method = "".join(f"<li>{escape(line)}</li>" for line in document["method"])
    heard = f"<h2>Notes</h2><ul>{notes}</ul>" if notes else ""
    gap = ' style="margin-top:16px"' if notes else ""
    return f'<section class="small">{heard}<h2{gap}>How it was measured</h2><ul>{method}</ul></section>'


def _color(row: Row, every: Sequence[Row]) -> str:
    """Return the backend's colour, the same in all plots."""
    name = row["backend"]
    if name not in _SLOT_OF:
        others = list(dict.fromkeys(r["backend"] for r in every if r["backend"] not in _SLOT_OF))
        free = [slot for slot in range(_COLORS) if slot not in _SLOT_OF.values()]
        return f"var(--c{free[others.index(name) % len(free)]})"
    return f"var(--c{_SLOT_OF[name]})"
