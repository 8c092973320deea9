"""Style and script of the HTML report."""

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1c1c1c; background: #fff; max-width: 1200px; margin: 0 auto;
  padding: 16px; }
h1 { font-size: 1.45em; font-weight: 400; line-height: 1.25; margin: .3em 0 .6em; }
h2 { font-size: 1.15em; margin: 1.8em 0 .5em; border-bottom: 1px solid #ddd; padding-bottom: .2em; }
table { border-collapse: collapse; font-size: 13px; }
table.totals th { text-align: left; font-weight: 400; color: #666; padding: 1px 12px 1px 0; vertical-align: top;
  white-space: nowrap; }
table.data td, table.data th { padding: 3px 8px; border-bottom: 1px solid #eee; white-space: nowrap;
  vertical-align: top; }
table.data th { background: #f6f6f6; position: sticky; top: 0; }
table.data .l { text-align: left; }
table.data .r { text-align: right; font-variant-numeric: tabular-nums; }
table.data td.l { white-space: normal; }
table.sortable td.l { white-space: nowrap; }
table.sortable td.l:last-child { white-space: normal; min-width: 240px; }
table.sortable th { cursor: pointer; }
table.sortable th.up::after { content: " \\25B2"; }
table.sortable th.down::after { content: " \\25BC"; }
.scroll { overflow: auto; max-width: 100%; }
.scroll.long { max-height: 560px; }
.charts { display: flex; flex-wrap: wrap; gap: 12px; }
figure { margin: 0; flex: 1 1 320px; max-width: 520px; min-width: 0; }
figcaption { font-size: 13px; color: #444; margin-bottom: 2px; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: #444; }
svg .grid { stroke: #e4e4e4; }
svg .division { stroke: #444; stroke-dasharray: 3 3; }
svg circle { fill-opacity: .65; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px; }
.legend span { display: flex; align-items: baseline; overflow-wrap: anywhere; }
.legend i { flex: none; width: 11px; height: 11px; margin-right: 5px; }
.note, small { color: #666; font-size: 13px; }
.warning { background: #fff4d6; border-left: 4px solid #e69f00; padding: 6px 10px; margin: .6em 0; }
details { margin: .25em 0 .25em 1em; }
summary { cursor: pointer; }
@media (max-width: 600px) {
  body { padding: 10px; }
  table { font-size: 12px; }
  table.data td, table.data th { padding: 3px 4px; }
  table.data td.l { overflow-wrap: anywhere; }
}
pre { font-size: 11px; overflow: auto; max-height: 480px; background: #f6f6f6; padding: 8px; }
"""

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  table.querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => {
    const sign = head.classList.contains("down") ? 1 : -1;
    table.querySelectorAll("th").forEach(other => other.classList.remove("up", "down"));
    head.classList.add(sign < 0 ? "down" : "up");
    const value = row => {
      const cell = row.cells[column];
      return cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
    };
    const compare = (a, b) => typeof a === "number" ? a - b : a.localeCompare(b, undefined, {numeric: true});
    const body = table.tBodies[0];
    [...body.rows].sort((a, b) => sign * compare(value(a), value(b))).forEach(row => body.append(row));
  }));
}
for (const details of document.querySelectorAll("details.text")) {
  details.addEventListener("toggle", async () => {
    const pre = details.querySelector("pre");
    if (pre.textContent) return;
    if (typeof DecompressionStream === "undefined") {
      pre.textContent = "This browser is too old to unpack the text.";
      return;
    }
    const packed = atob(document.getElementById(details.dataset.key).textContent);
    const bytes = Uint8Array.from(packed, character => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    pre.textContent = await new Response(stream).text();
  });
}
"""
