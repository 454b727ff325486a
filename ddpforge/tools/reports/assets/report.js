"use strict";
(() => {
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
  const FEW = 12;  // with more runs, colors show a key that differs
  const controls = document.getElementById("controls");
  const hidden = new Set();  // runs that are switched off
  const off = new Set(), known = new Set();  // curves that are switched off, as "chart/curve"; charts drawn before
  const drawn = new Map();  // by element: plot, lines, and the whole horizontal range
  let data, sorted, queue = [];

  const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const all = selector => [...document.querySelectorAll(selector)];
  const text = value => value == null ? "not set" : typeof value === "string" ? value : typeof value === "number" ? number(value) : JSON.stringify(value);

  function settings() {
    const form = new FormData(controls), words = (form.get("words") || "").toLowerCase().split(/\s+/).filter(Boolean);
    const found = data.runs.map((run, i) => i).filter(i => words.every(word => data.runs[i].text.includes(word)));
    return { x: form.get("x"), smooth: Number(form.get("smooth")), log: form.has("log"), color: form.get("color") || "curve",
             metric: form.get("metric"), average: form.get("average"), found, runs: new Set(found.filter(i => !hidden.has(i))) };
  }

  // -- numbers as text
  function number(value) {  // five significant digits
    if (value == null) return "–";
    const short = Number(value.toPrecision(5)), size = Math.abs(short);
    return size >= 1e6 || (size && size < 1e-4) ? short.toExponential() : String(short);
  }

  function labels(values) {  // of an axis: as few digits as show every value to a hundredth of their distance
    const size = Math.max(...values.map(Math.abs)), gaps = values.slice(1).map((value, i) => Math.abs(value - values[i]));
    const power = size >= 1e6 || (size && size < 1e-3) ? Math.floor(Math.log10(size)) : 0;
    const scaled = values.map(value => value / 10 ** power), gap = (gaps.length ? Math.min(...gaps) : size || 1) / 10 ** power;
    let digits = 0;
    while (digits < 15 && scaled.some(value => Math.abs(Number(value.toFixed(digits)) - value) > gap / 100)) digits++;
    return scaled.map((value, i) => values[i] === 0 ? "0" : value.toFixed(digits) + (power ? `e${power}` : ""));
  }

  function ticks(low, high) {  // of a logarithmic axis: 1, 2 and 5 of every decade, or only some decades, or equal distances
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), step = Math.ceil((last - first) / 8);
    const decades = Array.from({ length: last - first + 1 }, (_, i) => first + i);
    const inside = values => values.filter(value => value >= low && value <= high);
    const coarse = inside(decades.filter(power => power % step === 0).map(power => 10 ** power));
    if (coarse.length > 3) return coarse;
    const fine = inside(decades.flatMap(power => [1, 2, 5].map(digit => digit * 10 ** power)));
    if (fine.length > 2) return fine;
    const rough = (high - low) / 4, unit = 10 ** Math.floor(Math.log10(rough)), width = [1, 2, 5, 10].find(times => times * unit >= rough) * unit;
    return Array.from({ length: 6 }, (_, i) => (Math.ceil(low / width) + i) * width).filter(value => value <= high);
  }

  // -- colors
  const palette = i => `oklch(${(dark() ? [0.9, 0.62, 0.76] : [0.63, 0.33, 0.48])[i % 3]} 0.15 ${(255 + 92.5 * i) % 360})`;
  const scale = t => `oklch(${dark() ? 0.55 + 0.37 * t : 0.3 + 0.38 * t} 0.15 ${300 - 210 * t})`;  // purple, blue, green, yellow

  function coloring(how) {  // the color of a run's curve; groups of runs for the legend, or the ends of a color scale
    if (how.color === "curve") return { of: (run, curve) => palette(curve), groups: [] };
    if (how.color === "run") return { of: run => palette(run), groups: data.runs.map((run, i) => ({ text: run.name, color: palette(i), runs: [i] })) };
    const values = how.color === "metric" ? data.metrics[how.metric].values : data.keys[how.color.slice(4)];
    const set = [...new Set(values.filter(value => value != null))], runs = Map.groupBy(values.keys(), i => values[i]);
    const numeric = values.every(value => value == null || typeof value === "number");
    if (numeric && set.length > 8) {
      const found = values.filter(value => value != null), low = Math.min(...found), high = Math.max(...found);
      const at = low > 0 && high / low >= 50 ? Math.log : Number;
      return { of: run => values[run] == null ? style("--soft") : scale((at(values[run]) - at(low)) / (at(high) - at(low))), groups: [], low, high };
    }
    if (numeric) set.sort((a, b) => a - b);
    const colors = new Map(set.map((value, i) => [value, numeric ? scale(set.length > 1 ? i / (set.length - 1) : 0) : palette(i)]));
    const of = run => colors.get(values[run]) ?? style("--soft");
    return { of, groups: [...set, ...values.includes(null) ? [null] : []].map(value => ({ text: text(value), color: colors.get(value) ?? style("--soft"), runs: runs.get(value) })) };
  }

  // -- lines of charts
  function curves(chart, how) {
    const found = chart.curves.filter(curve => how.runs.has(curve.run) && curve.values.length && !off.has(`${chart.title}/${chart.metrics[curve.metric]}`));
    const hours = found.length > 50 ? Math.max(...found.map(curve => Math.max(...Object.values(data.runs[curve.run].hours)))) / 2000 : 0;
    const place = (run, step) => how.x === "steps" ? step : hours ? Math.round(run.hours[step] / hours) * hours : run.hours[step];  // fewer places: runs share them
    const lines = found.map(({ run, metric, grid, values }) => ({
      runs: [run], metric, label: data.runs.length > 1 ? `${data.runs[run].name} ${chart.metrics[metric]}` : chart.metrics[metric],
      xs: data.runs[run].grids[grid].map(step => place(data.runs[run], step)), ys: values }));
    return how.average ? averaged(lines, chart, how) : lines;
  }

  function averaged(lines, chart, how) {  // means of the runs that differ only in one key, at the places that all of them have reached
    const others = Object.keys(data.keys).filter(key => key !== how.average);
    const groups = Map.groupBy(lines, line => JSON.stringify([line.metric, ...others.map(key => data.keys[key][line.runs[0]])]));
    return [...groups.values()].map(group => {
      const from = Math.max(...group.map(line => line.xs[0])), to = Math.min(...group.map(line => line.xs.at(-1)));
      const xs = [...new Set(group.flatMap(line => line.xs))].filter(x => x >= from && x <= to).sort((a, b) => a - b);
      const each = group.map(line => interpolated(line, xs)), runs = group.map(line => line.runs[0]);
      const same = others.map(key => `${key}=${text(data.keys[key][runs[0]])}`).join(" ");
      return { runs, metric: group[0].metric, label: `mean of ${runs.length}: ${same} ${chart.metrics[group[0].metric]}`,
               xs, ys: xs.map((_, i) => each.reduce((sum, ys) => sum + ys[i], 0) / each.length) };
    }).filter(line => line.xs.length);
  }

  function interpolated({ xs, ys }, places) {
    let i = 0;
    return places.map(x => {
      while (i < xs.length - 2 && xs[i + 1] < x) i++;
      return xs[i] === x || xs.length === 1 ? ys[i] : ys[i] + (ys[i + 1] - ys[i]) * (x - xs[i]) / (xs[i + 1] - xs[i]);
    });
  }

  function smoothed(values, factor) {  // exponential moving average with bias correction
    let sum = 0, weight = 0;
    return values.map(value => { sum = factor * sum + value; weight = factor * weight + 1; return sum / weight; });
  }

  function points(key, how) {  // one point per run: the metric by the key's value
    const values = data.keys[key], results = data.metrics[how.metric].values;
    const runs = [...how.runs].filter(i => results[i] != null && values[i] != null), set = [...new Set(runs.map(i => values[i]))];
    const numeric = set.every(value => typeof value === "number");
    set.sort(numeric ? (a, b) => a - b : undefined);
    const log = numeric && set[0] > 0 && set.at(-1) / set[0] >= 50;
    const names = numeric ? null : set.map(text);
    const lines = runs.map(i => ({ runs: [i], metric: 0, label: `${data.runs[i].name} ${how.metric}`, xs: [numeric ? values[i] : names.indexOf(text(values[i]))], ys: [results[i]] }));
    const splits = names ? [...names.keys()] : set.length <= 6 ? set : null;
    return { lines, log, splits, names };
  }

  // -- drawing
  function draw(element, how, paint) {
    const before = drawn.get(element), chart = data.charts[element.dataset.chart], key = element.dataset.key;
    const { lines, log, splits, names } = key ? points(key, how) : { lines: curves(chart, how) };
    before?.plot.destroy();
    drawn.delete(element);
    element.replaceChildren();
    if (!lines.length) { element.textContent = "nothing to draw: no run is shown, or no curve"; return; }
    const series = [], tables = [], many = lines.length > 60;
    for (const line of lines) {
      const stroke = paint.of(line.runs[0], line.metric), dash = key ? [] : DASHES[line.metric % DASHES.length];
      if (how.smooth && !key) {
        series.push({ stroke, dash, alpha: 0.25, points: { show: false } });
        tables.push([line.xs, line.ys]);
        line.ys = smoothed(line.ys, how.smooth);
      }
      line.series = series.push({ stroke, dash, width: many ? 1.25 : 2, points: key ? { show: true, size: 9, fill: stroke } : { show: line.ys.length === 1 || (!many && line.ys.length < 40), size: 5 } });
      tables.push([line.xs, line.ys]);
    }
    const positive = how.log && lines.every(line => line.ys.every(value => value > 0));
    const axis = { stroke: style("--soft"), grid: { stroke: style("--grid"), width: 1 }, ticks: { stroke: style("--line"), width: 1 } };
    const axes = logarithmic => ({ ...axis, filter: (_, found) => found, values: (_, found) => logarithmic && found.at(-1) / found[0] >= 50 ? found.map(number) : labels(found),
                                   ...(logarithmic ? { splits: (plot, i, low, high) => ticks(low, high) } : {}) });
    const x = { ...axes(log), label: key ?? (how.x === "steps" ? "step" : "hours"), labelSize: 20, size: 40, space: 64,
                ...(how.x === "steps" && !key ? { incrs: [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap(power => [1, 2, 5].map(digit => digit * 10 ** power)) } : {}),
                ...(splits ? { splits: (plot, i, low, high) => splits.filter(value => value >= low && value <= high) } : {}),
                ...(names ? { values: (_, found) => found.map(i => names[i].slice(0, 16)) } : log && splits ? { values: (_, found) => found.map(number) } : {}) };
    const record = { lines, label: x.label };
    const plot = new uPlot({
      width: Math.max(200, element.clientWidth), height: 280, legend: { show: false }, focus: { alpha: 0.25 },
      scales: { x: { time: false, ...(log ? { distr: 3 } : {}) }, y: positive ? { distr: 3, range: (_, low, high) => [low / 1.05, high * 1.05] } : {} },
      axes: [x, { ...axes(positive), size: (_, found) => 24 + 7.5 * Math.max(3, ...(found ?? []).map(value => value.length)) }],
      series: [{}, ...series.map(line => ({ spanGaps: true, ...line }))],
      cursor: { drag: { x: true, y: false }, focus: { prox: lines.length > 1 ? 24 : -1 }, points: { show: !many }, bind: { dblclick: () => () => whole(record) } },
      hooks: { draw: [plot => { if (!key) marks(plot, chart, lines, how, paint); }], setCursor: [plot => read_out(element, record, plot, names)] },
    }, tables.length === 1 ? tables[0] : uPlot.join(tables), element);
    const xs = plot.data[0], first = xs[0], last = xs.at(-1);
    record.plot = plot;
    record.range = !key ? [first, last] : log ? [first / (last / first) ** 0.06, last * (last / first) ** 0.06] : [first - (last - first || 1) * 0.06, last + (last - first || 1) * 0.06];
    drawn.set(element, record);
    const { min, max } = before?.label === record.label ? before.plot.scales.x : {};
    if (before && min != null && (min > before.range[0] || max < before.range[1])) plot.setScale("x", { min, max });  // still zoomed
    else if (key || first < last) whole(record);
  }

  const whole = ({ plot, range }) => plot.setScale("x", { min: range[0], max: range[1] });

  function marks(plot, chart, lines, how, paint) {  // new attempts; skipped steps, and values that are not finite
    const { ctx, bbox } = plot, dpr = devicePixelRatio || 1;
    const draws = (run, step, shape) => {
      const x = plot.valToPos(how.x === "steps" ? step : data.runs[run].hours[step], "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) return;
      ctx.beginPath(); shape(x, bbox.top + bbox.height);
    };
    const line = (x, bottom) => { ctx.moveTo(x, bbox.top); ctx.lineTo(x, bottom); ctx.stroke(); };
    const triangle = (x, bottom) => { ctx.moveTo(x, bottom - 9 * dpr); ctx.lineTo(x - 5 * dpr, bottom); ctx.lineTo(x + 5 * dpr, bottom); ctx.fill(); };
    ctx.save();
    ctx.setLineDash([3 * dpr, 4 * dpr]);
    for (const curve of chart.curves.filter(curve => how.runs.has(curve.run))) {
      ctx.strokeStyle = ctx.fillStyle = paint.of(curve.run, curve.metric);
      if (curve === chart.curves.find(({ run }) => run === curve.run)) data.runs[curve.run].starts.forEach(step => draws(curve.run, step, line));
      const skipped = chart.metrics[curve.metric].startsWith("train/") ? data.runs[curve.run].skipped : [];
      [...curve.odd ?? [], ...skipped].forEach(step => draws(curve.run, step, triangle));
    }
    ctx.restore();
  }

  function nearest(values, index) {  // the value at the closest place that has one
    for (let away = 0; away < values.length; away++)
      for (const at of [index - away, index + away]) if (values[at] != null) return [at, values[at]];
    return [null, null];
  }

  function read_out(element, { lines, label }, plot, names) {  // the lines next to the pointer, below the chart
    const { left, top, idx } = plot.cursor, place = element.nextElementSibling;
    if (left < 0 || idx == null) { place.replaceChildren(); return; }
    const found = lines.map(line => {
      const [at, value] = nearest(plot.data[line.series], idx);
      return { line, value, x: plot.data[0][at], away: Math.hypot(plot.valToPos(value, "y") - top, plot.valToPos(plot.data[0][at], "x") - left) };
    }).sort((a, b) => a.away - b.away).slice(0, 4);
    place.replaceChildren(`${label} ${names ? names[found[0].x] : number(found[0].x)}: `, ...found.map(({ line, value }) => {
      const swatch = make("span", `${line.label} ${number(value)}`, { class: "run" });
      swatch.style.setProperty("--color", plot.series[line.series].stroke());
      return swatch;
    }));
  }

  function histogram(element) {
    const { counts, edges } = JSON.parse(element.dataset.histogram);
    const axis = { stroke: style("--soft"), grid: { stroke: style("--grid"), width: 1 }, ticks: { stroke: style("--line"), width: 1 }, values: (_, found) => labels(found) };
    element.replaceChildren();
    const middles = counts.map((_, i) => (edges[i] + edges[i + 1]) / 2);
    new uPlot({ width: Math.max(160, element.clientWidth), height: 160, legend: { show: false }, cursor: { show: false },
      scales: { x: { time: false }, y: { range: (_, low, high) => [0, high || 1] } }, axes: [{ ...axis, space: 64 }, { ...axis, size: 64 }],
      series: [{}, { stroke: palette(0), fill: palette(0), alpha: 0.6, paths: uPlot.paths.bars({ size: [1] }), points: { show: false } }],
    }, [middles, counts], element);
  }

  // -- table of runs, and legend
  function make(tag, content, attributes = {}) {
    const element = document.createElement(tag);
    element.append(content);
    Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
    return element;
  }

  function show_table(how, paint) {
    for (const row of all("#table tbody tr")) {
      const run = Number(row.dataset.row), box = row.querySelector("[name=run]");
      row.hidden = !how.found.includes(run);
      if (box) box.checked = !hidden.has(run);
    }
    for (const element of all("[data-run]")) element.style.setProperty("--color", how.color === "curve" ? "transparent" : paint.of(Number(element.dataset.run)));
    const box = document.getElementById("all");
    if (!box) return;
    box.checked = how.found.length > 0 && how.runs.size === how.found.length;
    box.indeterminate = how.runs.size > 0 && !box.checked;
    document.getElementById("shown").textContent = `${how.runs.size} of ${data.runs.length} runs are shown`;
  }

  function choose_metric(how) {  // fills the column of a metric that has none of its own
    const extra = how.metric && !data.shown.includes(how.metric);
    all("#table .chosen").forEach(cell => { cell.hidden = !extra; });
    all(".metric").forEach(place => { place.textContent = how.metric; });
    if (!extra) return;
    document.querySelector("#table th.chosen button").textContent = how.metric;
    for (const cell of all("#table td.chosen")) {
      const value = data.metrics[how.metric].values[cell.parentElement.dataset.row];
      cell.textContent = value == null ? "" : number(value);
    }
  }

  function sort_table() {
    const table = document.getElementById("table"), heads = [...table.tHead.rows[0].cells];
    const column = sorted ? heads.findIndex(head => !head.hidden && head.textContent === sorted.name) : -1;
    heads.forEach((head, i) => i === column ? head.setAttribute("aria-sort", sorted.descending ? "descending" : "ascending") : head.removeAttribute("aria-sort"));
    if (column < 0) return;
    const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const compare = (a, b) => a === "" || b === "" ? (a === "") - (b === "") : (sorted.descending ? -1 : 1) * (a - b || (isNaN(a - b) ? a.localeCompare(b) : 0));
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => compare(value(a), value(b))));
  }

  const first_order = name => ({ name, descending: data.metrics[name]?.lower === false });  // of a metric: best first

  function show_legend(how, paint) {
    const legend = document.getElementById("legend"), few = paint.groups.length <= 40 ? paint.groups : [];
    const content = JSON.stringify([few, paint.low, paint.high, how.color]);
    if (legend.dataset.content !== content) {  // else the buttons stay, and the focus in them
      legend.dataset.content = content;
      const title = { run: "", curve: "", metric: how.metric }[how.color] ?? how.color.slice(4);
      const bar = make("span", "", { class: "bar" });
      bar.style.background = `linear-gradient(to right, ${[0, 0.25, 0.5, 0.75, 1].map(scale).join(", ")})`;
      legend.replaceChildren(...(title ? [make("span", title)] : []), ...(paint.low != null ? [make("span", number(paint.low)), bar, make("span", number(paint.high))] : []),
        ...few.map((group, i) => {
          const button = make("button", group.text, { type: "button", class: "run", "data-group": i });
          button.style.setProperty("--color", group.color);
          return button;
        }));
      if (paint.groups.length > few.length) legend.append("Each run has its color in the table of runs.");
    }
    legend.hidden = !legend.childNodes.length;
    legend.querySelectorAll("button").forEach((button, i) => button.setAttribute("aria-pressed", few[i].runs.some(run => !hidden.has(run))));
  }

  function numbers(details, how) {  // the table below a chart
    if (!details.open) return;
    const chart = data.charts[details.dataset.numbers], table = make("table", ""), head = table.createTHead().insertRow();
    for (const name of ["curve", "first", "last", "lowest", "highest", "values"]) head.append(make("th", name, { scope: "col" }));
    const body = table.createTBody();
    for (const { run, metric, grid, values, count, odd = [] } of chart.curves.filter(curve => how.runs.has(curve.run))) {
      const row = body.insertRow(), steps = data.runs[run].grids[grid], name = chart.metrics[metric];
      const extreme = pick => { const value = pick(...values); return [number(value), make("small", ` at step ${steps[values.indexOf(value)].toLocaleString("en")}`)]; };
      row.append(make("th", data.runs.length > 1 ? `${data.runs[run].name} ${name}` : name, { scope: "row" }));
      for (const cell of values.length ? [[number(values[0])], [number(values.at(-1))], extreme(Math.min), extreme(Math.max)] : [["no finite value"], [], [], []]) row.insertCell().append(...cell);
      row.insertCell().append(count.toLocaleString("en") + (odd.length ? `, not finite at step${odd.length > 1 ? "s" : ""} ${odd.slice(0, 10).join(", ")}${odd.length > 10 ? "…" : ""}` : ""));
    }
    const region = make("div", table, { class: "wide", tabindex: 0, role: "region", "aria-label": details.firstElementChild.textContent });
    details.replaceChildren(details.firstElementChild, region);
  }

  // -- the whole page
  function refresh() {
    const chosen = controls.elements.theme.value;
    if (chosen) document.documentElement.dataset.theme = chosen; else delete document.documentElement.dataset.theme;
    const how = settings(), paint = coloring(how);
    choose_metric(how);
    show_table(how, paint);
    show_legend(how, paint);
    for (const button of all("button[data-metric]")) {
      const chart = data.charts[button.dataset.of], metric = Number(button.dataset.metric), line = button.querySelector("line");
      button.setAttribute("aria-pressed", !off.has(`${chart.title}/${chart.metrics[metric]}`));
      line.setAttribute("stroke-dasharray", DASHES[metric % DASHES.length].join(" "));
      line.style.stroke = how.color === "curve" ? palette(metric) : "currentColor";
    }
    all("[data-numbers]").forEach(details => numbers(details, how));
    const away = element => { const { top, bottom } = element.getBoundingClientRect(); return bottom > 0 && top < innerHeight ? 0 : 1; };
    const waiting = queue.length;
    queue = all("[data-chart], [data-key]").map(element => [away(element), element]).sort((a, b) => a[0] - b[0]).map(([, element]) => () => draw(element, how, paint));
    queue.push(() => all("[data-histogram]").forEach(histogram));
    if (!waiting) draw_next();
  }

  function draw_next() {  // one chart at a time, those on the screen first, so that the page answers between them
    queue.shift()?.();
    document.body.dataset.waiting = queue.length;
    if (queue.length) setTimeout(draw_next);
  }

  function read() {
    data = JSON.parse(document.getElementById("data").textContent);
    drawn.clear();
    data.runs.forEach((run, i) => {
      const values = Object.entries(data.keys).flatMap(([key, each]) => [`${key}=${text(each[i])}`, `${key}=${each[i]}`, `${key}=${Number(each[i]).toExponential()}`]);
      run.text = [run.name, run.state, ...values].join(" ").toLowerCase();  // a number may be written in several ways
    });
    for (const chart of data.charts.filter(chart => !known.has(chart.title))) {
      known.add(chart.title);
      if (data.runs.length > 1 && chart.metrics.length > 4) chart.metrics.slice(1).forEach(metric => off.add(`${chart.title}/${metric}`));
    }
    for (const head of all("#table thead th")) head.replaceChildren(make("button", head.textContent, { type: "button" }));
    choose_metric(settings());
    sort_table();
    refresh();
  }

  function first_settings() {
    const { keys, runs, shown } = JSON.parse(document.getElementById("data").textContent);
    const known = Object.keys(keys).filter(key => !key.endsWith("seed"));
    const key = known.find(key => keys[key].every(value => typeof value === "number")) ?? known[0];
    if (runs.length > FEW && key) controls.elements.color.value = `key:${key}`;
    return shown;
  }

  // -- events
  document.addEventListener("click", event => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.metric) {
      const chart = data.charts[button.dataset.of], name = `${chart.title}/${chart.metrics[button.dataset.metric]}`;
      if (!off.delete(name)) off.add(name);
      refresh();
    } else if (button.dataset.group) {
      const { runs } = coloring(settings()).groups[button.dataset.group], shown = runs.some(run => !hidden.has(run));
      runs.forEach(run => shown ? hidden.add(run) : hidden.delete(run));
      refresh();
    } else {
      const name = button.textContent;
      sorted = sorted?.name === name ? { name, descending: !sorted.descending } : first_order(name);
      sort_table();
    }
  });

  document.addEventListener("change", event => {
    if (event.target.id === "all") settings().found.forEach(run => event.target.checked ? hidden.delete(run) : hidden.add(run));
    else if (event.target.name === "run") event.target.checked ? hidden.delete(Number(event.target.value)) : hidden.add(Number(event.target.value));
    else return;
    refresh();
  });

  document.addEventListener("toggle", event => { if (event.target.dataset.numbers) numbers(event.target, settings()); }, true);

  document.addEventListener("keydown", event => {  // from point to point, for screen readers too
    const record = drawn.get(event.target);
    if (!record) return;
    const { plot, lines, label } = record, xs = plot.data[0], last = xs.length - 1;
    if (event.key === "Escape") { whole(record); return; }
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const before = record.at ?? (moves[event.key] > 0 ? -1 : last + 1);
    record.at = Math.min(last, Math.max(0, before + moves[event.key]));
    plot.setCursor({ left: plot.valToPos(xs[record.at], "x"), top: 10 });
    const found = lines.map(line => [line.label, plot.data[line.series][record.at]]).filter(([, value]) => value != null);
    const more = found.length > 10 ? `, and ${found.length - 10} more` : "";
    document.getElementById("announcer").textContent = `${label} ${number(xs[record.at])}: ` + found.slice(0, 10).map(([name, value]) => `${name} ${number(value)}`).join(", ") + more;
  });

  // -- live: fetch the page again, and draw it with the current settings
  async function renew() {
    const state = document.getElementById("live");
    try {
      const answer = await fetch("", { cache: "no-store" });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const open = new Map(all("details").map(each => [each.id, each.open])), focus = document.activeElement;
      const place = focus?.dataset?.chart ? `[data-chart="${focus.dataset.chart}"]` : focus?.name === "run" ? `[name=run][value="${focus.value}"]` : null;
      document.getElementById("main").replaceWith(page.getElementById("main"));
      all("details").forEach(each => { each.open = open.get(each.id) ?? each.open; });
      read();
      if (place) document.querySelector(place)?.focus({ preventScroll: true });
      state.textContent = ` · live, ${new Date().toLocaleTimeString()}`;
    } catch {
      state.textContent = " · no longer live";
    }
  }

  let waiting;
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(refresh, 60); };
  controls.addEventListener("input", event => {
    if (event.target.name === "metric") { sorted = first_order(event.target.value); choose_metric(settings()); sort_table(); }
    soon();
  });
  controls.addEventListener("submit", event => event.preventDefault());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);
  addEventListener("resize", soon);
  addEventListener("beforeprint", () => { refresh(); while (queue.length) draw_next(); });
  const reveal = () => { const section = location.hash.startsWith("#run-") && document.querySelector(`${location.hash} > details`); if (section) section.open = true; };
  addEventListener("hashchange", reveal);
  const [best] = first_settings();
  if (best) sorted = { name: best, descending: !JSON.parse(document.getElementById("data").textContent).metrics[best].lower };
  read();
  reveal();
  if (document.body.dataset.live) setInterval(renew, 1000 * Number(document.body.dataset.live));
})();
