// What the charts of a report show, and the page around them; chart.js says how a chart is drawn.

// -- memory

function residentAt(t) {
  const found = [];
  for (let i = 0; i < data.spans.v.length; i++)
    if (data.spans.a[i] <= t && t < data.spans.b[i]) found.push(data.spans.v[i]);
  return found.sort((one, other) => data.vars.n[other] - data.vars.n[one]);
}

const memory = {
  zooms: true,
  shown: hasStep,
  legend: () => [["live", "live (needed in core)"],
                 ...(hasPlan() ? [["resident", "resident"]] : []), ...(data.budget ? [["bad", "budget"]] : []),
                 ...(rival() ? [["gradient", "resident in " + rival().name]] : [])],
  limits() {
    const others = rival() ? rival().resident.n : [];
    const high = 1.06 * data.live.n.concat(data.resident.n, others).reduce((one, other) => Math.max(one, other), data.budget || 1);
    return {...stepRange(), y: [0, high], yMarks: byteMarks(high)};
  },
  draw(chart) {
    const pen = chart.pen;
    if (hasPlan()) {
      pen.fillStyle = colours.resident;
      stairs(chart, data.resident, true);
    }
    pen.strokeStyle = colours.live;
    pen.lineWidth = 1.5;
    stairs(chart, data.live, false);
    if (rival()) {
      pen.strokeStyle = colours.gradient;
      stairs(chart, rival().resident, false, rival().duration);
    }
    if (!data.budget) return;
    pen.strokeStyle = colours.bad;
    pen.setLineDash([6, 4]);
    pen.beginPath();
    pen.moveTo(MARGIN.left, chart.y(data.budget));
    pen.lineTo(chart.width, chart.y(data.budget));
    pen.stroke();
    pen.setLineDash([]);
  },
  point(chart, t) {
    const op = last(data.ops.a, t), running = op >= 0 && t < data.ops.b[op];
    const live = data.live.n[last(data.live.t, t)] || 0, held = data.resident.n[last(data.resident.t, t)] || 0;
    const found = residentAt(t);
    let text = time(t) + ": live " + bytes(live);
    if (hasPlan()) text += ", resident " + bytes(held) + " in " + found.length + " variables";
    element("div", text + (op >= 0 ? "; " + (running ? "in " : "after ") + opName(op) : ""), chart.readout);
    const table = element("table", undefined, chart.readout);
    for (const variable of found.slice(0, NUM_LISTED)) {
      const row = element("tr", undefined, table);
      swatch(kindOf(variable), element("td", undefined, row));
      element("td", nameOf(variable), row);
      element("td", kindOf(variable).replace("_", " "), row);
      element("td", bytes(data.vars.n[variable]), row);
    }
    if (found.length > NUM_LISTED) element("div", "and " + (found.length - NUM_LISTED) + " smaller ones", chart.readout);
  },
};

// -- schedule

const LANES = [["ops", "op"], ["waits", "stall"], ["loads", "load"], ["evictions", "evict"]];
const RECOMPUTED = ["run again", "optimizer_state"];

function lanes() {
  return data.reruns.op.length ? [...LANES, RECOMPUTED] : LANES;
}

function laneItems(lane) {
  if (lane === 0) return {a: data.ops.a, b: data.ops.b, all: null};
  if (lane === 1) return {a: data.waits.a, b: data.waits.b, all: null};
  if (lane === 4) return {a: data.reruns.a, b: data.reruns.b, all: null};
  const letter = lane === 2 ? "l" : "e", all = [];
  for (let i = 0; i < data.moves.v.length; i++) if (data.moves.k[i] === letter) all.push(i);
  return {a: data.moves.a, b: data.moves.b, all};
}

const schedule = {
  zooms: true,
  shown: hasStep,
  legend: () => lanes().map(([text, colour]) => [colour, text]),
  limits: () => ({...stepRange(), y: [lanes().length, 0], yMarks: lanes().map(([text], i) => [i + 0.5, text])}),
  draw(chart) {
    const pen = chart.pen;
    lanes().forEach(([, colour], lane) => {
      const {a, b, all} = laneItems(lane), top = chart.y(lane) + 4, height = chart.y(lane + 1) - chart.y(lane) - 8;
      pen.fillStyle = colours[colour];
      const count = all ? all.length : a.length, wide = range[1] - range[0];
      for (let k = 0; k < count; k++) {
        const i = all ? all[k] : k;
        if (b[i] < range[0] || a[i] > range[1]) continue;
        const x = chart.x(a[i]), width = chart.x(b[i]) - x;
        box(pen, x, top, width - (width > 3 ? 0.6 : 0), height);
        if (lane === 0 && width > 46 && wide) {
          pen.save();
          pen.beginPath();
          pen.rect(x, top, width - 2, height);
          pen.clip();
          pen.fillStyle = colours.ground;
          pen.textAlign = "left";
          pen.fillText(data.names[data.ops.name[i]].replace(/^aten\./, ""), x + 3, top + height / 2 + 4);
          pen.restore();
          pen.fillStyle = colours[colour];
        }
      }
    });
  },
  point(chart, t, level) {
    const lane = clamp(Math.floor(level), 0, lanes().length - 1), {a, b, all} = laneItems(lane);
    const slack = (range[1] - range[0]) * 2 / chart.width;
    const hits = (all || a.map((_, i) => i)).filter((i) => a[i] - slack <= t && t <= b[i] + slack).slice(0, 4);
    if (!hits.length) element("div", time(t) + ": nothing here", chart.readout);
    for (const i of hits) {
      const length = time(b[i] - a[i]);
      let text = lane === 0 ? opName(i) + ", " + length : "";
      if (lane === 1) {
        const move = data.waits.m[i];
        text = opName(data.waits.op[i]) + " waits " + length + " for the " +
          (data.moves.k[move] === "l" ? "load" : "eviction") + " of " + nameOf(data.moves.v[move]);
      }
      if (lane === 4) text = "ops run again before " + opName(data.reruns.op[i]) + ", " + length;
      if (lane === 2 || lane === 3) text = (lane === 2 ? "load " : "evict ") + nameOf(data.moves.v[i]) + ", " + bytes(data.moves.n[i]) +
        " in " + length;
      element("div", time(a[i]) + ": " + text, chart.readout);
    }
  },
};

// -- chunk map

function spanAt(t, chunk) {
  for (let i = data.spans.v.length - 1; i >= 0; i--) {
    if (t < data.spans.a[i] || t >= data.spans.b[i]) continue;
    const runs = data.spans.c[i];
    for (let k = 0; k < runs.length; k += 2) if (chunk >= runs[k] && chunk < runs[k] + runs[k + 1]) return i;
  }
  return -1;
}

const chunks = {
  zooms: true,
  shown: hasPlan,
  legend: () => KINDS.filter((kind) => data.spans.v.some((v) => kindOf(v) === kind))
    .map((kind) => [kind, kind.replace("_", " ")]),
  limits: () => ({...stepRange(), y: [data.chunks, 0], yMarks: marks(data.chunks, (n) => "# " + n)}),
  draw(chart) {
    const pen = chart.pen, {a, b, v, c} = data.spans;
    const chosen = chart.at ? spanAt(chart.valueAt(chart.at.x), Math.floor(chart.levelAt(chart.at.y))) : -1;
    for (let i = 0; i < v.length; i++) {
      if (b[i] < range[0] || a[i] > range[1]) continue;
      pen.fillStyle = colours[kindOf(v[i])];
      pen.globalAlpha = chosen < 0 || v[i] === v[chosen] ? 1 : overlap(c[i], c[chosen]) ? 0.55 : 0.18;
      const x = chart.x(a[i]), width = chart.x(b[i]) - x;
      for (let k = 0; k < c[i].length; k += 2) {
        const top = chart.y(c[i][k]), height = chart.y(c[i][k] + c[i][k + 1]) - top;
        box(pen, x, top, width - (width > 3 ? 0.5 : 0), height - (height > 3 ? 0.5 : 0));
      }
    }
    pen.globalAlpha = 1;
  },
  point(chart, t, level) {
    const chunk = Math.floor(level), i = spanAt(t, chunk);
    if (i < 0) {
      element("div", "chunk " + chunk + " is free at " + time(t), chart.readout);
      return;
    }
    const {a, b, v, c, how} = data.spans;
    let text = "chunk " + chunk + " at " + time(t) + ": " + nameOf(v[i]) + ", " + bytes(data.vars.n[v[i]]) + ", here from " +
      time(a[i]) + " to " + time(b[i]);
    if (how[i] >= 0) text += " (" + data.names[how[i]] + ")";
    element("div", text, chart.readout);
    const turns = [];
    for (let k = 0; k < v.length; k++)
      if (k !== i && overlap(c[k], [chunk, 1]) && !turns.includes(v[k])) turns.push(v[k]);
    const listed = turns.slice(0, 6).map(nameOf).join(", ") + (turns.length > 6 ? " and " + (turns.length - 6) + " more" : "");
    element("div", turns.length ? "The same chunk is mapped for " + listed + "." : "Nobody else uses this chunk.",
            chart.readout);
  },
};

function overlap(one, other) {
  for (let i = 0; i < one.length; i += 2)
    for (let k = 0; k < other.length; k += 2)
      if (one[i] < other[k] + other[k + 1] && other[k] < one[i] + one[i + 1]) return true;
  return false;
}

// -- plan against reality

const drift = {
  zooms: true,
  shown: () => hasStep() && data.ops.pa.length > 0,
  legend: () => [["resident", "start, behind the plan"], ["stall", "op longer than planned"], ["load", "op shorter"]],
  limits() {
    const {a, b, pa, pb} = data.ops;
    let low = 0, high = 1;
    for (let i = 0; i < a.length; i++) {
      const late = a[i] - pa[i], longer = b[i] - a[i] - (pb[i] - pa[i]);
      low = Math.min(low, late, longer);
      high = Math.max(high, late, longer);
    }
    const yMarks = ticks(low, high, 5).map((value) => [value, time(value)]);
    return {...stepRange(), y: [low * 1.05, high * 1.05], yMarks};
  },
  draw(chart) {
    const pen = chart.pen, {a, b, pa, pb} = data.ops, zero = chart.y(0);
    for (let i = 0; i < a.length; i++) {
      if (b[i] < range[0] || a[i] > range[1]) continue;
      const longer = b[i] - a[i] - (pb[i] - pa[i]), top = chart.y(longer);
      pen.fillStyle = colours[longer > 0 ? "stall" : "load"];
      box(pen, chart.x(a[i]), Math.min(top, zero), chart.x(b[i]) - chart.x(a[i]), Math.abs(zero - top));
    }
    pen.strokeStyle = colours.resident;
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (let i = 0; i < a.length; i++) pen.lineTo(chart.x(a[i]), chart.y(a[i] - pa[i]));
    pen.stroke();
  },
  point(chart, t) {
    const i = last(data.ops.a, t);
    if (i < 0) {
      element("div", time(t) + ": before the first op", chart.readout);
      return;
    }
    const {a, b, pa, pb} = data.ops;
    element("div", opName(i) + ": took " + time(b[i] - a[i]) + ", planned " + time(pb[i] - pa[i]) + "; started " +
      time(Math.abs(a[i] - pa[i])) + (a[i] >= pa[i] ? " behind" : " ahead of") + " the plan", chart.readout);
  },
};

// -- steps

// A first step that compiles or warms up may take a hundred times as long as all others: such bars are cut off, and
// say how long they are.
const TALL = 4;

function stepHeight() {
  const sorted = [...data.steps.s].sort((one, other) => one - other);
  const typical = sorted[Math.floor((sorted.length - 1) / 2)] || 1e-9, longest = sorted[sorted.length - 1] || 1e-9;
  if (longest <= TALL * typical) return 1.05 * longest;
  return 1.15 * sorted.reduce((high, value) => value <= TALL * typical ? Math.max(high, value) : high, typical);
}

function cutOff() {
  const high = stepHeight();
  return data.steps.s.map((value, i) => [value, i]).filter(([value]) => value > high);
}

function cutOffText() {
  const cut = cutOff(), {first} = data.steps;
  if (!cut.length) return [];
  const listed = cut.slice(0, 3).map(([value, i]) => "step " + (first + i + 1) + ", " + time(value * 1e9)).join("; ");
  return [["quiet", "cut off: " + listed + (cut.length > 3 ? " and " + (cut.length - 3) + " more" : "")]];
}

const steps = {
  zooms: false,
  shown: () => data.steps.s.length > 0,
  legend: () => [...Object.entries(MODES).filter(([letter]) => data.steps.mode.includes(letter))
    .map(([, [text, colour]]) => [colour, text]), ["text", "stall"], ...cutOffText()],
  limits() {
    const {s, first} = data.steps, high = stepHeight();
    return {x: [first + 0.5, first + s.length + 0.5], xText: (n) => Number.isInteger(n) ? String(n) : "", y: [0, high],
            yMarks: marks(high, (n) => time(n * 1e9))};
  },
  draw(chart) {
    const pen = chart.pen, {s, stall, mode, first} = data.steps, zero = chart.y(0), high = chart.limits.y[1];
    for (let i = 0; i < s.length; i++) {
      const x = chart.x(first + i + 0.5), width = chart.x(first + i + 1.5) - x, gap = width > 3 ? 1 : 0;
      const top = chart.y(Math.min(s[i], high)), dark = chart.y(Math.min(stall[i], high));
      pen.fillStyle = colours[MODES[mode[i]][1]];
      box(pen, x, top, width - gap, zero - top);
      pen.fillStyle = colours.text;
      if (stall[i] > 0) box(pen, x, dark, width - gap, zero - dark);
      if (s[i] > high) {
        pen.fillStyle = colours.panel;
        box(pen, x, top + 9, width - gap, 3);
        box(pen, x, top + 15, width - gap, 3);
      }
    }
  },
  point(chart, at) {
    const {s, stall, mode, moved, first} = data.steps, i = clamp(Math.round(at - first) - 1, 0, s.length - 1);
    element("div", "step " + (first + i + 1) + ", " + MODES[mode[i]][0] + ": " + time(s[i] * 1e9) + ", stall " +
      time(stall[i] * 1e9) + ", moved " + bytes(moved[i]), chart.readout);
  },
};

// -- the page

const charts = [new Chart("steps", 130, steps), new Chart("memory", 240, memory), new Chart("schedule", 170, schedule),
                new Chart("chunks", 300, chunks), new Chart("drift", 170, drift)];

function zoomTo(low, high) {
  const whole = data.duration || 1, least = Math.min(1000, whole);
  low = clamp(low, 0, whole - least);
  range = [low, clamp(high, low + least, whole)];
  $("range").textContent = time(range[0]) + " to " + time(range[1]);
  charts.forEach((chart) => chart.refresh());
}

function zoomBy(how) {
  const wide = range[1] - range[0], middle = (range[0] + range[1]) / 2, whole = data.duration;
  const half = {in: wide / 4, out: wide}[how];
  if (how === "all") zoomTo(0, whole);
  else if (half) zoomTo(middle - half, middle + half);
  else {
    const shift = clamp(how === "left" ? -wide / 3 : wide / 3, -range[0], whole - range[1]);
    zoomTo(range[0] + shift, range[1] + shift);
  }
}

function showDocument(index) {
  current = index;
  data = documents[index];
  document.querySelectorAll("[data-document]").forEach((button) =>
    button.setAttribute("aria-pressed", String(Number(button.dataset.document) === current)));
  document.querySelectorAll(".drawn").forEach((place) => {
    place.textContent = documents.length > 1 ? ": " + data.name : "";
  });
  document.querySelector(".zoom").hidden = !hasStep();
  range = [0, data.duration || 1];
  $("range").textContent = time(range[0]) + " to " + time(range[1]);
  charts.forEach((chart) => { chart.at = null; chart.show(); });
}

document.querySelectorAll("[data-zoom]").forEach((button) =>
  button.addEventListener("click", () => zoomBy(button.dataset.zoom)));
document.querySelectorAll("[data-document]").forEach((button) =>
  button.addEventListener("click", () => showDocument(Number(button.dataset.document))));
const dark = window.matchMedia ? window.matchMedia("(prefers-color-scheme: dark)") : null;
if (dark && dark.addEventListener)
  dark.addEventListener("change", () => { readColours(); charts.forEach((chart) => chart.show()); });
window.addEventListener("resize", () => charts.forEach((chart) => chart.refresh()));
readColours();
showDocument(0);
document.documentElement.dataset.ready = "true";
