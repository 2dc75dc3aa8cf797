// Draws the charts. Each timeline has columns: some events in a row, at the moment when the most was in use. A pixel shows
// the largest of its columns, so that no peak is lost however far one zooms out.
const PHASES = ["forward", "backward", "optimizer", "other"];
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const MARGIN = {left: 76, right: 14, top: 26, bottom: 26};

const summed = differences => {
  let value = 0;
  return differences.map(difference => (value += difference));
};

/// A timeline, of the differences that stand in the page.
function decoded(given) {
  const timeline = {...given, time_us: summed(given.time_us), step: summed(given.step)};
  timeline.phase = summed(given.phase);
  for (const way of ["category", "line"]) {
    timeline[way] = given[way].map(series => ({...series, values: summed(series.values)}));
  }
  timeline.used = timeline.time_us.map((_, i) =>
    timeline.category.reduce((sum, series) => sum + series.values[i], 0));
  return timeline;
}

function bytesText(bytes, isShort = false) {
  let unit = 0;
  let size = Math.abs(bytes);
  for (; Math.round(10 * size) >= 10240 && unit + 1 < UNITS.length; ++unit) size /= 1024;
  const digits = unit === 0 || (isShort && Number.isInteger(size)) ? 0 : 1;
  return `${bytes < 0 ? "-" : ""}${size.toFixed(digits)} ${UNITS[unit]}`;
}

function timeText(us, step = 0) {
  const [size, unit] = us >= 1e6 || step >= 1e5 ? [1e6, "s"] : us >= 1e3 ? [1e3, "ms"] : [1, "µs"];
  const digits = step ? Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9)) : 3;
  return `${(us / size).toFixed(Math.min(digits, 6))} ${unit}`;
}

const niceDecimal = (span, count) => {
  const power = 10 ** Math.floor(Math.log10(span / count));
  return [1, 2, 5, 10].map(k => k * power).find(step => span / step <= count);
};
const niceBinary = (span, count) => 2 ** Math.max(0, Math.ceil(Math.log2(span / count)));

/// The last index whose value is at most `value`; 0 where none is.
function lastUpTo(sorted, value) {
  let low = 0;
  let high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (sorted[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}

/// A new element; `children` are texts and elements.
const made = (name, attributes = {}, ...children) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};
const element = (parent, ...what) => parent.appendChild(made(...what));
const shape = (parent, name, attributes, text = "") => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return parent.appendChild(made);
};

/// One pause of more than half of the time leaves no room for what happened: an import, a download.
function isMostlyIdle({time_us, end_us}) {
  return time_us.some((time, i) => i > 0 && time - time_us[i - 1] > end_us / 2);
}

class Chart {
  /// `shown`: the timelines; several are drawn as totals on one clock.
  constructor(place, shown, scale) {
    Object.assign(this, {place, shown, scale, way: "category", axis: "time"});
    this.isStack = shown.length === 1;
    if (this.isStack && isMostlyIdle(shown[0])) this.axis = "event";
    this.addTools();
    this.svg = shape(place, "svg", {});
    this.legend = element(place, "div", {class: "legend"});
    this.tip = element(place, "div", {class: "tip"});
    this.zoomOut();
    this.listen();
    this.fit();
    new ResizeObserver(() => requestAnimationFrame(() => this.fit())).observe(place);
  }

  addTools() {
    const tools = element(this.place, "div", {class: "bar-of-tools"});
    const choice = (key, values) => values.map(value => {
      const button = element(tools, "button", {type: "button"}, `by ${value}`);
      button.onclick = () => {
        this[key] = value;
        if (key === "axis") this.zoomOut();
        this.draw();
      };
      return () => button.setAttribute("aria-pressed", this[key] === value);
    });
    this.pressed = this.isStack
      ? [...choice("way", ["category", "line"]), ...choice("axis", ["time", "event"])] : [];
    const all = element(tools, "button", {type: "button"}, "whole");
    all.onclick = () => {
      this.zoomOut();
      this.draw();
    };
    element(tools, "span", {class: "hint"}, "drag to zoom, double-click for the whole");
  }

  /// Where a timeline's columns begin along the axis.
  begins(timeline) {
    if (this.axis === "event") return timeline.time_us.map((_, i) => i);
    return this.isStack ? timeline.time_us : timeline.time_us.map(t => t + timeline.offset_us);
  }
  zoomOut() {
    this.from = 0;
    this.starts = this.shown.map(timeline => this.begins(timeline));
    this.to = Math.max(1, ...this.shown.map((timeline, k) => this.axis === "event"
      ? this.starts[k].length : timeline.end_us + (this.isStack ? 0 : timeline.offset_us)));
    this.end = this.to;
  }

  /// For each pixel the column to show, -1 before the first.
  pixels(k, width) {
    const starts = this.starts[k];
    const used = this.shown[k].used;
    const chosen = new Int32Array(width);
    let next = lastUpTo(starts, this.from);
    for (let pixel = 0; pixel < width; ++pixel) {
      const end = this.from + (this.to - this.from) * (pixel + 1) / width;
      let best = starts[next] < end ? next : -1;
      while (next + 1 < starts.length && starts[next + 1] < end) {
        ++next;
        if (used[next] > used[best]) best = next;
      }
      chosen[pixel] = best;
    }
    return chosen;
  }

  fit() {
    const width = Math.floor(this.place.clientWidth - MARGIN.left - MARGIN.right);
    if (width < 50 || width === this.width) return;
    this.width = width;
    this.draw();
  }

  draw() {
    const {width} = this;
    this.height = this.svg.clientHeight - MARGIN.top - MARGIN.bottom;
    this.chosen = this.shown.map((_, k) => this.pixels(k, width));
    const most = Math.max(1, ...this.chosen.map((chosen, k) =>
      chosen.reduce((most, i) => Math.max(most, i < 0 ? 0 : this.shown[k].used[i]), 0)));
    this.top = 1.06 * (this.from === 0 && this.to === this.end ? Math.max(most, this.scale) : most);
    this.svg.replaceChildren();
    this.plot = shape(this.svg, "g", {transform: `translate(${MARGIN.left},${MARGIN.top})`});
    this.drawGrid();
    if (this.isStack) this.drawStack();
    else this.drawTotals();
    if (this.isStack) this.drawSteps();
    this.shown.forEach((_, k) => this.drawPeak(k));
    this.cursor = shape(this.plot, "line", {class: "cursor", y1: 0, y2: this.height});
    this.selection = shape(this.plot, "rect", {class: "selection", y: 0, height: this.height});
    this.pressed.forEach(update => update());
    this.drawLegend();
  }

  x(value) { return (value - this.from) / (this.to - this.from) * this.width; }
  y(bytes) { return this.height * (1 - bytes / this.top); }

  drawGrid() {
    const rows = niceBinary(this.top, 6);
    for (let bytes = 0; bytes <= this.top; bytes += rows) {
      const y = Math.round(this.y(bytes));
      shape(this.plot, "line", {class: "grid", x1: 0, x2: this.width, y1: y, y2: y});
      shape(this.plot, "text", {x: -8, y: y + 4, "text-anchor": "end"}, bytesText(bytes, true));
    }
    const step = niceDecimal(this.to - this.from, Math.max(2, this.width / 110));
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      const x = Math.round(this.x(at));
      shape(this.plot, "line", {class: "grid", x1: x, x2: x, y1: this.height, y2: this.height + 5});
      const label = this.axis === "time" ? timeText(at, step) : this.eventText(at);
      const anchor = x > this.width - 30 ? "end" : x < 20 ? "start" : "middle";
      shape(this.plot, "text", {x, y: this.height + 19, "text-anchor": anchor}, label);
    }
  }
  /// Columns have the same number of events each.
  eventText(column) {
    const share = column / this.starts[0].length;
    return `${Math.round(100 * share)} %`;
  }

  /// A run of pixels with the same column is one piece.
  runs(k) {
    const chosen = this.chosen[k];
    const runs = [];
    for (let pixel = 0; pixel < chosen.length; ++pixel) {
      if (pixel === 0 || chosen[pixel] !== chosen[pixel - 1]) runs.push([pixel, chosen[pixel]]);
    }
    return runs.filter(([, column]) => column >= 0);
  }

  drawStack() {
    const [timeline] = this.shown;
    const runs = this.runs(0);
    const below = new Float64Array(timeline.used.length);
    for (const series of timeline[this.way]) {
      const upper = [];
      const lower = [];
      runs.forEach(([pixel, column], k) => {
        const end = k + 1 < runs.length ? runs[k + 1][0] : this.width;
        const bottom = this.y(below[column]).toFixed(2);
        const top = this.y(below[column] + series.values[column]).toFixed(2);
        upper.push(`L${pixel},${top}H${end}`);
        lower.push(`L${end},${bottom}H${pixel}`);
      });
      for (const [, column] of runs) below[column] += series.values[column];
      const outline = upper.join("") + lower.reverse().join("");
      shape(this.plot, "path", {
        class: `area ${series.style}`, "data-name": series.name, d: outline.replace("L", "M") + "Z",
      });
    }
  }

  drawTotals() {
    this.shown.forEach((timeline, k) => {
      const end = Math.min(this.width, this.x(timeline.offset_us + timeline.end_us));
      const line = this.runs(k).filter(([pixel]) => pixel <= end).map(([pixel, column]) =>
        `L${pixel},${this.y(timeline.used[column]).toFixed(2)}H${Math.min(pixel + 1, end)}`);
      if (line.length === 0) return;
      shape(this.plot, "path", {
        class: "total", style: `--c:${this.hue(k)}`, "data-name": timeline.name,
        d: line.join("").replace("L", "M") + `H${end}`,
      });
    });
  }
  hue(k) { return `hsl(${Math.round(210 + 360 * k / this.shown.length) % 360} 65% 48%)`; }

  drawSteps() {
    const {step} = this.shown[0];
    const begins = [0];
    for (let i = 1; i < step.length; ++i) {
      if (step[i] !== step[i - 1]) begins.push(i);
    }
    const seen = begins.filter(i => this.starts[0][i] >= this.from && this.starts[0][i] <= this.to);
    const every = niceDecimal(Math.max(1, seen.length), Math.max(1, this.width / 60));
    let lastLabel = -Infinity;
    let lastLine = -Infinity;
    for (const i of seen) {
      const x = Math.round(this.x(this.starts[0][i]));
      if (x - lastLine < 3) continue;
      lastLine = x;
      shape(this.plot, "line", {class: "step", x1: x, x2: x, y1: -18, y2: this.height});
      const isLate = x > this.width - 54;  // there is room on the line's left alone
      const room = isLate ? 108 : 54;
      if (x - lastLabel < room || step[i] % Math.max(1, Math.round(every)) !== 0) continue;
      lastLabel = x;
      const [at, anchor] = isLate ? [x - 3, "end"] : [x + 3, "start"];
      shape(this.plot, "text", {x: at, y: -8, "text-anchor": anchor}, `step ${step[i]}`);
    }
  }

  drawPeak(k) {
    const {peak, offset_us, used} = this.shown[k];
    const time = this.isStack ? peak.time_us : peak.time_us + offset_us;
    const column = used.indexOf(peak.bytes);
    const at = this.axis === "time" ? time : column + 0.5;
    if (at < this.from || at > this.to) return;
    const x = this.x(at);
    const y = this.y(peak.bytes);
    shape(this.plot, "circle", {class: "peak", cx: x, cy: y, r: 4});
    if (this.shown.length > 1 && peak.bytes < Math.max(...this.shown.map(t => t.peak.bytes))) return;
    const anchor = x > this.width / 2 ? "end" : "start";
    shape(this.plot, "text", {
      class: "peak-text", x: x + (anchor === "end" ? -8 : 8), y: y + 4,
      "text-anchor": anchor,
    }, `peak ${bytesText(peak.bytes)}`);
  }

  drawLegend() {
    this.legend.replaceChildren();
    const entries = this.isStack
      ? [...this.shown[0][this.way]].reverse().map(series => [series.name, series.style, ""])
      : this.shown.slice(0, 16).map((timeline, k) => [timeline.name, "", `--c:${this.hue(k)}`]);
    for (const [name, style, css] of entries) {
      element(this.legend, "span", {class: `key ${style}`, style: css}, name);
    }
  }

  listen() {
    const pixelOf = event =>
      Math.max(0, Math.min(this.width, event.clientX - this.svg.getBoundingClientRect().left - MARGIN.left));
    let pressed = null;
    this.svg.onpointerdown = event => {
      if (event.button === 0) pressed = pixelOf(event);
    };
    this.svg.onpointermove = event => {
      const pixel = pixelOf(event);
      if (pressed === null) {
        this.point(Math.min(Math.floor(pixel), this.width - 1));
        return;
      }
      this.selection.setAttribute("x", Math.min(pressed, pixel));
      this.selection.setAttribute("width", Math.abs(pressed - pixel));
      this.selection.style.visibility = "visible";
    };
    window.addEventListener("pointerup", event => {
      if (pressed === null) return;
      const ends = [pressed, pixelOf(event)].sort((a, b) => a - b);
      pressed = null;
      this.selection.style.visibility = "hidden";
      if (ends[1] - ends[0] > 4) this.zoom(...ends);
    });
    this.svg.onpointerleave = () => {
      this.tip.style.visibility = this.cursor.style.visibility = "hidden";
    };
    this.svg.ondblclick = () => {
      this.zoomOut();
      this.draw();
    };
  }

  zoom(left, right) {
    const at = pixel => this.from + (this.to - this.from) * pixel / this.width;
    const [from, to] = [at(left), at(right)];
    if (to - from < (this.axis === "event" ? 2 : 1)) return;
    Object.assign(this, {from, to});
    this.draw();
  }

  /// What is under the pointer, as text.
  point(pixel) {
    this.cursor.setAttribute("x1", pixel);
    this.cursor.setAttribute("x2", pixel);
    this.cursor.style.visibility = "visible";
    this.tip.replaceChildren();
    if (this.isStack) this.listColumn(this.shown[0], this.chosen[0][pixel]);
    else this.listTotals(pixel);
    const isRight = pixel > this.width / 2;
    this.tip.style.left = isRight ? "" : `${MARGIN.left + pixel + 14}px`;
    this.tip.style.right = isRight ? `${this.width - pixel + MARGIN.right + 14}px` : "";
    this.tip.style.top = `${this.svg.offsetTop + MARGIN.top}px`;
    this.tip.style.visibility = "visible";
  }
  listColumn(timeline, column) {
    if (column < 0) return;
    const when = `${timeText(timeline.time_us[column])}, step ${timeline.step[column]}, `
      + PHASES[timeline.phase[column]];
    element(this.tip, "div", {}, when);
    this.listRows([["in use", timeline.used[column], "", ""],
      ...[...timeline[this.way]].reverse().filter(series => series.values[column] !== 0)
        .map(series => [series.name, series.values[column], series.style, ""])]);
  }
  listTotals(pixel) {
    const time = this.from + (this.to - this.from) * pixel / this.width;
    element(this.tip, "div", {}, timeText(time));
    const rows = this.shown.map((timeline, k) =>
      [timeline.name, timeline.used[this.chosen[k][pixel]] ?? 0, "", `--c:${this.hue(k)}`]);
    this.listRows(rows.sort((a, b) => b[1] - a[1]).slice(0, 12));
  }
  listRows(rows) {
    const table = element(this.tip, "table");
    for (const [name, bytes, style, css] of rows) {
      const row = element(table, "tr");
      element(row, "td", {class: "n"}, bytesText(bytes));
      const cell = element(row, "td");
      element(cell, "span", style || css ? {class: `key ${style}`, style: css} : {}, name);
    }
  }
}
