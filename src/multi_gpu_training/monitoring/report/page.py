"""Style and script of the report, which must work without a network. Its colours are those of the
dashboard: told apart with every common kind of colour blindness."""

STYLE = """
:root { --ink: #1c2330; --soft: #5b6577; --line: #dfe3ea; --back: #ffffff; --box: #f5f7fa;
  --accent: #0067a5; --bad: #a8231b; --good: #006b4f;
  --c0: #0067a5; --c1: #c44a00; --c2: #00785a; --c3: #a0437f; --c4: #8f6a00; --c5: #4a4fb5;
  --c6: #1c2330; --c7: #6b7280;
  --p0: #c44a00; --p1: #0067a5; --p2: #5aa9dd; --p3: #a6adba; --p4: #00785a; --p5: #a0437f;
  --p6: #6b7280; --p7: #d9c48a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa4b5; --line: #333b49;
  --back: #12161d; --box: #1b212b; --accent: #6cb6f5; --bad: #ff8f85; --good: #5fd3a8;
  --c0: #6cb6f5; --c1: #ff9d5c; --c2: #4fd1a5; --c3: #e79bc8; --c4: #e5c04b; --c5: #a9aef7;
  --c6: #e7eaf0; --c7: #a3adbd; --p0: #ff9d5c; --p1: #3f8fd6; --p2: #9cd0f7; --p3: #5b6577;
  --p4: #4fd1a5; --p5: #e79bc8; --p6: #a3adbd; --p7: #6e5a1f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px; max-width: 1060px; background: var(--back);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 32px 0 8px; }
h3 { font-size: 14px; margin: 0 0 4px; font-weight: 600; }
.soft { color: var(--soft); }
.verdict { border-left: 5px solid var(--accent); background: var(--box); padding: 12px 16px;
  margin: 16px 0; } .verdict.cause { border-color: var(--bad); }
.verdict.none { border-color: var(--good); } .verdict p { margin: 0; font-size: 17px; }
.verdict ul { margin: 8px 0 0; padding-left: 20px; }
.tiles { display: flex; flex-wrap: wrap; gap: 8px; }
.tile { background: var(--box); padding: 8px 12px; border-radius: 6px; min-width: 96px; }
.tile b { display: block; font-size: 16px; } .tile span { color: var(--soft); font-size: 12px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr));
  gap: 16px; }
.scroll { overflow-x: auto; } .scroll + .scroll, p + h3 { margin-top: 20px; }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; border-radius: 4px; }
svg { width: 100%; height: auto; display: block; overflow: visible; }
.grid { stroke: var(--line); fill: none; } .tick { fill: var(--soft); font-size: 12px; }
.label { fill: var(--ink); font-size: 12px; }
.slowest { fill: var(--bad); font-size: 12px; font-weight: 700; }
.line { fill: none; stroke-width: 1.6; } .band { opacity: .18; stroke: none; }
.pair { white-space: nowrap; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin: 0 4px 0 12px; }
.heat g rect { fill: var(--accent); } .worst { fill: var(--bad); }
.heat { margin-top: 20px; } .heat rect.chosen { stroke: var(--ink); stroke-width: 2; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: 4px 16px 4px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; } th { color: var(--soft); font-weight: 600; }
td { white-space: pre-line; overflow-wrap: anywhere; min-width: 6em; }
td:first-child, td:nth-child(2) { white-space: nowrap; min-width: 0; }
details td { white-space: pre-line; } details td:nth-child(2) { white-space: pre-line; }
details summary { cursor: pointer; color: var(--accent); } code { font-size: 12px; }
select { font: inherit; color: inherit; background: var(--box); border: 1px solid var(--line);
  padding: 2px 6px; }
/* Pictures shrink with the page: their text must not. */
.scroll svg { min-width: 900px; }
@media (max-width: 560px) { body { padding: 16px; } .charts .tick { font-size: 16.5px; } }
@media print { body { max-width: none; } }
""" + "".join(
    f".line.c{i} {{ stroke: var(--c{i}); }} .band.c{i}, .dot.c{i} {{ fill: var(--c{i}); }} "
    f".key.c{i} {{ background: var(--c{i}); }} "
    + (
        f".p{i} {{ fill: var(--p{i}); }} .key.p{i} {{ background: var(--p{i}); }}\n"
        if i < 8
        else ""
    )
    for i in range(8)
)

# Shows another phase in the heat map, and the cell under the pointer in words.
SCRIPT = """
document.querySelectorAll('.heat').forEach(function (box) {
  var data = JSON.parse(box.querySelector('script').textContent);
  var choice = box.querySelector('select'), words = box.querySelector('.words');
  var rows = box.querySelectorAll('svg g'), dots = box.querySelectorAll('.worst');
  var height = data.row;
  function show() {
    var cells = data.phases[choice.value], largest = 1e-9;
    cells.forEach(function (row) { largest = Math.max(largest, Math.max.apply(null, row)); });
    cells.forEach(function (row, r) {
      row.forEach(function (v, c) {
        rows[r].children[c].setAttribute('fill-opacity', (0.04 + 0.96 * v / largest).toFixed(2));
      });
    });
    dots.forEach(function (dot, c) {
      var worst = 0;
      cells.forEach(function (row, r) { if (row[c] > cells[worst][c]) worst = r; });
      dot.setAttribute('cy', worst * height + height / 2 - 0.5);
    });
    words.textContent = 'darkest: ' + largest.toFixed(2) + ' ms';
  }
  choice.addEventListener('change', show);
  var at = [0, -1];
  function read(r, c) {
    var old = box.querySelector('.chosen');
    if (old) old.removeAttribute('class');
    at = [r, c];
    rows[r].children[c].setAttribute('class', 'chosen');
    words.textContent = data.names[r] + ', step ' + data.steps[c] + ': ' +
      data.phases[choice.value][r][c].toFixed(2) + ' ms';
  }
  rows.forEach(function (group, r) {
    group.addEventListener('mouseover', function (event) {
      var c = Array.prototype.indexOf.call(group.children, event.target);
      if (c >= 0) read(r, c);
    });
  });
  box.querySelector('.scroll').addEventListener('keydown', function (event) {
    var by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    by = by[event.key];
    if (!by) return;
    event.preventDefault();
    read(Math.max(0, Math.min(rows.length - 1, at[0] + by[0])),
      Math.max(0, Math.min(data.steps.length - 1, at[1] + by[1])));
  });
  show();
});
"""
