"""The look of the report."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --faint: #5d6b7a; --rule: #dde3ea; --paper: #fff;
  --card: #f7f9fb; --advice: #fff6e5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ef; --faint: #9aa7b5; --rule: #36414d;
  --paper: #14191f; --card: #1b222a; --advice: #2b2617; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1320px; padding: 16px; color: var(--ink); background: var(--paper);
  font: 15px/1.45 system-ui, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 20px; margin: 28px 0 4px; }
h3 { font-size: 15px; margin: 0 0 4px; } p { margin: 0 0 8px; color: var(--faint); }
.note { font-size: 13px; margin: 4px 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule);
  overflow-wrap: normal; vertical-align: top; }
.advice { background: var(--advice); border-radius: 8px; padding: 12px 16px; margin: 10px 0 16px; }
.advice ul { margin: 0 0 8px; padding-left: 20px; } .advice li { margin-bottom: 4px; }
summary { cursor: pointer; color: var(--faint); font-size: 13px; }
.charts { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)); }
figure { margin: 0; padding: 10px 12px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; min-width: 0; display: flex; flex-direction: column; }
figure svg { width: 100%; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 12px; font-size: 12px; color: var(--faint);
  margin-bottom: 4px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 4px;
  border: 1px solid var(--rule); vertical-align: -1px; }
svg text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--faint); }
.grid { stroke: var(--rule); fill: none; } .axis { stroke: var(--faint); fill: none; }
.mark { stroke: var(--faint); stroke-dasharray: 6 4; fill: none; }
.over { stroke: var(--ink); stroke-width: 1.8; fill: none; }
"""
