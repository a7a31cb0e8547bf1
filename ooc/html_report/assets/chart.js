// A chart of a report: a canvas with axes, a legend and a readout, and what the charts share.
// The data is in #data: columns, times in ns, sizes in bytes (charts.py makes it).

const documents = JSON.parse(document.getElementById("data").textContent);
const KINDS = ["parameter", "gradient", "optimizer_state", "buffer", "activation", "temporary", "input", "other"];
const MODES = {l: ["learning", "evict"], p: ["planned", "resident"], o: ["off plan", "stall"]};
const MARGIN = {left: 64, right: 10, top: 8, bottom: 20};
const NUM_LISTED = 14;
let current = 0;              // which document is drawn
let data = documents[0];
let range = [0, 1];           // ns shown, shared by the charts of one step
let colours = {};

// -- small things

const $ = (id) => document.getElementById(id);
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

function bytes(n) {
  const size = Math.abs(n);
  for (const [factor, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (size >= factor) return (n / factor).toFixed(1) + " " + unit;
  return n + " B";
}

function time(ns) {
  const size = Math.abs(ns);
  for (const [factor, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "us"]])
    if (size >= factor) return (ns / factor).toPrecision(3).replace(/e.*/, "") + " " + unit;
  return Math.round(ns) + " ns";
}

// Index of the last entry of a sorted array that is at most x; -1 before the first.
function last(sorted, x) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= x) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function element(tag, text, parent) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function swatch(colour, parent) {
  element("i", "", parent).style.background = colours[colour];
}

function kindOf(variable) {
  const kind = data.names[data.vars.kind[variable]];
  return KINDS.includes(kind) ? kind : "other";
}

function nameOf(variable) {
  const label = data.names[data.vars.label[variable]];
  return "#" + variable + " " + (label || data.names[data.vars.kind[variable]]);
}

function opName(op) {
  const where = data.names[data.ops.where[op]];
  return "op " + op + " " + data.names[data.ops.name[op]] + (where ? " (" + where + ")" : "");
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const wanted = ["ground", "panel", "line", "text", "quiet", "bad", "accent", "live", "resident", "stall", "load",
                  "evict", "op", ...KINDS];
  for (const name of wanted) colours[name] = style.getPropertyValue("--" + name).trim();
}

// -- a chart: a canvas with axes, its own draw and its own readout

class Chart {
  constructor(id, height, own) {
    this.figure = $(id);
    this.canvas = this.figure.querySelector("canvas");
    this.readout = this.figure.querySelector(".readout");
    this.legend = this.figure.querySelector(".legend");
    this.height = height;
    this.own = own;             // {shown(), legend, limits(), draw(chart), point(chart, x, y), zooms}
    this.at = null;             // where the pointer is, in CSS pixels
    this.from = null;           // where a drag began
    this.listen();
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointermove", (event) => { this.at = this.place(event); this.refresh(); });
    canvas.addEventListener("pointerleave", () => { if (!this.from) { this.at = null; this.refresh(); } });
    canvas.addEventListener("pointerdown", (event) => {
      this.at = this.from = this.place(event);
      if (canvas.setPointerCapture) canvas.setPointerCapture(event.pointerId);
      this.refresh();
    });
    canvas.addEventListener("pointerup", (event) => {
      const to = this.place(event), from = this.from;
      this.from = null;
      if (from && this.own.zooms && Math.abs(to.x - from.x) > 12)
        zoomTo(this.valueAt(Math.min(from.x, to.x)), this.valueAt(Math.max(from.x, to.x)));
      this.refresh();
    });
    canvas.addEventListener("pointercancel", () => { this.from = null; });
    canvas.addEventListener("dblclick", () => { if (this.own.zooms) zoomTo(0, data.duration); });
    canvas.addEventListener("keydown", (event) => {
      const step = {ArrowLeft: -8, ArrowRight: 8}[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const x = (this.at ? this.at.x : this.width / 2) + step;
      this.at = {x: clamp(x, MARGIN.left, this.width - MARGIN.right), y: this.at ? this.at.y : this.height / 2};
      this.refresh();
    });
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return {x: event.clientX - box.left, y: event.clientY - box.top};
  }

  refresh() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }

  x(value) {
    const [low, high] = this.limits.x;
    return MARGIN.left + (value - low) / (high - low || 1) * (this.width - MARGIN.left - MARGIN.right);
  }

  y(value) {
    const [low, high] = this.limits.y;
    return this.height - MARGIN.bottom - (value - low) / (high - low || 1) * (this.height - MARGIN.top - MARGIN.bottom);
  }

  valueAt(x) {
    const [low, high] = this.limits.x;
    return low + (x - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right) * (high - low);
  }

  levelAt(y) {
    const [low, high] = this.limits.y;
    return low + (this.height - MARGIN.bottom - y) / (this.height - MARGIN.top - MARGIN.bottom) * (high - low);
  }

  show() {
    const shown = this.own.shown();
    this.figure.hidden = !shown;
    if (!shown) return;
    this.legend.replaceChildren();
    for (const [colour, text] of this.own.legend()) {
      const item = element("span", undefined, this.legend);
      swatch(colour, item);
      item.append(text);
    }
    this.draw();
  }

  draw() {
    if (this.figure.hidden) return;
    const ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth || 600;
    this.canvas.style.height = this.height + "px";
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const pen = this.pen = this.canvas.getContext("2d");
    if (!pen) return;
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    this.limits = this.own.limits(this);
    this.axes();
    pen.save();
    pen.beginPath();
    pen.rect(MARGIN.left, 0, this.width - MARGIN.left - MARGIN.right, this.height);
    pen.clip();
    this.own.draw(this);
    if (this.at && this.at.x >= MARGIN.left) {
      if (this.from && this.own.zooms) {
        pen.globalAlpha = 0.2;
        pen.fillStyle = colours.accent;
        pen.fillRect(this.from.x, 0, this.at.x - this.from.x, this.height - MARGIN.bottom);
        pen.globalAlpha = 1;
      }
      pen.strokeStyle = colours.text;
      pen.lineWidth = 0.5;
      pen.beginPath();
      pen.moveTo(this.at.x, 0);
      pen.lineTo(this.at.x, this.height - MARGIN.bottom);
      pen.stroke();
    }
    pen.restore();
    this.readout.replaceChildren();
    if (this.at && this.at.x >= MARGIN.left) this.own.point(this, this.valueAt(this.at.x), this.levelAt(this.at.y));
  }

  axes() {
    const pen = this.pen, [low, high] = this.limits.x;
    pen.fillStyle = colours.quiet;
    pen.strokeStyle = colours.line;
    pen.lineWidth = 1;
    pen.textAlign = "center";
    for (const value of ticks(low, high, Math.max(2, this.width / 110))) {
      pen.beginPath();
      pen.moveTo(this.x(value), MARGIN.top);
      pen.lineTo(this.x(value), this.height - MARGIN.bottom);
      pen.stroke();
      pen.fillText(this.limits.xText(value), clamp(this.x(value), MARGIN.left, this.width - 24), this.height - 6);
    }
    pen.textAlign = "right";
    for (const [value, text] of this.limits.yMarks) pen.fillText(text, MARGIN.left - 6, this.y(value) + 4);
  }
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) || power;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high && found.length < 50; value += step) found.push(value);
  return found;
}

function marks(high, text) {
  return ticks(0, high, 5).map((value) => [value, text(value)]);
}

function byteMarks(high) {
  const unit = 2 ** (10 * Math.max(0, Math.floor(Math.log2(high || 1) / 10)));
  return ticks(0, high / unit, 5).map((n) => [n * unit, bytes(n * unit)]);
}

const stepRange = () => ({x: range, xText: time});
const hasStep = () => data.ops !== undefined && data.ops.a.length > 0;
const hasPlan = () => hasStep() && data.resident.t.length > 0;

// The other document of a comparison, if it has memory over a step, too.
function rival() {
  const other = documents[1 - current];
  return documents.length > 1 && other.resident && other.resident.t.length ? other : null;
}

function stairs(chart, curve, fill, duration = data.duration) {
  const pen = chart.pen;
  pen.beginPath();
  const first = Math.max(last(curve.t, range[0]), 0);
  pen.moveTo(chart.x(curve.t[first] || 0), chart.y(fill ? 0 : curve.n[first] || 0));
  for (let i = first; i < curve.t.length; i++) {
    const x = chart.x(curve.t[i]);
    if (i > first) pen.lineTo(x, chart.y(curve.n[i - 1]));
    pen.lineTo(x, chart.y(curve.n[i]));
    if (curve.t[i] > range[1]) break;
  }
  pen.lineTo(chart.x(duration), chart.y(curve.n[curve.n.length - 1] || 0));
  if (fill) {
    pen.lineTo(chart.x(duration), chart.y(0));
    pen.fill();
  } else pen.stroke();
}

function box(pen, x, y, width, height) {
  pen.fillRect(x, y, Math.max(width, 0.7), height);
}
