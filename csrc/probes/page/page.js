
// Fills the page with what its data is of: memory over time, two runs, or an out-of-memory error.
const data = JSON.parse(document.getElementById("data").textContent);
const timelines = (data.timelines ?? []).map(decoded);

const plural = (count, word) => `${count.toLocaleString("en-US")} ${word}${count === 1 ? "" : "s"}`;
const signed = bytes => (bytes > 0 ? "+" : "") + bytesText(bytes);
const bold = text => made("b", {}, text);
const code = text => made("code", {}, text);
const keyOf = ({category}) => category ? [made("span", {class: `key ${category}`}, category)] : [];
const paragraph = (parent, ...children) => element(parent, "p", {}, ...children);
const note = (parent, ...children) => element(parent, "p", {class: "note"}, ...children);
const momentText = ({step, phase, time_us}) => `step ${step}, ${phase}, ${timeText(time_us)}`;

/// Each column is a title, a class and what a row's cell has.
function addTable(parent, title, columns, rows) {
  if (title) element(parent, "h3", {}, title);
  const table = element(parent, "table");
  if (columns.some(([name]) => name)) {
    const head = element(table, "tr");
    for (const [name, style] of columns) element(head, "th", {class: style}, name);
  }
  for (const row of rows) {
    const line = element(table, "tr");
    for (const [, style, cell] of columns) element(line, "td", {class: style}, ...cell(row));
  }
}
const bytesColumn = (name, bytesOf) => [name, "n", row => [bytesText(bytesOf(row))]];
const barColumn = (most, bytesOf) => ["", "bar", row => {
  const percent = most > 0 ? Math.max(0, Math.min(100, 100 * bytesOf(row) / most)) : 0;
  return [made("i", {class: row.category ?? "", style: `width:${percent.toFixed(1)}%`})];
}];

function addSources(parent, sources) {
  const lines = sources.map(({file, origin}) =>
    made("p", {class: "note"}, ...(file ? [code(file), ": "] : []), origin));
  if (lines.length > 2) {
    lines.unshift(made("summary", {}, plural(lines.length, "recording")));
    element(parent, "details", {}, ...lines);
  } else {
    parent.append(...lines);
  }
}

function addChart(parent, shown, scale = 0) {
  new Chart(element(parent, "div", {class: "chart"}), shown, scale);
}

function addFacts(parent, {peak, events, steps, end_us, lost_events, most_bytes}) {
  paragraph(parent, "Peak ", bold(bytesText(peak.bytes)), ` (${momentText(peak)} after the beginning). `
    + `${plural(events, "event")}, ${plural(steps, "step")}, ${timeText(end_us)}.`);
  if (lost_events > 0) {
    note(parent, `${plural(lost_events, "older event")} made room for newer ones: the page begins behind them, with what `
      + "was in use then. ", code("record(ring_bytes=...)"), " keeps more.");
  }
  if (most_bytes > peak.bytes) {
    note(parent, `More was in use before the first event here: ${bytesText(most_bytes)}.`);
  }
  if (events + steps === 0) note(parent, "Nothing was allocated or freed while this was recorded.");
}

function addPeak(parent, {bytes, categories, lines, more_lines, more_bytes, before_bytes}) {
  const bytesOf = row => row.bytes;
  const bar = barColumn(bytes, bytesOf);
  addTable(parent, "At the peak, by category",
    [bytesColumn("", bytesOf), bar, ["", "", keyOf]], categories);
  const place = ({line, module, text}) =>
    text ? [text] : module ? [code(line), " in ", code(module)] : [code(line)];
  const rest = [
    {bytes: more_bytes, category: "", text: plural(more_lines, "more line")},
    {bytes: before_bytes, category: "", text: "from before tracking began: no line is known"},
  ].filter(row => row.bytes !== 0);
  addTable(parent, "At the peak, by line", [
    bytesColumn("in use", bytesOf), bar, ["category", "", keyOf],
    ["blocks", "n", ({blocks}) => [blocks ?? ""]], ["line", "", place],
  ], [...lines, ...rest]);
}

/// Of all ranks: the chart of their totals, and their peaks.
function addRanks(parent) {
  addChart(parent, timelines);
  const rows = timelines.map(({name, peak}) =>
    ({name, peak, category: peak.categories[0]?.category ?? "other"}));
  rows.sort((a, b) => b.peak.bytes - a.peak.bytes);
  const bytesOf = ({peak}) => peak.bytes;
  addTable(parent, "", [
    bytesColumn("peak", bytesOf), barColumn(bytesOf(rows[0]), bytesOf), ["of", "", ({name}) => [name]],
    ["when", "", ({peak}) => [momentText(peak)]], ["mostly", "", keyOf],
  ], rows);
}

function showMemory(parent) {
  addSources(parent, data.sources);
  if (timelines.length === 0) note(parent, "There is no device in this recording.");
  if (timelines.length > 1) addRanks(parent);
  const highest = Math.max(...timelines.map(({peak}) => peak.bytes));
  const first = timelines.findIndex(({peak}) => peak.bytes === highest);
  timelines.forEach((timeline, k) => {
    let place = parent;
    if (timelines.length > 1) {
      place = element(parent, "details", k === first ? {open: ""} : {}, made("summary", {}, timeline.name));
    }
    addFacts(place, timeline);
    addChart(place, [timeline]);
    addPeak(place, timeline.peak);
  });
}

function addChanges(parent, title, {rows, more}, what) {
  if (rows.length === 0) {
    element(parent, "h3", {}, title);
    paragraph(parent, "No difference.");
    return;
  }
  const change = ({before, after}) => after - before;
  const size = row => Math.abs(change(row));
  const sign = row => made("span", {class: change(row) > 0 ? "more" : "less"}, signed(change(row)));
  addTable(parent, title, [
    ["difference", "n", row => [sign(row)]], barColumn(size(rows[0]), size),
    bytesColumn("before", row => row.before), bytesColumn("after", row => row.after),
    ["category", "", keyOf], ["", "", what],
  ], rows);
  if (more > 0) paragraph(parent, `And ${plural(more, "smaller one")}.`);
}

function showDifference(parent) {
  addSources(parent, data.sources);
  for (const {device, before, after, categories, lines} of data.devices) {
    element(parent, "h2", {}, device);
    paragraph(parent, "Peak ", bold(bytesText(before)), " before, ", bold(bytesText(after)), " after: ",
      bold(signed(after - before)), ".");
    addChanges(parent, "At the peaks, by category", categories, () => []);
    addChanges(parent, "At the peaks, by line", lines,
      ({line}) => line ? [code(line)] : ["from before tracking began"]);
    for (const timeline of timelines.filter(timeline => timeline.device === device)) {
      element(parent, "h3", {}, timeline.name);
      addChart(parent, [timeline], Math.max(before, after));
    }
  }
}

function showOutOfMemory(parent) {
  const {origin, place, request_bytes, used_bytes, limit_bytes} = data;
  paragraph(parent, `${bytesText(request_bytes)} were asked for at `, code(place), `, ${bytesText(used_bytes)} were in use`
    + (limit_bytes === null ? "." : ` of ${bytesText(limit_bytes)}.`));
  note(parent, code(origin));
  element(parent, "h2", {}, "Causes, the most likely first");
  const list = element(parent, "ol");
  for (const {cause, advice} of data.causes) {
    element(list, "li", {}, `${cause}.`, made("br"), bold("Try:"), ` ${advice}.`);
  }
  const columns = last =>
    [bytesColumn("", row => row.bytes), barColumn(used_bytes, row => row.bytes), ["", "", last]];
  element(parent, "h2", {}, "By category");
  addTable(parent, "", columns(keyOf), data.categories);
  element(parent, "h2", {}, "By line");
  addTable(parent, "", columns(({line, phase, blocks}) =>
    [code(line), ` ${phase}, ${plural(blocks, "tensor")}`]), data.lines);
  element(parent, "h2", {}, "All that is known");
  element(parent, "pre", {}, data.text);
}

document.title = data.title;
const main = document.querySelector("main");
element(main, "h1", {}, data.title);
({memory: showMemory, difference: showDifference, oom: showOutOfMemory})[data.kind](main);
