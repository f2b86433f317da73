"""The page's style sheet: one set of colours for light and one for dark, everything else refers to them."""

from __future__ import annotations

_LIGHT = """--bg:#fff;--panel:#f5f7fa;--ink:#18212c;--muted:#566273;--line:#d3dae3;--grid:#e3e8ee;--link:#0b62a3;
--good:#11734b;--warn:#8a5300;--bad:#b3261e;--tint:0 114 178;
--site-0:#0072b2;--site-1:#d55e00;--site-2:#00855f;--site-3:#b0508a;--site-4:#a87500;--site-5:#3590c9;--site-6:#6b7280;"""
_DARK = """--bg:#11161d;--panel:#19202a;--ink:#e8edf3;--muted:#9fabba;--line:#364152;--grid:#28313d;--link:#79bdf0;
--good:#5bd3a0;--warn:#f2b95f;--bad:#ff8f85;--tint:86 180 233;
--site-0:#56b4e9;--site-1:#ff8b4a;--site-2:#2fc796;--site-3:#e6a0cb;--site-4:#f0bd3f;--site-5:#a9d8f7;--site-6:#b4bcc8;"""
_STEP_RAMP = {"light": ("#c2650a", "#b8327c", "#3a37a8"), "dark": ("#ffd27a", "#f58bb0", "#8b8ff8")}

_RULES = """
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
main,header.top{max-width:1160px;margin:0 auto;padding:0 20px}
header.top{padding-top:28px}
h1{font-size:26px;line-height:1.25;margin:2px 0 4px;overflow-wrap:anywhere}
h2{font-size:19px;margin:0 0 2px}
h3{font-size:15px;margin:22px 0 8px}
p{margin:4px 0 12px;max-width:76ch}
p.lead,.sub,p.none{color:var(--muted)}
a{color:var(--link)}
section{border-top:1px solid var(--line);margin-top:30px;padding-top:20px}
.kind{color:var(--muted);font-weight:600;letter-spacing:.02em}
.pill{display:inline-block;border:1.5px solid currentColor;border-radius:99px;padding:0 11px;
font-size:13px;font-weight:600;vertical-align:3px;margin-left:8px}
.completed{color:var(--good)}.aborted,.unfinished{color:var(--warn)}.failed{color:var(--bad)}
.why{border-left:3px solid var(--bad);padding:4px 12px;background:var(--panel);overflow-wrap:anywhere}
nav{display:flex;flex-wrap:wrap;gap:2px 16px;margin:14px 0 0;font-size:14px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(135px,1fr));gap:10px;margin:18px 0 0;padding:0}
.tiles div{background:var(--panel);border-radius:8px;padding:10px 13px}
.tiles dt{color:var(--muted);font-size:13px}
.tiles dd{margin:1px 0 0;font-size:18px;font-weight:650;font-variant-numeric:tabular-nums;line-height:1.3}
.tiles small{display:block;font-size:12.5px;font-weight:400;color:var(--muted)}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:22px 28px;margin-top:12px}
.charts.small{grid-template-columns:repeat(auto-fit,minmax(min(100%,250px),1fr));gap:12px 22px}
figure{margin:0;min-width:0}
figcaption{font-weight:600;font-size:14px;margin-bottom:4px;overflow-wrap:anywhere}
figure svg{display:block;width:100%;max-width:560px;height:auto}
.small svg{max-width:350px}
.small figcaption{font-weight:500;font-size:13.5px;margin-bottom:0}
svg text{font-size:11px;fill:var(--muted);font-variant-numeric:tabular-nums}
svg .end{text-anchor:end}svg .mid{text-anchor:middle}
svg .note{font-size:10.5px;paint-order:stroke;stroke:var(--bg);stroke-width:3px}
.grid{stroke:var(--grid)}.axis{stroke:var(--muted);fill:none}
.guide{stroke:var(--muted);stroke-dasharray:4 4}
svg g{fill:currentColor}
.line{fill:none;stroke:currentColor;stroke-width:1.8;stroke-linejoin:round}
.thick{stroke-width:3}
.cross{stroke:var(--bad);stroke-width:2}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:6px 0 0;padding:0;font-size:13px}
.legend li{display:flex;align-items:center;gap:6px;min-width:0}
.legend span{color:var(--ink);overflow-wrap:anywhere}
.legend svg.key{width:24px;height:13px;flex:none;fill:currentColor}
.scroll{overflow-x:auto;margin:10px 0 6px;border:1px solid var(--line);border-radius:8px}
table{border-collapse:separate;border-spacing:0;font-size:13.5px;font-variant-numeric:tabular-nums;min-width:100%}
th,td{padding:5px 11px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--grid)}
tbody tr:last-child>*{border-bottom:0}
thead th{background:var(--panel);font-weight:600;border-bottom-color:var(--line)}
tr:first-child>th:first-child,tbody th,td.left{text-align:left}
tbody th{font-weight:500;background:var(--bg);position:sticky;left:0;
max-width:200px;overflow:hidden;text-overflow:ellipsis}
thead tr:first-child th:first-child{position:sticky;left:0}
.group{border-left:1px solid var(--line)}
tr.total>*{font-weight:600}
table.scores tbody th{vertical-align:top;border-bottom-color:var(--line)}
table.scores tr.total>*{border-bottom-color:var(--line)}
th.group[colspan]{text-align:center}
td.before{color:var(--muted);padding-right:0}
td.after{padding-left:0;text-align:left}
td.after::before{content:"→";color:var(--muted);padding:0 6px}
td.after.nil::before{content:""}
table.grid-table td{text-align:center;min-width:44px;border-left:1px solid var(--grid)}
table.grid-table thead th{text-align:center}
table.grid-table thead tr:first-child th:first-child{text-align:left}
table.grid-table td.group{border-left-color:var(--line)}
td.took{background:rgb(var(--tint)/var(--a))}
td.abstained{color:var(--muted)}
td.absent{color:var(--warn);font-weight:700}
td.refused{color:var(--bad);font-weight:700}
ul.notes{list-style:none;margin:8px 0 0;padding:0;font-size:14px}
ul.notes li{overflow-wrap:anywhere;margin:2px 0}
.bars{display:grid;grid-template-columns:max-content 1fr;gap:8px 14px;align-items:center;
margin:12px 0 16px;max-width:760px;font-size:14px}
.bars i{display:block;height:18px;border-radius:3px;background:var(--site-0);min-width:3px}
.bars div:nth-of-type(4) i{background:var(--site-6)}
.bars span{font-size:13px;white-space:nowrap}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:6px 28px;align-items:start}
table.names td{text-align:left;white-space:normal;overflow-wrap:anywhere}
table.texts td{text-align:left;white-space:normal;overflow-wrap:anywhere;
vertical-align:top;min-width:260px;max-width:520px;line-height:1.55}
table.texts th{vertical-align:top}
table.texts thead th{text-align:left}
mark{background:none;color:inherit;border-radius:3px;padding:1px 2px}
mark.right{background:color-mix(in srgb,var(--good) 22%,transparent)}
mark.wrong{background:color-mix(in srgb,var(--bad) 24%,transparent);text-decoration:underline wavy var(--bad) 1px}
mark.same{background:color-mix(in srgb,var(--good) 16%,transparent)}
mark.other{color:var(--muted)}
.account{margin-top:6px;font-size:12.5px;color:var(--muted);display:flex;flex-wrap:wrap;gap:2px 12px}
.account .right{color:var(--good)}.account .wrong{color:var(--bad)}.account .missed{color:var(--warn)}
footer{color:var(--muted);font-size:13px;padding:24px 0 40px}
@media(max-width:560px){
main,header.top{padding-left:15px;padding-right:15px}
h1{font-size:21px}
.bars{grid-template-columns:1fr;gap:3px}
.bars div:nth-of-type(2){margin-bottom:8px}
tbody th{max-width:118px}
th,td{padding:5px 8px}
table.texts,table.texts tbody,table.texts tr,table.texts td,table.texts tbody th{display:block;border:0}
table.texts td{min-width:0;max-width:none;padding-bottom:9px}
table.texts tr{border-top:1px solid var(--line)}
table.texts thead{display:none}
table.texts tbody th::before{content:"step "}
table.texts td:nth-of-type(1)::before{content:"written by the model";display:block;color:var(--muted);font-size:12px}
table.texts td:nth-of-type(2)::before{content:"reference report";display:block;color:var(--muted);font-size:12px}}
@media print{section,figure,tr{break-inside:avoid}nav{display:none}}
"""


def style_sheet(time_steps: int) -> str:
    """The sheet, with a ramp of ``time_steps`` colours. ``data-theme`` on the root element overrides the reader's."""
    light = _LIGHT + _ramp("light", time_steps)
    dark = _DARK + _ramp("dark", time_steps)
    return (
        f":root{{{light}}}\n@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{{dark}}}\n:root[data-theme=light]{{color-scheme:light}}{_RULES}"
    )


def _ramp(theme: str, count: int) -> str:
    """Colours from early to late, in the middle through a third one."""
    anchors = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in _STEP_RAMP[theme]]
    names = []
    for index in range(count):
        place = 2 * index / max(1, count - 1)
        low = min(1, int(place))
        mixed = [a + (b - a) * (place - low) for a, b in zip(anchors[low], anchors[low + 1], strict=True)]
        names.append(f"--step-{index}:#{''.join(f'{round(part):02x}' for part in mixed)};")
    return "".join(names)
