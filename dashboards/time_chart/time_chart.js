// Charts over one time axis: panels of lines with a band of peers, or a grid of small ones. One crosshair for all.
// A line breaks where values are further apart than GAP_STEPS of its usual steps. Names are set as text, never as markup.
const GAP_STEPS = 3;
const PAD = { left: 52, right: 10, top: 16, bottom: 20 };
const EDGE = 6; // px; a shorter drag is a click

function decode(text) {
  if (!text) return null;
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Float32Array(bytes.buffer);
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// --- numbers and times ---------------------------------------------------------------------------------------------

export function shown(value, unit) {
  if (!Number.isFinite(value)) return "–";
  const tail = unit ? ` ${unit}` : "";
  for (const [scale, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]])
    if (Math.abs(value) >= scale) return `${Number((value / scale).toPrecision(3))} ${prefix}${unit}`;
  if (Number.isInteger(value)) return value.toLocaleString("en-GB") + tail;
  if (Math.abs(value) >= 100) return Math.round(value).toLocaleString("en-GB") + tail;
  return (Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3)))) + tail;
}

const two = (n) => String(n).padStart(2, "0");
let ahead = 0; // ms that the viewer's zone is ahead of UTC; 0: times are UTC
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

function clock(ms, seconds) {
  const d = new Date(ms + ahead);
  return `${two(d.getUTCHours())}:${two(d.getUTCMinutes())}${seconds ? `:${two(d.getUTCSeconds())}` : ""}${ahead ? "" : "Z"}`;
}

const day = (ms) => `${new Date(ms + ahead).getUTCDate()} ${MONTHS[new Date(ms + ahead).getUTCMonth()]}`;

const STEPS = [60, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000].map((s) => s * 1000);

function timeTicks(start, end, width) {
  const most = Math.max(2, Math.floor(width / 85));
  const step = STEPS.find((s) => (end - start) / s <= most) ?? STEPS.at(-1) * Math.ceil((end - start) / STEPS.at(-1) / most);
  const ticks = [];
  for (let t = Math.ceil((start + ahead) / step) * step - ahead; t <= end; t += step)
    ticks.push({ at: t, text: step >= 86400000 || (t + ahead) % 86400000 === 0 ? day(t) : clock(t) });
  return ticks;
}

function valueTicks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const ticks = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) ticks.push(Math.abs(v) < step * 1e-6 ? 0 : v);
  return ticks;
}

// --- series --------------------------------------------------------------------------------------------------------

function series(packed, panel) {
  const values = decode(packed.values), known = [];
  for (let i = 0; i < values.length; i++) if (Number.isFinite(values[i])) known.push(i);
  const steps = [];
  for (let k = 1; k < known.length; k++) steps.push(known[k] - known[k - 1]);
  steps.sort((a, b) => a - b);
  const usual = steps.length ? steps[(steps.length - 1) >> 1] : 1;
  return { ...packed, values, known, gap: GAP_STEPS * usual, low: decode(packed.low), high: decode(packed.high), panel };
}

function unpack(panel) {
  const lines = panel.lines.map((line) => series(line, panel));
  const band = panel.band && { ...series({ values: panel.band.median }, panel), low: decode(panel.band.low), high: decode(panel.band.high) };
  return { ...panel, lines, band };
}

// the middle of a point; the last one may be partial, as it ends with the chart
const timeOf = (panel, i) => panel.start + (i * panel.step + Math.min((i + 1) * panel.step, panel.end - panel.start)) / 2;

function nearest(line, panel, time) {
  const at = Math.floor((time - panel.start) / panel.step);
  for (let d = 0; d < line.gap; d++)
    for (const i of [at - d, at + d]) if (i >= 0 && i < line.values.length && Number.isFinite(line.values[i])) return i;
  return -1;
}

function range(panel, hidden) {
  let low = Infinity, high = -Infinity;
  const see = (array) => { if (array) for (const v of array) if (Number.isFinite(v)) { if (v < low) low = v; if (v > high) high = v; } };
  for (const line of panel.lines) if (!hidden.has(line.name)) { see(line.values); see(line.low); see(line.high); }
  if (panel.band) { see(panel.band.low); see(panel.band.high); see(panel.band.values); }
  if (!Number.isFinite(low)) return [0, 1];
  if (panel.states.length) return [-0.2, Math.max(1, panel.states.length - 1) + 0.2];
  if (low >= 0 && low < 0.4 * high) low = 0;
  const margin = (high - low || Math.abs(high) * 0.1 || 1) * 0.06;
  return [low === 0 ? 0 : low - margin, high + margin];
}

// --- drawing -------------------------------------------------------------------------------------------------------

function palette(root) {
  // light-dark() is resolved by the browser for a real property only
  const probe = element("i");
  root.append(probe);
  const one = (name) => { probe.style.color = `var(--fp-${name})`; return getComputedStyle(probe).color; };
  const names = ["ink", "muted", "line", "ground", "band", "median", "device", "accent", "critical", "degraded", "watch", "no-data"];
  const found = Object.fromEntries(names.map((n) => [n, one(n)]));
  found.series = Array.from({ length: 8 }, (_, i) => one(`series-${i}`));
  probe.remove();
  return found;
}

const colourOf = (line, colours) => (line.own ? colours.device : colours.series[line.colour]);

function runs(line, each) {
  let from = 0;
  for (let k = 1; k <= line.known.length; k++)
    if (k === line.known.length || line.known[k] - line.known[k - 1] > line.gap) { each(line.known.slice(from, k)); from = k; }
}

function drawLine(g, line, panel, x, y, colour, width, dash = []) {
  g.strokeStyle = g.fillStyle = colour;
  g.lineWidth = width;
  g.setLineDash(dash);
  const stepped = panel.states.length > 0;
  runs(line, (found) => {
    g.beginPath();
    let before = null;
    for (const i of found) {
      const px = x(timeOf(panel, i)), py = y(line.values[i]);
      if (before === null) g.moveTo(px, py);
      else { if (stepped) g.lineTo(px, before); g.lineTo(px, py); }
      before = py;
    }
    if (found.length === 1) { g.arc(x(timeOf(panel, found[0])), before, width, 0, 7); g.fill(); } else g.stroke();
  });
  g.setLineDash([]);
}

function drawArea(g, line, low, high, panel, x, y, colour, alpha) {
  g.fillStyle = colour;
  g.globalAlpha = alpha;
  runs(line, (found) => {
    g.beginPath();
    for (const i of found) g.lineTo(x(timeOf(panel, i)), y(high[i]));
    for (const i of found.toReversed()) g.lineTo(x(timeOf(panel, i)), y(low[i]));
    g.fill();
  });
  g.globalAlpha = 1;
}

function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  g.font = '12px "Source Sans", "Source Sans Pro", sans-serif';
  return [g, width];
}

function axes(g, view, panel, x, y, low, high, width, height) {
  const { colours, data } = view;
  g.strokeStyle = colours.line;
  g.lineWidth = 1;
  g.fillStyle = colours.muted;
  g.textAlign = "right";
  g.textBaseline = "middle";
  const ticks = panel.states.length ? panel.states.map((_, i) => i) : valueTicks(low, high, Math.max(3, Math.floor((height - 36) / 26)));
  for (const v of ticks) {
    g.beginPath(); g.moveTo(PAD.left, y(v)); g.lineTo(width - PAD.right, y(v)); g.stroke();
    const text = panel.states.length ? panel.states[v] : shown(v, "");
    g.fillText(text.length > 8 ? `${text.slice(0, 7)}…` : text, PAD.left - 5, y(v));
  }
  g.textAlign = "center";
  g.textBaseline = "top";
  const times = timeTicks(data.start, data.end, width - PAD.left).filter((tick) => x(tick.at) > PAD.left + 14 && x(tick.at) < width - 24);
  // of another day than today: the first time has its date
  times.forEach((tick, i) => g.fillText(data.dated && !i && tick.text !== day(tick.at) ? `${day(tick.at)} ${tick.text}` : tick.text, x(tick.at), height - PAD.bottom + 5));
}

function drawMarks(g, view, x, width, height) {
  for (const mark of view.data.marks) {
    const tone = view.colours[mark.tone] ?? view.colours.muted;
    const from = Math.max(PAD.left, x(mark.time)), to = Math.min(width - PAD.right, x(mark.end ?? mark.time));
    if (to < PAD.left || from > width - PAD.right) continue;
    g.fillStyle = g.strokeStyle = tone;
    if (mark.end) { g.globalAlpha = 0.1; g.fillRect(from, PAD.top, to - from, height - PAD.top - PAD.bottom); g.globalAlpha = 1; g.fillRect(from, PAD.top - 5, Math.max(2, to - from), 3); }
    if (mark.time >= view.data.start) {
      g.lineWidth = 1; g.setLineDash([2, 3]); g.beginPath(); g.moveTo(from, PAD.top - 5); g.lineTo(from, height - PAD.bottom); g.stroke(); g.setLineDash([]);
      g.beginPath(); g.moveTo(from - 4, 3); g.lineTo(from + 4, 3); g.lineTo(from, 10); g.fill();
    }
  }
}

function drawPanel(view, place) {
  const { panel, canvas } = place, { colours, data } = view, height = panel.height;
  const [g, width] = prepare(canvas, height);
  if (!width) return;
  const [low, high] = range(panel, view.hidden);
  const x = (t) => PAD.left + ((t - data.start) / (data.end - data.start)) * (width - PAD.left - PAD.right);
  const y = (v) => height - PAD.bottom - ((v - low) / (high - low)) * (height - PAD.top - PAD.bottom);
  place.x = x;
  place.width = width;
  axes(g, view, panel, x, y, low, high, width, height);
  g.save();
  g.beginPath(); g.rect(PAD.left, 0, width - PAD.left - PAD.right, height - PAD.bottom + 2); g.clip();
  if (panel.band) {
    if (panel.band_drawn) drawArea(g, panel.band, panel.band.low, panel.band.high, panel, x, y, colours.band, 0.38);
    drawLine(g, panel.band, panel, x, y, colours.median, 1.5, [5, 3]);
  }
  for (const line of panel.lines) {
    if (view.hidden.has(line.name)) continue;
    const colour = colourOf(line, colours);
    if (line.low && line.high) drawArea(g, line, line.low, line.high, panel, x, y, colour, 0.16);
    drawLine(g, line, panel, x, y, colour, line.own ? 2.4 : 1.6, line.own ? [] : view.data.dashes[line.dash]);
  }
  drawMarks(g, view, x, width, height);
  g.restore();
  if (view.brush) {
    const [a, b] = view.brush.map(x).sort((p, q) => p - q);
    g.fillStyle = colours.accent; g.globalAlpha = 0.2; g.fillRect(a, PAD.top, b - a, height - PAD.top - PAD.bottom); g.globalAlpha = 1;
  }
  if (view.cursor !== null) {
    g.strokeStyle = colours.ink; g.lineWidth = 1; g.beginPath(); g.moveTo(x(view.cursor), PAD.top - 4); g.lineTo(x(view.cursor), height - PAD.bottom); g.stroke();
    for (const line of panel.lines) {
      const i = view.hidden.has(line.name) ? -1 : nearest(line, panel, view.cursor);
      if (i < 0) continue;
      g.fillStyle = colourOf(line, colours); g.beginPath(); g.arc(x(timeOf(panel, i)), y(line.values[i]), 3.5, 0, 7); g.fill();
    }
  }
}

// --- values at the crosshair ---------------------------------------------------------------------------------------

function textAt(panel, line, view) {
  const i = view.cursor === null ? line.known.at(-1) ?? -1 : nearest(line, panel, view.cursor);
  if (i < 0) return "no data";
  return panel.states.length ? panel.states[Math.round(line.values[i])] ?? String(line.values[i]) : shown(line.values[i], panel.unit);
}

function bandAt(panel, view) {
  const i = view.cursor === null ? panel.band.known.at(-1) ?? -1 : nearest(panel.band, panel, view.cursor);
  if (i < 0) return "no data";
  const middle = shown(panel.band.values[i], panel.unit);
  return panel.band_drawn ? `${middle} (${shown(panel.band.low[i], "")} to ${shown(panel.band.high[i], "")})` : middle;
}

function write(view) {
  for (const place of view.places) {
    for (const [line, label] of place.labels ?? []) label.textContent = `${line.name} ${textAt(place.panel, line, view)}`;
    if (place.bandLabel) place.bandLabel.textContent = `${place.panel.peers} ${bandAt(place.panel, view)}`;
  }
  const near = view.cursor === null ? [] : view.data.marks.filter((m) => Math.abs(m.time - view.cursor) < (view.data.end - view.data.start) / 120 || (m.end && m.time <= view.cursor && view.cursor <= m.end));
  const line = view.line;
  if (!line) return;
  if (view.cursor === null) { line.textContent = view.data.hint; return; }
  line.replaceChildren(element("b", "", `${day(view.cursor)} ${clock(view.cursor, true)}`));
  for (const mark of near.slice(0, 3)) {
    line.append(" · ");
    const item = element(mark.href ? "a" : "span", "", mark.text);
    if (mark.href) { item.href = mark.href; item.target = "_self"; }
    line.append(item);
  }
  if (near.length > 3) line.append(` · and ${near.length - 3} more`);
}

// --- input ---------------------------------------------------------------------------------------------------------

function setCursor(view, time, tell = true) {
  view.cursor = time;
  redraw(view);
  if (tell) window.dispatchEvent(new CustomEvent("fleetpulse-crosshair", { detail: { time, from: view.root } }));
}

function redraw(view) {
  if (view.waiting) return;
  view.waiting = requestAnimationFrame(() => {
    view.waiting = 0;
    for (const place of view.places) (place.cell ? drawCell : drawPanel)(view, place);
    write(view);
  });
}

// ends a drag, during which the charts are not built again: that would end it without a range
function settle(view) {
  view.dragging = false;
  const waiting = view.root.fleetpulseNext;
  view.root.fleetpulseNext = null;
  if (waiting) waiting();
  else redraw(view);
}

function listen(view, place, zoom) {
  const { canvas } = place, { data } = view;
  const timeAt = (event) => {
    const box = canvas.getBoundingClientRect(), share = (event.clientX - box.left - PAD.left) / (box.width - PAD.left - PAD.right);
    return data.start + Math.min(1, Math.max(0, share)) * (data.end - data.start);
  };
  let down = null;
  canvas.onpointerdown = (event) => {
    if (event.button !== 0) return;
    if (event.pointerType === "mouse") { down = { x: event.clientX, time: timeAt(event) }; view.dragging = true; canvas.setPointerCapture(event.pointerId); }
    if (event.pointerType !== "mouse" || !view.pinned) setCursor(view, timeAt(event));
  };
  canvas.onpointermove = (event) => {
    if (down && Math.abs(event.clientX - down.x) > EDGE) view.brush = [down.time, timeAt(event)];
    if (!view.pinned) setCursor(view, timeAt(event));
    else if (down) redraw(view);
  };
  canvas.onpointerup = (event) => {
    const chosen = view.brush;
    if (down && !chosen) { view.pinned = !view.pinned; setCursor(view, timeAt(event)); } // a click keeps the crosshair
    down = view.brush = null;
    if (chosen) zoom(Math.min(...chosen), Math.max(...chosen));
    settle(view);
  };
  canvas.onpointercancel = () => { down = view.brush = null; settle(view); };
  canvas.onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = (data.end - data.start) / (event.shiftKey ? 20 : 150), at = view.cursor ?? data.end;
    const half = (data.end - data.start) / 4, centre = view.cursor ?? (data.start + data.end) / 2;
    if (event.key === "ArrowLeft") setCursor(view, Math.max(data.start, at - step));
    else if (event.key === "ArrowRight") setCursor(view, Math.min(data.end, at + step));
    else if (event.key === "Escape") { view.pinned = false; setCursor(view, null); }
    else if (event.key === "+") zoom(centre - half, centre + half);
    else if (event.key === "-") zoom(centre - 4 * half, centre + 4 * half);
    else return;
    event.preventDefault();
  };
}

// --- building ------------------------------------------------------------------------------------------------------

// Returns the background of a swatch as the line is drawn.
function dashed(colour, dash) {
  let at = 0;
  const parts = dash.map((length, i) => `${i % 2 ? "transparent" : colour} ${at}px ${(at += length)}px`);
  return parts.length ? `repeating-linear-gradient(90deg, ${parts.join(", ")})` : colour;
}

function key(view, line, panel) {
  const button = element("button", view.hidden.has(line.name) ? "off" : ""), swatch = element("i", "line");
  const label = element("span");
  swatch.style.background = dashed(colourOf(line, view.colours), line.own ? [] : view.data.dashes[line.dash]);
  button.append(swatch, label);
  button.type = "button";
  button.title = "Hide or show";
  button.onclick = () => {
    if (!view.hidden.delete(line.name)) view.hidden.add(line.name);
    button.classList.toggle("off", view.hidden.has(line.name));
    build(view);
  };
  return [button, label];
}

function buildPanel(view, panel, zoom) {
  const box = element("section", "panel"), head = element("div", "head");
  head.append(element("b", "", panel.title), element("span", "note", panel.note));
  box.append(head);
  view.root.append(box);
  if (!panel.lines.some((line) => line.known.length)) { box.append(element("p", "empty", panel.empty)); return; }
  const keys = element("div", "keys"), place = { panel, labels: [] };
  for (const line of panel.lines) {
    const [button, label] = key(view, line, panel);
    keys.append(button);
    place.labels.push([line, label]);
  }
  if (panel.band) {
    const item = element("button"), swatch = element("i", panel.band_drawn ? "band" : "dashed");
    if (!panel.band_drawn) swatch.style.borderColor = view.colours.median;
    place.bandLabel = element("span");
    item.append(swatch, place.bandLabel);
    item.disabled = true;
    keys.append(item);
  }
  const canvas = element("canvas");
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", panel.label);
  place.canvas = canvas;
  box.append(keys, canvas);
  listen(view, place, zoom);
  view.places.push(place);
}

function drawCell(view, place) {
  const { panel, canvas, line } = place, { colours, data } = view;
  const [g, width] = prepare(canvas, panel.height);
  if (!width) return;
  const [low, high] = place.range;
  const x = (t) => ((t - data.start) / (data.end - data.start)) * width, y = (v) => panel.height - 3 - ((v - low) / (high - low)) * (panel.height - 18);
  if (panel.band) drawArea(g, panel.band, panel.band.low, panel.band.high, panel, x, y, colours.band, 0.38);
  drawLine(g, line, panel, x, y, line.outlier ? colours.device : colours.ink, line.outlier ? 2 : 1.4);
  for (const mark of data.marks) if (mark.time > data.start) { g.fillStyle = colours[mark.tone] ?? colours.muted; g.globalAlpha = 0.6; g.fillRect(x(mark.time), 0, 1, panel.height); g.globalAlpha = 1; }
  if (view.cursor !== null) { g.fillStyle = colours.ink; g.fillRect(x(view.cursor), 0, 1, panel.height); }
}

function buildGrid(view) {
  const grid = element("div", "grid"), names = view.data.columns;
  grid.style.setProperty("--columns", names.length);
  grid.append(element("span", "corner"), ...names.map((name) => element("span", "column", name)));
  for (const panel of view.panels) {
    const name = element("div", "name");
    name.append(element("b", "", panel.title), element("span", "", panel.note));
    grid.append(name);
    const scale = range(panel, new Set());
    for (const line of panel.lines) {
      const cell = element("a", line.outlier ? "cell outlier" : "cell"), canvas = element("canvas"), label = element("span");
      cell.href = line.href;
      cell.target = "_self";
      cell.setAttribute("aria-label", line.label);
      cell.append(canvas, label, element("em", "", line.short));
      const place = { panel, canvas, line, cell, range: scale, labels: [[{ ...line, name: "" }, label]] };
      canvas.onpointermove = (event) => {
        const box = canvas.getBoundingClientRect();
        setCursor(view, view.data.start + ((event.clientX - box.left) / box.width) * (view.data.end - view.data.start));
      };
      grid.append(cell);
      view.places.push(place);
    }
  }
  view.root.append(grid);
}

function build(view) {
  const focused = view.root.getRootNode().activeElement, at = [...view.root.querySelectorAll("canvas, button, a")].indexOf(focused);
  ahead = view.data.ahead;
  view.places = [];
  view.root.replaceChildren();
  view.colours = palette(view.root);
  view.root.classList.toggle("stale", view.data.stale);
  view.root.classList.toggle("two", view.data.layout === "two");
  view.line = null;
  if (view.data.layout === "grid") buildGrid(view);
  else {
    view.line = element("div", "marks");
    view.root.append(view.line);
    for (const panel of view.panels) buildPanel(view, panel, view.zoom);
  }
  for (const place of view.places) (place.cell ? drawCell : drawPanel)(view, place);
  write(view);
  if (at >= 0) [...view.root.querySelectorAll("canvas, button, a")][at]?.focus(); // the focus survives a refresh
}

export default function (component) {
  const root = component.parentElement.querySelector(".charts");
  if (root.fleetpulseView?.dragging) root.fleetpulseNext = () => start(root, component);
  else start(root, component);
  return () => root.fleetpulseEnd();
}

function start(root, { data, setTriggerValue }) {
  const kept = root.fleetpulseView;
  const view = { root, data, panels: data.panels.map(unpack), hidden: kept?.hidden ?? new Set(), cursor: kept?.cursor ?? null, pinned: kept?.pinned ?? false, dragging: false, brush: null, waiting: 0 };
  root.fleetpulseEnd?.(); // a refresh calls this again without ending the previous call
  root.fleetpulseView = view;
  view.zoom = (from, to) => { if (to - from >= 30000) setTriggerValue("range", [Math.round(from), Math.round(to)]); };
  build(view);
  let width = root.clientWidth;
  const resized = new ResizeObserver(() => { if (root.clientWidth !== width) { width = root.clientWidth; redraw(view); } });
  resized.observe(root);
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  const repaint = () => { if (view.dragging) root.fleetpulseNext ??= () => { build(view); }; else build(view); };
  scheme.addEventListener("change", repaint);
  // the crosshair stays on the way from a chart to the links above
  root.onpointerleave = (event) => { if (event.pointerType === "mouse" && !view.dragging && !view.pinned) setCursor(view, null); };
  const follow = (event) => { if (event.detail.from !== root && !view.pinned) setCursor(view, event.detail.time, false); };
  window.addEventListener("fleetpulse-crosshair", follow);
  root.fleetpulseEnd = () => {
    resized.disconnect();
    scheme.removeEventListener("change", repaint);
    window.removeEventListener("fleetpulse-crosshair", follow);
    cancelAnimationFrame(view.waiting);
  };
}
