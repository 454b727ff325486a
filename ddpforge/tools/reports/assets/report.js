"use strict";
(() => {
  const COLORS = { light: ["#0057b8", "#b34700", "#00705a", "#8a2b80", "#7a5c00", "#a40e26", "#3b5b6d", "#4f4fc4"],
                   dark: ["#6cb6ff", "#ff9e57", "#4fd1b0", "#e08ad6", "#e3c04b", "#ff8f8f", "#a9c1d0", "#a7a6ff"] };
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
  const controls = document.getElementById("controls");
  let charts = [], data;

  const theme = () => document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const color = run => COLORS[theme()][run % COLORS.light.length];
  const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const shorter = value => value == null ? "–" : String(Number(value.toPrecision(5)));

  function settings() {
    const form = new FormData(controls);
    const boxes = controls.querySelectorAll("[name=run]");
    return { x: form.get("x"), smooth: Number(form.get("smooth")), log: form.has("log"),
             runs: boxes.length ? new Set(form.getAll("run").map(Number)) : null };
  }

  function smoothed(values, factor) {  // exponential moving average with bias correction
    let sum = 0, weight = 0;
    return values.map(value => { sum = factor * sum + value; weight = factor * weight + 1; return sum / weight; });
  }

  function marks(curve, how) {  // positions of new attempts, and of skipped steps or values that are not finite
    const run = data.runs[curve.run], at = how.x;
    return { starts: run.starts[at], odd: curve.odd[at].concat(curve.training ? run.skipped[at] : []) };
  }

  function draw(element, chart, how) {
    const curves = chart.curves.filter(curve => !how.runs || how.runs.has(curve.run));
    const lines = [], tables = [], metrics = [...new Set(chart.curves.map(curve => curve.metric))];
    for (const curve of curves) {
      const dash = DASHES[metrics.indexOf(curve.metric) % DASHES.length];
      const points = { show: curve.values.length < 40, size: 5 };
      if (how.smooth) {
        lines.push({ label: curve.label + ", not smoothed", stroke: color(curve.run) + "44", dash, points: { show: false } });
        tables.push([curve[how.x], curve.values]);
      }
      lines.push({ label: curve.label, stroke: color(curve.run), width: 2, dash, points, value: (_, value) => shorter(value) });
      tables.push([curve[how.x], how.smooth ? smoothed(curve.values, how.smooth) : curve.values]);
    }
    element.replaceChildren();
    if (!tables.length) { element.textContent = "no run is selected"; return; }
    const values = tables.flatMap(table => table[1]);
    const log = how.log && values.length && values.every(value => value > 0);
    const axis = { stroke: style("--soft"), grid: { stroke: style("--grid"), width: 1 }, ticks: { stroke: style("--line"), width: 1 } };
    const label = how.x === "steps" ? "step" : "hours";
    const plot = new uPlot({
      width: Math.max(200, element.clientWidth), height: 280,
      scales: { x: { time: false }, y: log ? { distr: 3 } : {} },
      axes: [{ ...axis, label, labelSize: 20, size: 40 }, { ...axis, size: 64 }],
      series: [{ label, value: (_, value) => value == null ? "–" : how.x === "steps" ? value : shorter(value) },
               ...lines.map(line => ({ ...line, spanGaps: true }))],
      cursor: { drag: { x: true, y: false } },
      hooks: { draw: [plot => curves.forEach(curve => mark(plot, curve, marks(curve, how)))] },
    }, tables.length === 1 ? tables[0] : uPlot.join(tables), element);
    charts.push({ element, plot });
  }

  function mark(plot, curve, { starts, odd }) {
    const { ctx, bbox } = plot, dpr = devicePixelRatio || 1;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = color(curve.run);
    ctx.setLineDash([3 * dpr, 4 * dpr]);
    for (const at of starts) {
      const x = plot.valToPos(at, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    }
    for (const at of odd) {
      const x = plot.valToPos(at, "x", true), y = bbox.top + bbox.height;
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath(); ctx.moveTo(x, y - 9 * dpr); ctx.lineTo(x - 5 * dpr, y); ctx.lineTo(x + 5 * dpr, y); ctx.fill();
    }
    ctx.restore();
  }

  function histogram(element) {
    const { counts, edges } = JSON.parse(element.dataset.histogram);
    const axis = { stroke: style("--soft"), grid: { stroke: style("--grid"), width: 1 }, ticks: { stroke: style("--line"), width: 1 } };
    element.replaceChildren();
    const middles = counts.map((_, i) => (edges[i] + edges[i + 1]) / 2);
    new uPlot({ width: Math.max(160, element.clientWidth), height: 160, legend: { show: false }, cursor: { show: false },
      scales: { x: { time: false }, y: { range: (_, low, high) => [0, high || 1] } }, axes: [axis, { ...axis, size: 56 }],
      series: [{}, { stroke: color(0), fill: color(0) + "55", paths: uPlot.paths.bars({ size: [1] }), points: { show: false } }],
    }, [middles, counts], element);
  }

  function drawAll() {
    const chosen = controls.elements.theme.value;
    if (chosen) document.documentElement.dataset.theme = chosen; else delete document.documentElement.dataset.theme;
    charts.forEach(chart => chart.plot.destroy());
    charts = [];
    const how = settings();
    document.querySelectorAll("[data-chart]").forEach(element => draw(element, data.charts[element.dataset.chart], how));
    document.querySelectorAll("[data-histogram]").forEach(histogram);
    document.querySelectorAll("[data-run]").forEach(element => element.style.setProperty("--color", color(Number(element.dataset.run))));
  }

  function read() {
    data = JSON.parse(document.getElementById("data").textContent);
    drawAll();
  }

  // -- keys: move from point to point, for screen readers too
  document.addEventListener("keydown", event => {
    const chart = charts.find(chart => chart.element === event.target);
    if (!chart) return;
    const { plot } = chart, xs = plot.data[0], last = xs.length - 1;
    if (event.key === "Escape") { plot.setScale("x", { min: xs[0], max: xs[last] }); return; }
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const before = chart.at ?? (moves[event.key] > 0 ? -1 : last + 1);
    chart.at = Math.min(last, Math.max(0, before + moves[event.key]));
    plot.setCursor({ left: plot.valToPos(xs[chart.at], "x"), top: 10 });
    const said = plot.series.slice(1).map((line, i) => [line.label, plot.data[i + 1][chart.at]]).filter(([, value]) => value != null);
    document.getElementById("announcer").textContent =
      `${plot.series[0].label} ${shorter(xs[chart.at])}: ` + said.map(([name, value]) => `${name} ${shorter(value)}`).join(", ");
  });

  // -- live: fetch the page again, and draw it with the current settings
  async function renew() {
    const state = document.getElementById("live");
    try {
      const answer = await fetch("", { cache: "no-store" });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const open = [...document.querySelectorAll("details[open]")].map(each => each.id);
      const focus = document.activeElement?.dataset?.chart;
      document.getElementById("main").replaceWith(page.getElementById("main"));
      open.forEach(id => document.getElementById(id)?.setAttribute("open", ""));
      read();
      if (focus !== undefined) document.querySelector(`[data-chart="${focus}"]`)?.focus({ preventScroll: true });
      state.textContent = ` · live, ${new Date().toLocaleTimeString()}`;
    } catch {
      state.textContent = " · no longer live";
    }
  }

  let waiting;
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(drawAll, 60); };
  controls.addEventListener("input", soon);
  controls.addEventListener("submit", event => event.preventDefault());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);
  addEventListener("resize", soon);
  addEventListener("beforeprint", drawAll);
  read();
  if (document.body.dataset.live) setInterval(renew, 1000 * Number(document.body.dataset.live));
})();
