"""The look and the few lines of script of a report page: nothing from outside, light and dark, phone to desktop."""

STYLE = """
:root{color-scheme:light dark;--bg:#fcfcfa;--ink:#1d2126;--dim:#646c75;--rule:#dcdfe3;--card:#fff;--blue:#2563a8;
--green:#2e7d4f;--magenta:#9b3a86;--amber:#a86a00;--red:#b3261e;--cyan:#1f7f8c;--grey:#8a929b}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--ink:#e4e7ea;--dim:#98a1aa;--rule:#2f353b;--card:#1b1f23;
--blue:#6aa6e8;--green:#63bd88;--magenta:#d58ac4;--amber:#dfa548;--red:#f08a80;--cyan:#64c3cf;--grey:#767f88}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1080px;padding:20px 16px 60px;background:var(--bg);
color:var(--ink);font:15px/1.5 system-ui,sans-serif}h1{font-size:1.5rem;margin:.2em 0}h2{font-size:1.15rem;
margin:1.8em 0 .5em}p{margin:.4em 0}.sub,.none,.tick{color:var(--dim)}.tick{fill:var(--dim);font-size:12px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(136px,1fr));gap:8px;margin:14px 0}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:8px 12px}
.tile b{display:block;font-size:1.25rem;font-variant-numeric:tabular-nums}.tile span{color:var(--dim);font-size:.82rem}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:12px}
figure{margin:0 0 12px;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px}
figcaption{font-weight:600;margin-bottom:4px}.keys{font-weight:400;font-size:.82rem;color:var(--dim)}
.key{white-space:nowrap;margin-left:10px}.key::before{content:"";display:inline-block;width:10px;height:10px;
border-radius:2px;margin-right:4px;background:var(--c)}svg{display:block;width:100%;height:auto}
.grid{stroke:var(--rule)}.line{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round}.dot,.fill{fill:var(--c)}
.blue{--c:var(--blue)}.green{--c:var(--green)}.magenta{--c:var(--magenta)}.amber{--c:var(--amber)}.red{--c:var(--red)}
.serving,.calls{--c:var(--green)}.loading,.queue{--c:var(--cyan)}.draining,.released,.waiting{--c:var(--amber)}
.joining{--c:var(--blue)}.training{--c:var(--magenta)}.publishing,.grading{--c:var(--grey)}.lost{--c:var(--red)}
.tools{--c:var(--blue)}.share{display:flex;align-items:center;gap:10px;margin:4px 0}.who{flex:0 0 5.5em;
color:var(--dim);
font-size:.85rem}.bar{flex:1;display:flex;height:16px;border-radius:4px;overflow:hidden;background:var(--rule)}
.piece{background:var(--c)}.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.88rem;
font-variant-numeric:tabular-nums}th,td{padding:4px 10px 4px 0;text-align:left;border-bottom:1px solid var(--rule);
white-space:nowrap}th{color:var(--dim);font-weight:500}td.n,th.n{text-align:right}td.wide{white-space:normal;
min-width:16em}details{background:var(--card);border:1px solid var(--rule);border-radius:8px;margin:8px 0;
padding:6px 12px}summary{cursor:pointer}.node{border-left:3px solid var(--rule);margin:8px 0;padding:2px 0 2px 10px}
.node.sampled{border-color:var(--green)}.node h4{margin:0;font-size:.82rem;font-weight:500;color:var(--dim)}
.tokens{white-space:pre-wrap;overflow-wrap:anywhere;font:12.5px/1.6 ui-monospace,monospace;margin:2px 0}
.t{border-radius:2px}.t:hover{outline:1px solid var(--ink)}
.p1{background:color-mix(in srgb,var(--amber) 18%,transparent)}
.p2{background:color-mix(in srgb,var(--amber) 42%,transparent)}
.p3{background:color-mix(in srgb,var(--red) 50%,transparent)}
.error{color:var(--red)}.warning{color:var(--amber)}label{margin-right:12px}input,select{font:inherit;color:inherit;
background:var(--card);border:1px solid var(--rule);border-radius:6px;padding:3px 8px}
"""

SCRIPT = """
for (const table of document.querySelectorAll("table.sorted")) {
  table.querySelectorAll("th").forEach((head, column) => {
    head.tabIndex = 0; head.style.cursor = "pointer"; let up = false;
    const sort = () => {
      up = !up;
      const key = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const x = key(a), y = key(b), n = Number(x) - Number(y);
        return (Number.isNaN(n) ? x.localeCompare(y) : n) * (up ? 1 : -1);
      });
      table.tBodies[0].append(...rows);
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (e) => { if (e.key === "Enter") sort(); });
  });
}
const find = document.getElementById("find");
if (find) find.addEventListener("input", () => {
  for (const one of document.querySelectorAll("details.tree"))
    one.hidden = !one.dataset.find.includes(find.value.toLowerCase());
});
"""
