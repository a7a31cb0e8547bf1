// Runs a page's script without a browser: a stub of what it touches of the DOM. Prints one JSON line.
"use strict";
const fs = require("fs");
const vm = require("vm");
const html = fs.readFileSync(process.argv[2], "utf8");
const data = html.match(/<script type="application\/json" id="data">([^]*?)<\/script>/)[1];
const script = html.match(/<script>\n([^]*?)<\/script>/)[1];
const calls = {};
const heights = {};  // of all rectangles drawn, by chart

function pen(id) {
  const target = {};
  return new Proxy(target, {
    get: (_, name) => (name in target ? target[name] : (...values) => {
      if (values.some((value) => typeof value === "number" && !Number.isFinite(value)))
        throw new Error(`${id}: ${String(name)}(${values})`);
      calls[id] = (calls[id] || 0) + 1;
      if (name === "fillRect") (heights[id] ||= []).push(values[3]);
    }),
    set: (_, name, value) => { target[name] = value; return true; },
  });
}

class Stub {
  constructor(id) {
    Object.assign(this, {id, style: {}, dataset: {}, hidden: true, children: [], listeners: {}, clientWidth: 800, text: ""});
  }
  set textContent(text) { this.text = text; }
  get textContent() { return this.text + this.children.map((c) => c.textContent ?? String(c)).join(" "); }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  append(...things) { this.children.push(...things); }
  replaceChildren(...things) { this.children = things; this.text = ""; }
  setAttribute(name, value) { this[name] = value; }
  setPointerCapture() {}
  getBoundingClientRect() { return {left: 0, top: 0}; }
  getContext() { return this.pen || (this.pen = pen(this.id)); }
  querySelector(selector) { return this[selector] || (this[selector] = new Stub(this.id)); }
}

const byId = {};
const one = (id) => byId[id] || (byId[id] = new Stub(id));
one("data").textContent = data;
const buttons = ["in", "out", "left", "right", "all"].map((zoom) => Object.assign(new Stub(zoom), {dataset: {zoom}}));
const frames = [];
vm.runInNewContext(script, {
  document: {
    getElementById: one,
    createElement: () => new Stub("made"),
    querySelector: (selector) => one(selector),
    querySelectorAll: (selector) => (selector === "[data-zoom]" ? buttons : []),
    documentElement: new Stub("root"),
  },
  window: {devicePixelRatio: 2, addEventListener() {}, matchMedia: () => new Stub("media")},
  getComputedStyle: () => ({getPropertyValue: () => " #123456"}),
  requestAnimationFrame: (callback) => frames.push(callback),
});
const settle = () => { while (frames.length) frames.shift()(); };
const shown = ["steps", "memory", "schedule", "chunks", "drift"].filter((id) => !one(id).hidden);
const readouts = {};
for (const id of shown) {
  const canvas = one(id).querySelector("canvas");
  for (const event of [{clientX: 400, clientY: 60}, {clientX: 90, clientY: 100}, {clientX: 700, clientY: 20}]) {
    canvas.listeners.pointermove(event);
    settle();
    (readouts[id] ||= []).push(one(id).querySelector(".readout").textContent);
  }
}
for (const button of buttons) { button.listeners.click(); settle(); }
const legends = {};
for (const id of shown) legends[id] = one(id).querySelector(".legend").textContent;
console.log(JSON.stringify({shown, calls, readouts, legends, heights: {steps: heights.steps}}));
