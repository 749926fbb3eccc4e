// The page of training runs: live (asks the server that gave it for what is new) or frozen (all of
// it in #olm-data). Every text of a run goes in by textContent or as an attribute, never as markup.
"use strict";
(() => {
  const root = document.getElementById("olm-run");
  const store = document.getElementById("olm-data");
  const frozen = store ? JSON.parse(store.textContent) : null;
  const COLOURS = ["#3f7fe8", "#e07b39", "#3a9d6e", "#b0489c", "#7a6ff0", "#c2a21b", "#4fb3bf", "#c94f4f"];
  const LOSS = "train/CE loss", SVG = "http://www.w3.org/2000/svg", POLL = 1000;
  const CHARTS = [
    { name: LOSS, title: "Loss", unit: "nats a token", height: 300, main: true },
    { name: "bits", held: true, title: "Bits per byte, held out", height: 190 },
    { name: "scores", held: true, title: "Downstream scores, ± standard error", height: 190 },
    { name: "sources", ledger: true, title: "Loss by source", unit: "nats a token", height: 190 },
    { name: "positions", ledger: true, title: "Loss by where in its document a piece begins", unit: "nats a token", height: 190 },
    { name: "optim/lr", title: "Learning rate", height: 130, zero: true, exact: true },
    { name: "optim/total grad norm", title: "Gradient norm", height: 130, log: true },
    { name: "throughput/tokens per second", title: "Tokens a second", height: 130, zero: true },
    { name: "throughput/data wait share", title: "Time waiting for data, %", height: 130, zero: true, times: 100 },
    { name: "throughput/MFU", title: "MFU, %", height: 130, zero: true, times: 100 },
  ];
  const runs = [], shown = { from: 0, to: Infinity }, cursor = { run: 0, step: null };
  let asked = 0;

  const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const draw = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(node.style, value);
      else node.setAttribute(name, value);
    }
    node.append(...children.filter(child => child !== null && child !== undefined));
    return node;
  }
  const whole = n => Math.round(n).toLocaleString("en");
  const scaled = (values, times) => times && values ? values.map(v => v === null ? null : v * times) : values;
  function number(v) {
    if (v === null || v === undefined || !Number.isFinite(v)) return "–";
    const size = Math.abs(v);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return v.toExponential(2).replace("e+", "e");
    return size >= 1000 ? whole(v) : String(+v.toPrecision(4));
  }
  const percent = v => (100 * v).toFixed(1) + " %";
  const clock = t => t ? new Date(1000 * t).toISOString().slice(0, 19).replace("T", " ") : "";

  // ---- what is known of a run, and what is new of it ---------------------------------------------
  function take(run, update) {
    if (update.reset) Object.assign(run, { points: null, evaluations: [], ledger: null });
    run.name = update.name;
    run.token = update.token;
    run.read = update.read;
    run.evaluations = run.evaluations.concat(update.evaluations).sort((a, b) => a.step - b.step); // those made beside the run come late
    if (update.words) run.words = update.words;
    if (update.ledger) run.ledger = update.ledger;
    const old = run.points, now = update.points;
    if (old && now.first > 0 && old.size === now.size) {
      const join = (a, b) => { for (const name of Object.keys(b)) a[name] = (a[name] || []).slice(0, now.first).concat(b[name]); };
      for (const name of ["steps", "tokens", "time"]) old[name] = old[name].slice(0, now.first).concat(now[name]);
      for (const part of ["values", "low", "high"]) join(old[part], now[part]);
    } else run.points = now;
  }
  const curvesOf = name => [...new Set(runs.flatMap(run => run.hidden || !run.ledger ? [] : run.ledger[name].map(c => c.name)))]; // sources or places
  const names = part => [...new Set(runs.flatMap(run => run.evaluations.flatMap(e => Object.keys(e[part]))))];
  const sets = () => names("losses");
  const curvesIn = spec => spec.ledger ? curvesOf(spec.name) : names(spec.part);
  // a colour is a run and a dash a curve where there are several runs; of one run a colour is a curve
  const DASHES = ["", "6 3", "2 3", "8 3 2 3", "12 4", "1 5", "8 3 2 3 2 3"];
  const several = () => runs.length > 1;
  const look = (run, curve) => several() ? [COLOURS[run.number] || `hsl(${run.number * 137 % 360} 55% 50%)`, DASHES[curve % 7]] : [COLOURS[curve % 8], DASHES[Math.floor(curve / 8) % 7]];
  function swatch(colour, dash) { // a line of a legend, drawn as in the chart
    let place = 0;
    const cuts = dash.split(" ").map((n, i) => `${i % 2 ? "transparent" : colour} ${place}px ${place += +n}px`);
    return el("i", { class: "swatch", style: { background: dash ? `repeating-linear-gradient(90deg, ${cuts.join(", ")})` : colour } });
  }
  function lastStep() { return Math.max(1, ...runs.map(run => run.words ? run.words.step : 0)); }
  function range() { return [shown.from, Math.min(shown.to, lastStep())]; }
  function at(run, step) { // number of the point that holds a step
    const steps = run.points.steps;
    let low = 0, high = steps.length - 1;
    while (low < high) { const mid = (low + high + 1) >> 1; if (steps[mid] <= step) low = mid; else high = mid - 1; }
    return low;
  }

  // ---- the axis: steps, tokens or time of a run --------------------------------------------------
  const view = { axis: "steps", smooth: 0 };
  const leader = () => runs[cursor.run];
  function along(run, step) { // where a step lies on the axis
    if (view.axis === "steps" || !run.points || !run.points.steps.length) return step;
    const { steps, size, [view.axis]: places } = run.points, i = at(run, step), k = Math.min(Math.max(i, 1), steps.length - 1);
    if (!k) return places[0];
    const slope = i ? (places[k] - places[k - 1]) / (steps[k] - steps[k - 1]) : 0, next = i + 1 < steps.length ? (places[i + 1] - places[i]) / (steps[i + 1] - steps[i]) : slope;
    return places[i] + next * Math.max(0, Math.min(step - steps[i], i + 1 < steps.length ? Infinity : size - 1));
  }
  function stepAt(run, place) { // the last step that does not lie behind a place
    if (view.axis === "steps" || !run.points || !run.points.steps.length) return Math.round(place);
    let low = 0, high = Math.max(run.words ? run.words.step : 0, run.points.steps[run.points.steps.length - 1]);
    while (low < high) { const mid = (low + high + 1) >> 1; if (along(run, mid) <= place + 1e-9) low = mid; else high = mid - 1; }
    return low;
  }
  const here = run => cursor.step === null ? null : stepAt(run, along(leader(), cursor.step));
  function domain() {
    const [from, to] = range();
    if (view.axis === "steps") return [from, to, 1, whole];
    const last = shown.to === Infinity ? Math.max(...runs.filter(run => !run.hidden).map(run => along(run, run.words ? run.words.step : 0)), 1) : along(leader(), to);
    const units = view.axis === "tokens" ? [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"], [1, ""]] : [[86400, " d"], [3600, " h"], [60, " min"], [1, " s"]];
    const [unit, name] = units.find(([size]) => last >= 2 * size) || units[units.length - 1];
    return [from ? along(leader(), from) : 0, last, unit, v => number(v) + name];
  }
  function smoothed(ys) { // an exponential mean, without the weight of its beginning
    let sum = 0, weight = 0;
    return ys.map(y => { if (y === null) return null; sum = view.smooth * sum + (1 - view.smooth) * y; weight = view.smooth * weight + 1 - view.smooth; return sum / weight; });
  }

  // ---- charts ------------------------------------------------------------------------------------
  const LEFT = 52, RIGHT = 12, TOP = 8, BOTTOM = 22;
  function ticks(low, high, most, log) {
    if (log) {
      const found = [];
      for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
        for (const m of [1, 2, 5]) { const v = m * 10 ** p; if (v >= low && v <= high) found.push(v); }
      return found.length > most ? found.filter((_, i) => i % Math.ceil(found.length / most) === 0) : found;
    }
    const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find(m => m * power >= rough * 0.999), found = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) found.push(+v.toPrecision(12));
    return found;
  }
  function gather(spec) { // what a chart shows, and whether it is shown at all
    const series = [];
    for (const run of runs) {
      if (run.hidden || !run.points) continue;
      if (spec.ledger) {
        if (run.ledger) for (const c of run.ledger[spec.name]) series.push({ run, steps: run.ledger.until, ys: c.losses, part: c.name, set: c.name });
        continue;
      }
      const p = run.points, ys = scaled(p.values[spec.name], spec.times) || [];
      if (!ys.some(y => y !== null)) continue;
      series.push({ run, steps: p.steps, ys, low: scaled(p.low[spec.name], spec.times), high: scaled(p.high[spec.name], spec.times), train: true, set: null });
    }
    if (spec.main || spec.held) for (const run of runs) if (!run.hidden) for (const set of names(spec.part)) {
      const there = [...new Map(run.evaluations.filter(e => set in e[spec.part]).map(e => [e.step, e[spec.part][set]]))]; // of two of a step the later one
      if (!there.length) continue;
      const value = v => spec.part === "scores" ? v.value : v, off = (v, sign) => value(v) + sign * (v.error || 0);
      const s = { run, set, steps: there.map(e => e[0]), ys: there.map(e => value(e[1])) };
      if (spec.held) Object.assign(s, { part: set, held: true });
      if (spec.part === "scores") Object.assign(s, { downs: there.map(e => off(e[1], -1)), ups: there.map(e => off(e[1], 1)), metric: there[there.length - 1][1].metric });
      series.push(s);
    }
    spec.box.hidden = !spec.main && !series.length;
    const curves = spec.part || spec.ledger ? curvesIn(spec) : [], many = several() && curves.length > DASHES.length - 1;
    if (spec.choice) {
      spec.choice.hidden = !many;
      if (many && spec.choice.length !== curves.length) spec.choice.replaceChildren(...curves.map(name => el("option", {}, name)));
    }
    spec.series = series.filter(s => s.train || !many || !spec.choice || s.set === spec.choice.value);
    for (const s of spec.series) {
      [s.colour, s.dash] = look(s.run, (spec.main || spec.held) && s.set !== null ? 1 + curves.indexOf(s.set) : spec.ledger ? curves.indexOf(s.set) : 0);
      if (s.train && view.smooth && !spec.exact) s.smooth = smoothed(s.ys);
    }
  }
  function paint(spec) {
    if (spec.box.hidden) return;
    const width = Math.max(260, spec.svg.clientWidth || 600), height = spec.height, series = spec.series;
    const [from, to, unit, label] = domain();
    for (const s of series) s.xs = s.steps.map(step => along(s.run, step));
    let low = Infinity, high = -Infinity;
    for (const s of series) s.xs.forEach((x, i) => {
      if (x < from || x > to || s.ys[i] === null) return;
      const a = s.downs ? s.downs[i] : s.low && s.low[i] !== null ? s.low[i] : s.ys[i], b = s.ups ? s.ups[i] : s.high && s.high[i] !== null ? s.high[i] : s.ys[i];
      if (!spec.log || a > 0) low = Math.min(low, a);
      high = Math.max(high, b);
    });
    if (!(low <= high)) [low, high] = spec.log ? [0.1, 1] : [0, 1];
    if (spec.zero) low = Math.min(0, low);
    const log = spec.log && low > 0;
    if (log) { low /= 1.1; high *= 1.1; } else { const pad = (high - low || Math.abs(high) || 1) * 0.05; high += pad; if (!spec.zero) low -= pad; }
    const f = log ? Math.log10 : v => v;
    const x = v => LEFT + (width - LEFT - RIGHT) * (v - from) / (to - from || 1);
    const y = v => TOP + (height - TOP - BOTTOM) * (1 - (f(Math.max(v, log ? low : -Infinity)) - f(low)) / (f(high) - f(low) || 1));
    Object.assign(spec, { x, y, width, from, to });
    const parts = [];
    for (const v of ticks(low, high, spec.main ? 7 : spec.ledger || spec.held ? 5 : 4, log)) {
      parts.push(draw("line", { x1: LEFT, x2: width - RIGHT, y1: y(v), y2: y(v), stroke: "var(--line)" }));
      parts.push(draw("text", { x: LEFT - 6, y: y(v) + 4, "text-anchor": "end" }, number(v)));
    }
    for (const v of ticks(from / unit, to / unit, Math.max(3, Math.floor(width / 110)), false)) if (view.axis !== "steps" || Number.isInteger(v))
      parts.push(draw("text", { x: x(v * unit), y: height - 5, "text-anchor": "middle" }, label(v)));
    const inside = draw("g", { "clip-path": `url(#clip-${spec.id})` });
    if (spec.main) for (const run of runs) if (!run.hidden && run.words) for (const e of run.words.events) {
      const place = along(run, e.step);
      if (place < from || place > to) continue;
      const colour = e.kind === "spike" || e.kind === "bad" ? "#d64541" : "var(--soft)", px = x(place), title = draw("title", {}, `step ${whole(e.step)}: ${e.text}`);
      if (e.kind === "checkpoint") inside.append(draw("path", { d: `M${px - 4} ${height - BOTTOM}l4 -7l4 7z`, fill: colour, class: "mark-checkpoint" }, title));
      else if (e.kind === "start") { if (e.step) inside.append(draw("line", { x1: px, x2: px, y1: TOP, y2: height - BOTTOM, stroke: colour, "stroke-dasharray": "2 4", class: "mark-start" }, title)); }
      else if (e.kind === "end") inside.append(draw("circle", { cx: px, cy: height - BOTTOM, r: 4, fill: "none", stroke: colour, "stroke-width": 2, class: "mark-end" }, title));
      else inside.append(draw("path", { d: `M${px - 6} ${TOP}h12l-6 11z`, fill: colour, class: "mark-" + e.kind }, title));
    }
    for (const s of series) {
      const colour = s.colour;
      if (s.low) {
        let there = "", back = "";
        s.xs.forEach((v, i) => { if (s.low[i] !== null && (i + 1 === s.xs.length || s.xs[i + 1] >= from) && v <= to) { there += `${there ? "L" : "M"}${x(v).toFixed(1)} ${y(s.high[i]).toFixed(1)}`; back = `L${x(v).toFixed(1)} ${y(s.low[i]).toFixed(1)}` + back; } });
        if (there) inside.append(draw("path", { d: there + back + "Z", fill: colour, opacity: 0.2, class: "band" }));
      }
      const trace = ys => { let path = ""; s.xs.forEach((v, i) => { if (ys[i] !== null) path += `${path ? "L" : "M"}${x(v).toFixed(1)} ${y(ys[i]).toFixed(1)}`; }); return path; };
      const line = { d: trace(s.ys), fill: "none", stroke: colour, "stroke-width": s.train ? 1.4 : 2, "stroke-linejoin": "round", class: s.train ? "train" : s.part ? "part" : "evaluation" };
      if (s.dash) line["stroke-dasharray"] = s.dash;
      if (s.smooth) line.opacity = 0.3;
      inside.append(draw("path", line));
      if (s.smooth) inside.append(draw("path", { ...line, d: trace(s.smooth), opacity: 1, "stroke-width": 2, class: "smooth" }));
      if (s.downs && s.steps.length < 200) s.xs.forEach((v, i) => s.ups[i] > s.downs[i] && inside.append(draw("path", { d: `M${x(v) - 3} ${y(s.ups[i])}h6m-3 0V${y(s.downs[i])}m-3 0h6`, fill: "none", stroke: colour, class: "error" })));
      if (!s.train && s.steps.length < (s.part && !s.held ? 3 : 200)) s.xs.forEach((v, i) => s.ys[i] !== null && inside.append(draw("circle", { cx: x(v), cy: y(s.ys[i]), r: 3.2, fill: colour })));
    }
    spec.line = draw("line", { y1: TOP, y2: height - BOTTOM, stroke: "var(--ink)", "stroke-width": 1, visibility: "hidden" });
    const clip = draw("clipPath", { id: `clip-${spec.id}` }, draw("rect", { x: LEFT, y: 0, width: Math.max(1, width - LEFT - RIGHT + 8), height: height - BOTTOM + 4 }));
    spec.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    spec.svg.setAttribute("height", height);
    spec.svg.replaceChildren(clip, ...parts, inside, spec.line);
    spec.svg.setAttribute("aria-label", `${spec.title} over the ${view.axis}: ` + (series.map(s => `${s.set === null ? (runs.length > 1 ? s.run.name : "train") : (runs.length > 1 ? s.run.name + " " : "") + s.set} from ${number(s.ys.find(v => v !== null))} to ${number([...s.ys].reverse().find(v => v !== null))}`).join("; ") || "nothing yet"));
    point();
  }
  function point() { // the cursor in every chart
    for (const spec of CHARTS) {
      if (!spec.x || spec.box.hidden) continue;
      const step = cursor.step, place = step === null ? null : along(leader(), step), there = place !== null && place >= spec.from && place <= spec.to;
      spec.line.setAttribute("visibility", there ? "visible" : "hidden");
      if (there) { spec.line.setAttribute("x1", spec.x(place)); spec.line.setAttribute("x2", spec.x(place)); }
      const words = spec.series.map(s => {
        const own = there ? here(s.run) : null;
        let i = s.steps.length - 1;
        if (there && s.train) i = at(s.run, own);
        else if (there && s.part && !s.held) { const k = s.steps.findIndex(v => v >= own); if (k >= 0) i = k; } // past its end: its last
        else if (there) { i = -1; s.steps.forEach((v, k) => { if (v <= own) i = k; }); }
        while (i > 0 && s.ys[i] === null) i--;
        const label = s.set === null ? (runs.length > 1 ? s.run.name : "train") : (runs.length > 1 ? s.run.name + ": " : "") + s.set;
        if (s.part) return el("span", { class: "part" }, swatch(s.colour, s.dash), `${label}${s.metric ? " " + s.metric : ""} ${i < 0 ? "–" : number(s.ys[i])}${i >= 0 && s.ups && s.ups[i] > s.ys[i] ? " ± " + number(s.ups[i] - s.ys[i]) : ""}`);
        return i < 0 ? null : (spec.main || runs.length > 1 ? label + " " : "") + number((s.smooth || s.ys)[i]);
      }).filter(w => w);
      if (spec.ledger || spec.held) spec.out.replaceChildren(...words);
      else spec.out.textContent = (there ? `step ${whole(step)}: ` : "latest: ") + (words.join(" · ") || "–");
    }
    if (parts.step && cursor.step !== null && document.activeElement !== parts.step) parts.step.value = cursor.step;
    if (parts.slide && cursor.step !== null) parts.slide.value = cursor.step;
  }
  function stepUnder(spec, event) {
    const box = spec.svg.getBoundingClientRect(), px = (event.clientX - box.left) * spec.width / box.width;
    const step = stepAt(leader(), spec.from + (spec.to - spec.from) * (px - LEFT) / (spec.width - LEFT - RIGHT));
    return Math.max(1, Math.min(lastStep(), step));
  }
  function nearest(spec, step, event) { // a marked step that was meant, and the run whose curve is nearest
    const box = spec.svg.getBoundingClientRect(), py = (event.clientY - box.top) * spec.height / box.height;
    let best = { run: cursor.run, step }, far = Infinity;
    for (const s of spec.series) if (s.train) { const v = s.ys[at(s.run, here(s.run) ?? step)]; if (v !== null && Math.abs(spec.y(v) - py) < far) { far = Math.abs(spec.y(v) - py); best = { run: s.run.number, step }; } }
    const run = runs[best.run], reach = 6 * (range()[1] - range()[0]) / spec.width;
    const steps = ((run.words && run.words.events) || []).filter(e => e.kind === "spike" || e.kind === "bad").map(e => e.step);
    const near = steps.filter(v => Math.abs(v - step) <= reach).sort((a, b) => Math.abs(a - step) - Math.abs(b - step))[0];
    return near ? { run: best.run, step: near } : best;
  }
  function listen(spec) {
    let down = null;
    spec.svg.addEventListener("pointermove", event => { cursor.step = stepUnder(spec, event); point(); });
    spec.svg.addEventListener("pointerdown", event => { down = { x: event.clientX, step: stepUnder(spec, event) }; });
    spec.svg.addEventListener("pointerup", event => {
      const step = stepUnder(spec, event);
      if (down && Math.abs(event.clientX - down.x) > 8 && step !== down.step) zoom(Math.min(step, down.step), Math.max(step, down.step));
      else if (down && (spec.main || spec.ledger || spec.held)) { const meant = nearest(spec, step, event); documents(meant.run, meant.step); }
      down = null;
    });
  }
  function zoom(from, to) {
    Object.assign(shown, { from, to });
    parts.all.hidden = from === 0;
    if (!frozen) for (const run of runs) run.token = "";
    redraw();
    if (!frozen) poll(true);
  }

  // ---- documents of a step -----------------------------------------------------------------------
  async function documents(number_, step) {
    const run = runs[number_], ticket = ++asked;
    Object.assign(cursor, { run: number_, step });
    point();
    const head = text => [el("h2", {}, `Documents of step ${whole(step)}` + (runs.length > 1 ? ` of ${run.name}` : "")), el("p", { class: "soft" }, text)];
    let found, why = "";
    if (frozen) {
      found = frozen.documents[number_][step];
      if (!found) {
        const steps = Object.keys(frozen.documents[number_]).map(Number);
        const near = steps.sort((a, b) => Math.abs(a - step) - Math.abs(b - step))[0];
        parts.docs.replaceChildren(...head("This page holds the documents of some steps only. For this step type:"),
          el("pre", {}, (run.words.command || "olm-data show step LOCK STEP --run RUN").replace("STEP", step)));
        if (near) parts.docs.append(el("p", {}, el("button", { type: "button", onclick: () => documents(number_, near) }, `Show step ${whole(near)}, the nearest one here`)));
        return;
      }
    } else {
      parts.docs.replaceChildren(...head("reading…"));
      try {
        const answer = await fetch(`step?run=${number_}&step=${step}`), said = await answer.json();
        if (answer.ok) found = said; else why = said.error;
      } catch { why = "the server does not answer"; }
      if (ticket !== asked) return;
      if (!found) { parts.docs.replaceChildren(...head(why)); return; }
    }
    const sources = found.sources.map(([stage, source, rows]) => `${whole(rows)} of ${source} (stage ${stage})`).join(", ");
    const [title] = head("");
    if (found.step !== step) title.textContent = title.textContent.replace(whole(step), whole(found.step));
    const go = (text, to) => el("button", { type: "button", onclick: () => documents(number_, to) }, text);
    const body = el("div", { class: "docs", tabindex: 0, "aria-label": "documents" });
    for (const row of found.rows) {
      const strip = el("div", { class: "strip", "aria-hidden": "true" });
      const part = el("div", {}, el("h3", {}, `row ${whole(row.row)}: ${row.origin}`), strip);
      row.pieces.forEach((piece, i) => {
        const colour = COLOURS[i % 8];
        strip.append(el("i", { title: `${piece.name}: ${whole(piece.tokens)} tokens`, style: { flexGrow: String(piece.tokens), background: colour } }));
        part.append(el("pre", { style: { borderLeft: `4px solid ${colour}` } }, el("span", { class: "note" }, `${piece.name} · ${piece.origin}` + (piece.trained === null ? "" : ` · trained ${(100 * piece.trained / piece.tokens).toFixed(1)} % of ${whole(piece.tokens)} tokens, underlined`)), piece.loss === null ? "" : el("span", { class: "loss" }, ` · loss ${number(piece.loss)}`), "\n", ...(piece.runs.length ? piece.runs.map(([text, on]) => on ? el("mark", {}, text) : text) : [piece.text]), piece.cut ? " …" : ""));
      });
      body.append(part);
    }
    const rest = found.rows_of_step - found.rows.length, raised = found.losses ? losses(found.losses) : null;
    const late = !raised && run.ledger ? el("p", { class: "soft" }, "The ledger has no losses of this step yet: its files hold many steps each.") : null;
    parts.docs.replaceChildren(...[title, el("p", { class: "soft" }, `${found.state}: ${whole(found.rows_of_step)} rows: ${sources}`),
      el("p", {}, frozen ? "" : go("← step before", Math.max(1, found.step - 1)), " ", frozen ? "" : go("next step →", found.step + 1)), raised, late, body,
      rest > 0 ? el("p", { class: "soft" }, `${whole(rest)} more rows: ${(run.words.command || "").replace("STEP", found.step)}`) : null].filter(node => node));
  }

  function losses(l) { // what raised the loss of a step, by the ledger
    const cell = (name, text) => el("td", { class: "number", "data-name": name }, text), value = (name, v) => cell(name, number(v)), more = v => cell("excess, nats", v === null ? "–" : (v > 0 ? "+" : "") + v.toFixed(1));
    const table = (head, rows) => el("div", { class: "scroll" }, el("table", {}, el("tr", {}, ...head.map((h, i) => el("th", i ? { class: "number", scope: "col" } : { scope: "col" }, h))), ...rows));
    return el("div", { id: "olm-losses" }, el("h3", {}, `Loss ${number(l.loss)} over ${whole(l.labels)} labels: what raised it`),
      table(["source", "labels", "loss", "usual", "excess, nats"], l.sources.map(s => el("tr", {}, el("td", { "data-name": "source" }, s.source), cell("labels", whole(s.labels)), value("loss", s.loss), value("usual", s.usual), more(s.excess)))),
      table(["document", "row", "labels", "loss", "usual", "excess, nats"], l.top.map(p => el("tr", {}, el("td", { "data-name": "document" }, `${p.address} · tokens ${whole(p.start)} to ${whole(p.stop)}`), cell("row", whole(p.row)), cell("labels", whole(p.labels)), value("loss", p.loss), value("usual", p.usual), more(p.excess)))),
      el("p", { class: "note" }, "Nats a label. Usual: the mean of the source in the 20 steps before; excess: what is beyond it, over all labels." + (l.ranks < l.world_size ? ` Of ${whole(l.world_size)} ranks the ledger has ${whole(l.ranks)}.` : "")));
  }

  // ---- everything around the charts --------------------------------------------------------------
  const parts = {};
  function build() {
    parts.heads = el("div");
    parts.facts = el("div", { class: "facts" });
    parts.legend = el("ul", { class: "legend" });
    CHARTS.forEach((spec, id) => {
      Object.assign(spec, { id, series: [] });
      spec.part = spec.main ? "losses" : spec.held ? spec.name : null;
      spec.svg = draw("svg", { role: "img", height: spec.height });
      spec.out = el("output");
      spec.choice = spec.held || spec.ledger ? el("select", { "aria-label": "curve", onchange: () => redraw() }) : null;
      spec.box = el("div", { class: "chart" }, el("h3", {}, spec.title + (spec.unit ? `, ${spec.unit}` : ""), spec.choice, spec.out), spec.svg);
      spec.box.hidden = true;
      listen(spec);
    });
    parts.slide = el("input", { type: "range", min: 1, value: 1, "aria-label": "step", oninput: e => { cursor.step = +e.target.value; point(); } });
    parts.step = el("input", { type: "number", min: 1, "aria-label": "number of the step", onchange: e => { cursor.step = +e.target.value; point(); } });
    const show = () => { const step = Math.max(1, Math.min(lastStep(), +parts.step.value || lastStep())); documents(cursor.run, step); };
    parts.all = el("button", { type: "button", onclick: () => zoom(0, Infinity) }, "whole run");
    parts.all.hidden = true;
    const axis = el("select", { id: "olm-axis", "aria-label": "axis", onchange: e => { view.axis = e.target.value; redraw(); } }, ...["steps", "tokens", "time"].map(name => el("option", {}, name)));
    const smooth = el("input", { id: "olm-smooth", type: "range", min: 0, max: 0.99, step: 0.01, value: 0, "aria-label": "smoothing", oninput: e => { view.smooth = +e.target.value; redraw(); } });
    parts.view = el("div", { class: "tools" }, el("label", {}, "over ", axis), el("label", {}, "smoothing ", smooth));
    const tools = el("div", { class: "tools" }, el("label", {}, "step "), parts.step, parts.slide, el("button", { type: "button", id: "olm-show", onclick: show }, "show its documents"), parts.all);
    parts.docs = el("section", { id: "olm-documents", "aria-live": "polite" });
    parts.docs.append(el("h2", {}, "Documents of a step"), el("p", { class: "soft" }, "Click a point of the loss curve, or choose a step below it, to see what the model was trained on there. Drag over a chart to look closer."));
    parts.apart = el("section", { id: "olm-apart" }); parts.mixture = el("section"); parts.events = el("section"); parts.samples = el("div"); parts.evaluated = el("div", { id: "olm-evaluations" }); parts.notes = el("div");
    const main = CHARTS[0], wide = CHARTS.filter(s => s.ledger || s.held), smalls = CHARTS.slice(1).filter(s => !s.ledger && !s.held);
    root.append(parts.heads, parts.facts, el("section", { "aria-label": "curves" }, parts.view, parts.legend, main.box, tools, el("div", { class: "halves" }, ...wide.map(s => s.box)), el("div", { class: "smalls" }, ...smalls.map(s => s.box))),
      parts.apart, parts.evaluated, parts.docs, el("div", { class: "two" }, parts.mixture, parts.events), parts.samples, parts.notes);
    let width = 0;
    new ResizeObserver(() => { if (root.clientWidth !== width) { width = root.clientWidth; CHARTS.forEach(paint); } }).observe(root);
  }
  function around() {
    const known = runs.filter(run => run.words);
    parts.heads.replaceChildren(...known.map(run => {
      const w = run.words, bar = w.total ? el("progress", { max: w.total, value: Math.min(w.step, w.total), "aria-label": `steps of ${run.name}` }) : null;
      return el("div", { class: "head" }, el("span", { class: "badge " + w.status.word }, w.status.word), several() ? el("b", {}, run.name) : null, bar,
        el("span", {}, `step ${whole(w.step)}` + (w.total ? ` of ${whole(w.total)}` : "")), w.status.text ? el("span", { class: "soft" }, w.status.text) : null,
        run.read < 1 ? el("span", { class: "soft" }, `reading the log: ${percent(run.read)}`) : null, run.error ? el("span", { class: "soft bad" }, run.error) : null);
    }));
    if (several()) {
      const names = [...new Set(known.flatMap(run => run.words.facts.map(f => f[0])))];
      const table = el("table", {}, el("tr", {}, el("th", {}, ""), ...known.map(run => el("th", { class: "number", scope: "col" }, run.name))),
        ...names.map(name => el("tr", {}, el("td", { "data-name": "" }, name), ...known.map(run => el("td", { class: "number", "data-name": run.name }, (run.words.facts.find(f => f[0] === name) || ["", ""])[1])))));
      parts.facts.replaceChildren(el("div", { class: "scroll", style: { width: "100%" } }, table));
    } else if (known.length) parts.facts.replaceChildren(...known[0].words.facts.map(([name, value]) => el("div", {}, el("b", {}, value), el("span", {}, name))));
    const key = (text, colour, dash) => el("li", {}, swatch(colour, dash), text);
    const focused = document.activeElement && parts.legend.contains(document.activeElement);
    if (!focused) parts.legend.replaceChildren(...(several() ? runs.map(run => {
      const box = el("input", { type: "checkbox", onchange: e => { run.hidden = !e.target.checked; redraw(); } });
      box.checked = !run.hidden;
      return el("li", {}, el("label", {}, box, " ", swatch(...look(run, 0)), run.name));
    }) : runs.map(run => key("train", ...look(run, 0)))), ...sets().map((set, i) => { const [colour, dash] = look(runs[0], 1 + i); return key(`held-out ${set}`, several() ? "var(--soft)" : colour, dash); }),
      el("li", { class: "soft" }, "▼ spike · ▲ checkpoint · ┊ start · ○ end"));
    const options = [...new Set(known.flatMap(run => Object.keys(run.words.config)))].sort();
    const value = (run, name) => run.words.config[name] ?? "–", apart = options.filter(name => new Set(known.map(run => value(run, name))).size > 1);
    parts.apart.hidden = !several();
    if (several()) parts.apart.replaceChildren(el("h2", {}, "What differs between the configurations"), apart.length ? el("div", { class: "scroll" }, el("table", {}, el("tr", {}, el("th", {}, "option"), ...known.map(run => el("th", { scope: "col" }, run.name))),
      ...apart.map(name => el("tr", {}, el("td", { "data-name": "" }, name), ...known.map(run => el("td", { "data-name": run.name }, value(run, name))))))) : el("p", { class: "soft" }, "Nothing: all options are the same."));
    parts.slide.max = parts.step.max = lastStep();
    if (cursor.step === null) parts.slide.value = parts.step.value = lastStep();
    const mixed = known.filter(run => run.words.mixture.length);
    parts.mixture.hidden = !mixed.length;
    parts.mixture.replaceChildren(el("h2", {}, "Mixture drawn so far"), ...mixed.flatMap(run => [several() ? el("h3", {}, run.name) : null,
      ...run.words.mixture.map((s, i) => el("div", { class: "share" }, el("b", {}, s.source),
        el("span", { class: "track", role: "img", "aria-label": `${s.source}: drawn ${percent(s.drawn)}, asked ${percent(s.asked)}` }, el("span", { style: { width: 100 * s.drawn + "%", background: COLOURS[i % 8] } }), el("i", { style: { left: 100 * s.asked + "%" } })),
        el("span", { class: "n" }, `${percent(s.drawn)} / ${percent(s.asked)}`)))]).filter(n => n), el("p", { class: "note" }, "Share of the rows drawn / asked for by the stages up to here; the mark is what was asked for."));
    const rows = known.flatMap(run => run.words.events.map(e => [run, e])).sort((a, b) => b[1].step - a[1].step || b[1].time - a[1].time);
    const earlier = known.reduce((n, run) => n + run.words.more_events, 0), place = parts.list ? parts.list.scrollTop : 0;
    parts.list = el("div", { class: "list", tabindex: 0, "aria-label": "events" }, el("table", {}, ...rows.map(([run, e]) => el("tr", {},
      el("td", {}, el("button", { type: "button", onclick: () => documents(run.number, Math.max(1, e.step)) }, whole(e.step))),
      el("td", {}, el("span", { class: "kind " + e.kind }, e.kind), several() ? ` ${run.name}` : ""), el("td", {}, e.text === e.kind ? "" : e.text, el("div", { class: "soft" }, clock(e.time)))))));
    if (!parts.events.contains(document.activeElement)) {
      parts.events.replaceChildren(el("h2", {}, "Events"), parts.list, el("p", { class: "note" }, (earlier ? `${whole(earlier)} earlier ones are not shown. ` : "") + "Times are UTC. Spikes and bad steps name their documents."));
      parts.list.scrollTop = place;
    }
    const cell = (name, text) => el("td", { class: "number", "data-name": name }, text), four = v => v === null ? "" : v.toFixed(4);
    const pm = (s, sign) => s === null ? "" : (sign && s.value >= 0 ? "+" : "") + four(s.value) + (s.error === null ? "" : " ± " + four(s.error));
    const grid = (title, head, rows, said) => rows.length ? el("section", {}, el("h2", {}, title), el("div", { class: "scroll" }, el("table", {}, el("tr", {}, ...head.map((h, i) => el("th", i ? { class: "number", scope: "col" } : { scope: "col" }, h))), ...rows)), el("p", { class: "note" }, said)) : null;
    const label = (run, text) => el("td", { "data-name": "" }, (several() ? run.name + ": " : "") + text);
    parts.evaluated.replaceChildren(...[
      grid("Held-out sets, latest", ["set", "step", "nats a token", "perplexity", "bits per byte"], known.flatMap(run => run.words.sets.map(r => el("tr", {}, label(run, r.group ? `${r.name}, ${r.group}` : r.name), cell("step", whole(r.step)), cell("nats a token", four(r.loss)), cell("perplexity", number(Math.exp(r.loss))), cell("bits per byte", four(r.bits))))),
        "Bits per byte compares models of different tokenizers; nats a token does not."),
      grid("Downstream tasks, latest", ["task", "step", "metric", "score", "change", "bits per byte", "questions"], known.flatMap(run => run.words.tasks.map(r => el("tr", {}, label(run, r.name), cell("step", whole(r.step)), cell("metric", r.score.metric), cell("score", pm(r.score)), cell("change", pm(r.change, true)), cell("bits per byte", four(r.bits)), cell("questions", whole(r.questions))))),
        "± is the standard error over the questions; the change is to the evaluation before, question by question."),
    ].filter(node => node));
    const texts = known.filter(run => run.words.samples.length).map(run => {
      const steps = run.words.samples, last = steps[steps.length - 1];
      return el("section", {}, el("h2", {}, several() ? `Samples of ${run.name}` : "Samples"), ...last.texts.flatMap((t, i) => [el("h3", {}, t.prompt || "a new document"),
        el("table", {}, ...steps.filter(s => s.texts[i] && s.texts[i].prompt === t.prompt).reverse().map(s => el("tr", {}, el("td", {}, whole(s.step)), el("td", {}, el("pre", {}, s.texts[i].text)))))]),
        el("p", { class: "note" }, `What the model wrote after each step, the latest first: temperature ${last.temperature}, top_k ${last.top_k}, seed ${last.seed}.`));
    });
    parts.samples.replaceChildren(...texts, ...known.filter(run => run.words.sample).map(run => {
      const s = run.words.sample;
      return el("section", {}, el("h2", {}, `Sample of ${run.name}`), el("pre", {}, el("b", { class: "prompt" }, s.prompt), s.text),
        el("p", { class: "note" }, `checkpoint ${s.checkpoint}, temperature ${s.temperature}, top_k ${s.top_k}, seed ${s.seed}`));
    }));
    parts.samples.append(...known.filter(run => run.words.started).map(run => el("section", {}, el("h2", {}, several() ? `Command of ${run.name}` : "Command"), el("pre", {}, run.words.started))));
    parts.notes.replaceChildren(...known.flatMap(run => run.words.notes.map(text => el("p", { class: "note" }, (several() ? run.name + ": " : "") + text))));
  }
  // which charts are shown decides how wide each is: all are gathered before the first is drawn
  function redraw() { around(); CHARTS.forEach(gather); CHARTS.forEach(paint); root.dataset.drawn = String(runs.reduce((n, run) => n + (run.words ? run.words.step : 0), 0)); }

  // ---- going on ----------------------------------------------------------------------------------
  let timer = 0;
  async function poll(now) {
    clearTimeout(timer);
    let changed = Boolean(now), more = false;
    if (!document.hidden || now) for (const run of runs) {
      try {
        const window_ = shown.to === Infinity ? "" : `&first=${shown.from}&last=${shown.to}`;
        const answer = await fetch(`data?run=${run.number}&token=${run.token}${window_}`), said = await answer.json();
        if (!answer.ok) throw new Error(said.error);
        const points = said.points.steps.length;
        changed = changed || said.reset || Boolean(said.words) || points > 1 || said.evaluations.length > 0 || Boolean(said.ledger) || Boolean(run.error);
        run.error = "";
        more = more || said.read < 1;
        take(run, said);
      } catch (error) { changed = changed || run.error !== error.message; run.error = error instanceof TypeError ? "the server does not answer" : error.message; }
    }
    if (changed) redraw();
    timer = setTimeout(poll, more ? 50 : POLL);
  }
  const count = frozen ? frozen.runs.length : Number(root.dataset.runs);
  for (let n = 0; n < count; n++) runs.push({ number: n, name: "", token: "", points: null, evaluations: [], words: null, ledger: null, read: 1, hidden: false, error: "" });
  build();
  if (frozen) { frozen.runs.forEach((update, n) => take(runs[n], update)); redraw(); }
  else { poll(true); document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); }); }
})();
