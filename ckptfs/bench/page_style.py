"""How the report looks, and the paragraph that says how to read it. Text only."""

from __future__ import annotations

from ckptfs.bench.stats import CONFIDENCE, LEAST_PAIRS, MARGIN

__all__ = ["HOW_TO_READ", "STYLE"]

STYLE = """
:root { --ink: #1b1f23; --soft: #59636e; --faint: #d5dae0; --back: #ffffff; --panel: #f5f7f9;
  --link: #0059b3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #a2abb5; --faint: #3a424b;
  --back: #14171a; --panel: #1d2226; --link: #7cb8ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
article + article { margin-top: 5rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 1.5rem 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--faint); }
h3 { font-size: 1rem; margin: 1.5rem 0 .4rem; overflow-wrap: anywhere; }
p, ul, ol { max-width: 46rem; }
a { color: var(--link); }
.kind { margin: 0; color: var(--soft); font-size: .85rem; letter-spacing: .04em; }
.lead { margin: 0 0 1rem; color: var(--soft); }
pre { background: var(--panel); padding: .75rem 1rem; border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: .875rem; }
figure { margin: 1.25rem 0 1.75rem; overflow-x: auto; }
figure svg { width: 100%; min-width: 40rem; height: auto; display: block; }
figcaption { color: var(--soft); font-size: .8rem; margin-top: .25rem; }
.wide { overflow-x: auto; margin: .5rem 0 1rem; }
.wide:focus-visible, figure:focus-visible, a:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: collapse; font-size: .8125rem; line-height: 1.3; min-width: 60%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .9rem .35rem 0; }
th { color: var(--soft); font-weight: 600; border-bottom: 1px solid var(--ink); vertical-align: bottom; }
td { border-bottom: 1px solid var(--faint); }
tbody th { font-weight: 600; color: var(--ink); border-bottom: 1px solid var(--faint);
  vertical-align: top; }
small { display: block; white-space: nowrap; font-weight: 400; color: var(--soft); font-size: .6875rem; }
small.remark { white-space: normal; font-style: italic; }
.number { text-align: right; min-width: 5.5rem; font-variant-numeric: tabular-nums; }
.aside { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 0 2.5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0;
  font-size: .875rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media print { body { font-size: 11px; } .wide { overflow: visible; } figure, tr { break-inside: avoid; } }
"""

HOW_TO_READ = f"""
<p>Numbers are medians over the rounds, with the least and the largest in brackets. In a round
everybody has one turn, so that a slow minute of the machine counts for all of them. Inside the clock
is the call on the slowest rank; making the data and comparing what was loaded is outside. A GB is
10<sup>9</sup> bytes of tensors; CPU seconds are those of all ranks with their threads; a dash stands for
what was not, or could not be, measured.</p>
<p>A ratio belongs to one round: seconds by seconds, so that below one the engine of the row took less
time. Its brackets hold the true median ratio with {CONFIDENCE:.0%} confidence at least, by order
statistics of the rounds. <em>Faster</em> and <em>slower</em>: at least {MARGIN - 1:.0%} away from one, and the
brackets exclude one. <em>Same</em>: the brackets are within {MARGIN - 1:.0%} of one. Otherwise the spread
does not allow a verdict, and the number below says how many rounds about might; fewer than {LEAST_PAIRS} rounds never give one. A limit moves as many bytes without making a
checkpoint of them, in one simple way; where an engine is faster than that, the table says that it is no limit there.</p>
"""
