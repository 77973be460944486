// Names come from the fleet: they are set as text, never as markup. Cells are drawn into an image of one pixel each,
// which the canvas scales up.
const MOST_HEIGHT = 420, LEAST_ROW = 3, LABEL_WIDTH = 74; // px; chosen: a strip and the slow ranks fit 1440 x 900
// lateness -> colour: lightness falls with lateness, so that it is readable in grey; dark mode rises instead
const LIGHT = [[-0.1, [86, 180, 233]], [0, [222, 230, 236]], [0.03, [240, 205, 120]], [0.1, [230, 159, 0]], [0.2, [213, 94, 0]], [0.4, [92, 30, 0]]];
const DARK = [[-0.1, [40, 96, 136]], [0, [36, 47, 57]], [0.03, [92, 72, 30]], [0.1, [176, 122, 0]], [0.2, [232, 89, 12]], [0.4, [255, 226, 205]]];

function isDark(element) {
  const probe = document.createElement("span");
  probe.style.color = "light-dark(rgb(0,0,0), rgb(255,255,255))";
  element.append(probe);
  const dark = getComputedStyle(probe).color === "rgb(255, 255, 255)";
  probe.remove();
  return dark;
}

function mix(stops, value) {
  if (value <= stops[0][0]) return stops[0][1];
  for (let i = 1; i < stops.length; i++) {
    const [to, high] = stops[i], [from, low] = stops[i - 1];
    if (value <= to) return low.map((c, k) => Math.round(c + (high[k] - c) * ((value - from) / (to - from))));
  }
  return stops[stops.length - 1][1];
}

function palette(data, dark) {
  const found = new Uint32Array(256), bytes = new Uint8Array(found.buffer);
  for (let level = 1; level < 256; level++) {
    bytes.set([...mix(dark ? DARK : LIGHT, data.low + (level - 1) * data.step), 255], level * 4);
  }
  return found; // level 0 stays transparent: no value
}

function decode(text) { return Uint8Array.from(atob(text), (c) => c.charCodeAt(0)); }

function draw(view) {
  const { canvas, data, levels } = view;
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  if (!width) return;
  const row = Math.max(LEAST_ROW, Math.min(18, Math.floor(MOST_HEIGHT / Math.max(1, data.rows))));
  const height = Math.min(Math.max(MOST_HEIGHT, 24), Math.max(24, row * data.rows));
  const label = width > 500 ? LABEL_WIDTH : 46;
  Object.assign(view, { label, height, cellHeight: height / data.rows, cellWidth: (width - label) / data.columns });
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  hatch(g, label, width, height, view.colour.noData);
  const dark = isDark(view.strip), colours = palette(data, dark);
  const image = new ImageData(data.columns, data.rows), pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < pixels.length; i++) pixels[i] = colours[levels[i]];
  const small = document.createElement("canvas");
  small.width = data.columns;
  small.height = data.rows;
  small.getContext("2d").putImageData(image, 0, 0);
  g.imageSmoothingEnabled = false;
  g.drawImage(small, label, 0, width - label, height);
  drawLabels(g, view);
  if (data.highlight >= 0) frame(g, view, data.highlight, view.colour.accent);
  if (view.focus) frame(g, view, view.focus.row, view.colour.ink, view.focus.column);
  drawRamp(view, dark);
}

function hatch(g, left, width, height, colour) {
  g.strokeStyle = colour;
  g.globalAlpha = 0.35;
  g.lineWidth = 1;
  g.save();
  g.beginPath();
  g.rect(left, 0, width - left, height);
  g.clip();
  g.beginPath();
  for (let x = left - height; x < width; x += 9) { g.moveTo(x, height); g.lineTo(x + height, 0); }
  g.stroke();
  g.restore();
  g.globalAlpha = 1;
}

function drawLabels(g, view) {
  const { data, cellHeight, label } = view;
  g.font = "11px 'Source Sans', 'Source Sans Pro', sans-serif";
  g.textBaseline = "middle";
  g.fillStyle = view.colour.muted;
  const every = Math.max(1, Math.ceil(14 / cellHeight));
  for (let row = 0; row < data.rows; row += every) {
    const y = Math.min(view.height - 5, Math.max(5, (row + 0.5) * cellHeight)); // whole letters at both ends
    g.fillText(data.labels[row], 0, y, label - 6);
  }
}

function frame(g, view, row, colour, column) {
  const { label, cellHeight, cellWidth, data } = view;
  g.strokeStyle = colour;
  g.lineWidth = 2;
  const x = column === undefined ? label : label + column * cellWidth;
  g.strokeRect(x, row * cellHeight, column === undefined ? data.columns * cellWidth : Math.max(3, cellWidth), Math.max(3, cellHeight));
}

function drawRamp(view, dark) {
  const ramp = view.strip.querySelector(".ramp"), g = ramp.getContext("2d");
  const top = view.data.low + 250 * view.data.step;
  for (let x = 0; x < ramp.width; x++) {
    g.fillStyle = `rgb(${mix(dark ? DARK : LIGHT, view.data.low + (x / ramp.width) * (top - view.data.low)).join(",")})`;
    g.fillRect(x, 0, 1, ramp.height);
  }
  view.strip.querySelector(".low").textContent = percent(view.data.low);
  view.strip.querySelector(".high").textContent = `${percent(top)} and more`;
}

function percent(value) { return `${value > 0 ? "+" : ""}${Math.round(value * 100)} %`; }

function text(view, row, column) {
  const { data, levels } = view;
  const level = levels[row * data.columns + column];
  const who = data.perRow > 1 ? `${data.labels[row]} and ${data.perRow - 1} after it, the latest` : data.labels[row];
  const when = new Date(data.start + column * data.widthMs + data.ahead).toISOString().slice(11, 19) + (data.ahead ? "" : "Z");
  const late = level ? `${percent(data.low + (level - 1) * data.step)} against its stage` : "no value";
  return [`${who}`, `${when}: ${late}`, data.perRow > 1 ? "click: show these ranks" : "click: open its GPU"];
}

function at(view, event) {
  const box = view.canvas.getBoundingClientRect();
  const row = Math.floor((event.clientY - box.top) / view.cellHeight);
  const column = Math.floor((event.clientX - box.left - view.label) / view.cellWidth);
  if (row < 0 || row >= view.data.rows) return null;
  return { row, column: Math.max(0, Math.min(view.data.columns - 1, column)) };
}

function showTip(view, cell) {
  const { tip, strip } = view;
  if (!cell) { tip.style.display = "none"; return; }
  tip.textContent = text(view, cell.row, cell.column).join("\n");
  tip.style.display = "block";
  const x = view.label + cell.column * view.cellWidth;
  tip.style.left = `${Math.max(0, Math.min(x, strip.clientWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${(cell.row + 1) * view.cellHeight + 6}px`;
}

// Returns the newest late cell of the row after the focus in the table of late ranks, the worst first: a row with one
// noisy cell is not in the table.
function nextLate(view) {
  const { data, levels } = view, least = (data.late - data.low) / data.step + 1, rows = data.lateRows;
  if (!rows.length) return view.focus;
  const row = rows[(rows.indexOf(view.focus ? view.focus.row : -1) + 1) % rows.length];
  const cells = levels.subarray(row * data.columns, (row + 1) * data.columns);
  return { row, column: Math.max(0, cells.findLastIndex((level) => level >= least)) };
}

function onKey(view, event, open) {
  if (event.ctrlKey || event.metaKey || event.altKey || !view.data.rows) return;
  const move = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
  const now = view.focus || { row: 0, column: view.data.columns - 1 };
  if (move) {
    view.focus = {
      row: Math.max(0, Math.min(view.data.rows - 1, now.row + (view.focus ? move[0] : 0))),
      column: Math.max(0, Math.min(view.data.columns - 1, now.column + (view.focus ? move[1] : 0))),
    };
  } else if (event.key === "n" || event.key === "N") view.focus = nextLate(view);
  else if (event.key === "Escape") { showTip(view, null); return; }
  else if (event.key === "Enter" && view.focus) { open(view.focus.row); return; }
  else return;
  event.preventDefault();
  draw(view);
  showTip(view, view.focus);
  if (view.focus) view.said.textContent = text(view, view.focus.row, view.focus.column).join(", ");
}

function colours(element) {
  const probe = document.createElement("span");
  element.append(probe);
  const get = (name) => { probe.style.color = `var(--fp-${name})`; return getComputedStyle(probe).color; };
  const found = { noData: get("no-data"), muted: get("muted"), ink: get("ink"), accent: get("accent") };
  probe.remove();
  return found;
}

function drawTimes(view) {
  const box = view.strip.querySelector(".times");
  const left = ([column]) => Math.min(box.clientWidth - 60, view.label + column * view.cellWidth);
  const last = view.data.times[view.data.times.length - 1];
  const apart = view.data.times.filter((time) => time === last || left(last) - left(time) >= 60); // no two over another
  box.replaceChildren(...apart.map(([column, name]) => {
    const made = document.createElement("span");
    made.textContent = name;
    const x = view.label + column * view.cellWidth;
    if (x + 60 > box.clientWidth) made.style.right = "0"; // a label at the end is not cut off
    else made.style.left = `${x}px`;
    return made;
  }));
}

export default function (component) {
  const { parentElement, data } = component;
  const strip = parentElement.querySelector(".strip"), canvas = strip.querySelector("canvas");
  const view = {
    strip, canvas, data, levels: decode(data.levels), tip: strip.querySelector(".tip"),
    said: strip.querySelector(".said"), focus: strip.fleetpulseFocus || null, // the focus survives a refresh
  };
  const open = (row) => {
    const to = new URL(data.open, location.href);
    if (data.perRow > 1) to.searchParams.set("first", data.firstRank + row * data.perRow);
    else if (data.gpus[row]) to.searchParams.set("entity", data.gpus[row]);
    else return;
    openAddress(strip, to.href);
  };
  const redraw = () => { view.colour = colours(strip); draw(view); if (view.cellWidth) drawTimes(view); };
  canvas.classList.toggle("stale", data.stale);
  canvas.onmousemove = (event) => showTip(view, at(view, event));
  canvas.onmouseleave = () => showTip(view, null);
  canvas.onblur = () => showTip(view, null);
  canvas.onclick = (event) => { const cell = at(view, event); if (cell) open(cell.row); };
  canvas.onkeydown = (event) => { onKey(view, event, open); strip.fleetpulseFocus = view.focus; };
  if (strip.fleetpulseEnd) strip.fleetpulseEnd(); // a refresh calls this again without ending the previous call
  const resized = new ResizeObserver(redraw);
  resized.observe(strip);
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", redraw);
  redraw();
  strip.fleetpulseEnd = () => { resized.disconnect(); scheme.removeEventListener("change", redraw); };
  return strip.fleetpulseEnd;
}
