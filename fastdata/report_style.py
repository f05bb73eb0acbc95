"""The look of the report page: light and dark, from phone to desktop width, without anything from the network."""

STYLE = """
:root { color-scheme: light dark;
  --page: #fafaf9; --card: #ffffff; --ink: #1c1917; --soft: #57534e; --line: #e7e5e4; --track: #f0efed; --mark: #1c1917;
  --c0: #2f6fb7; --c1: #c2611f; --c2: #2b8a57; --c3: #8a4fb0; --c4: #a8473f; --c5: #6b7280;
  --c6: #0f7f8c; --c7: #8c7a12; }
@media (prefers-color-scheme: dark) { :root {
  --page: #171615; --card: #201f1d; --ink: #f2f0ee; --soft: #b3aea9; --line: #383532; --track: #2b2927; --mark: #ffffff;
  --c0: #6ea8e6; --c1: #e8935a; --c2: #62bd8b; --c3: #bd8ddd; --c4: #e08379; --c5: #9ca3af;
  --c6: #53bcc8; --c7: #cbb749; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 1.15rem; margin: 0 0 4px; }
p { margin: 0 0 8px; max-width: 75ch; }
.soft { color: var(--soft); }
.small { font-size: .85rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px; margin-top: 16px; }
dl.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 8px 24px; margin: 0; }
dl.facts dt { color: var(--soft); font-size: .8rem; }
dl.facts dd { margin: 0; overflow-wrap: anywhere; }
.bars { display: grid; grid-template-columns: minmax(150px, 220px) 4fr 1.3fr 1.3fr; gap: 10px 20px; align-items: center;
  margin-top: 12px; }
.bars.two { grid-template-columns: minmax(150px, 220px) 1fr; }
.bars .head { color: var(--soft); font-size: .8rem; border-bottom: 1px solid var(--line); padding-bottom: 2px;
  align-self: end; }
.name { line-height: 1.25; overflow-wrap: anywhere; }
.name small { display: block; color: var(--soft); }
.cell { min-width: 0; display: grid; grid-template-columns: 1fr 6.6em; gap: 8px; align-items: center; }
.cell.tight { grid-template-columns: 1fr 4em; }
.track { position: relative; height: 22px; background: var(--track); border-radius: 4px; }
.tight .track { height: 14px; }
.fill { position: absolute; inset: 0 auto 0 0; border-radius: 4px; background: var(--color); }
.range { position: absolute; top: 50%; height: 2px; margin-top: -1px; background: var(--mark); }
.range::before, .range::after { content: ""; position: absolute; top: -5px; width: 2px; height: 12px;
  background: var(--mark); }
.range::before { left: -1px; } .range::after { right: -1px; }
.dot { position: absolute; bottom: 2px; width: 6px; height: 6px; margin-left: -3px; border-radius: 50%;
  background: var(--card); border: 1px solid var(--mark); }
.value { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.value b { font-weight: 650; }
.value small { display: block; color: var(--soft); font-size: .75rem; line-height: 1.1; }
.none { color: var(--soft); }
.label { display: none; }
.ceiling { position: absolute; top: -3px; bottom: -3px; width: 2px; background: var(--mark); opacity: .6; }
.lines { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr)); gap: 18px 24px;
  margin-top: 12px; }
.lines figure { margin: 0; min-width: 0; }
.lines figcaption { display: flex; justify-content: space-between; gap: 12px; font-size: .85rem; }
.lines figcaption .soft { white-space: nowrap; }
.lines svg { display: block; width: 100%; height: 76px; margin-top: 4px; background: var(--track); border-radius: 4px; }
.lines path { fill: none; stroke: var(--color); stroke-width: 1.4; vector-effect: non-scaling-stroke; }
.lines .axis { display: flex; justify-content: space-between; color: var(--soft); font-size: .75rem; }
.wide { overflow-x: auto; margin-top: 12px; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 550; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--card); }
td.text, th.text { text-align: left; }
code { font: .85rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
ul { margin: 8px 0 0; padding-left: 20px; } li { margin-bottom: 4px; max-width: 85ch; overflow-wrap: anywhere; }
@media (max-width: 760px) {
  main { padding: 16px 10px 40px; } section { padding: 14px 12px; }
  .bars, .bars.two { grid-template-columns: 1fr; gap: 4px; }
  .bars .head { display: none; }
  .name { margin-top: 14px; } .name small { display: inline; margin-left: 6px; }
  .label { display: inline-block; min-width: 3.4em; color: var(--soft); font-size: .8rem; }
  .cell, .cell.tight { grid-template-columns: 3em 1fr 6.6em; }
  .bars.two .cell { grid-template-columns: 1fr 6.6em; } .bars.two .label { display: none; }
  table { font-size: .8rem; } th, td { padding: 5px 8px; }
  th:first-child, td:first-child { max-width: 130px; white-space: normal; }
}
"""
